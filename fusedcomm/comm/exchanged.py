"""Flags between ranks that exchange messages, over any network: NCCL for CUDA tensors, gloo for CPU tensors.

Rows travel as messages of the group's own backend (`comm.transport.Exchange`), and who receives one raises its flag
himself: by a copy on the stream that waited for it, or in the thread that did. So every buffer is written by its owner
alone, in the order of its calls, and nobody has to ask whether a peer's is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fusedcomm.comm.buffers import Buffer, check_chunks, gather_bytes, part_bytes, scatter_bytes, split_buffer
from fusedcomm.comm.channel import Channel, refuse_in_capture
from fusedcomm.comm.flights import BufferedGather, BufferedScatter, FlightTransport
from fusedcomm.comm.lanes import Rows, Turn
from fusedcomm.comm.places import Mark, RankStreams
from fusedcomm.comm.ring import Step
from fusedcomm.comm.threads import Threads
from fusedcomm.comm.transport import Exchange, open_exchange
from fusedcomm.errors import PeerError

_ALIGNMENT = 256
# NCCL moves rows by programs on SMs, one for each of its channels, of which it takes 16 or 32 between two ranks
# (`NCCL_MAX_P2P_NCHANNELS` bounds them). What finds no SM follows when others are through.
_NCCL_SMS = 16
# From sm_90 on it starts four at a time (`NCCL_CGA_CLUSTER_SIZE`), and only on SMs of one GPC, of which a GPU has up to
# eight: with fewer than 25 SMs left no GPC may have four of them, and a kernel that waits for rows keeps the others.
_NCCL_SMS_IN_CLUSTERS = 32


class ExchangedTransport(FlightTransport):
    """`FlagTransport` of one group over messages; its calls are calls of the group's `Channel`."""

    name = "c10d"

    def __init__(self, channel: Channel, op: str, device: torch.device, first_epoch: int = 0) -> None:
        on_gpu = channel.backend_of(op, device) == "nccl"
        place = RankStreams(device, channel.timeout_s) if on_gpu else Threads(channel.timeout_s)
        super().__init__(channel.rank, channel.world, device, place, first_epoch)
        self.communication_sms = _nccl_sms(device) if on_gpu else 0
        self._channel = channel
        # Kept to the end: a captured graph replays its calls in the buffers that it was captured with.
        self._memory: list[Tensor] = []

    def gather(self, op: str, signature: str, shard: Tensor, sizes: Sequence[int], pieces: int) -> ExchangedGather:
        """As `FlagTransport.gather`; raises what `take_turn` does."""
        check_chunks(op, self.world, pieces)
        turn = self.take_turn(op, "gather", signature, gather_bytes(shard, sizes))
        return ExchangedGather(self, op, turn, shard, sizes, pieces)

    def scatter(
        self, op: str, signature: str, like: Tensor, features: int, sizes: Sequence[int], pieces: int
    ) -> ExchangedScatter:
        """As `FlagTransport.scatter`; raises what `take_turn` does."""
        check_chunks(op, self.world, pieces)
        turn = self.take_turn(op, "scatter", signature, scatter_bytes(like, features, sizes))
        return ExchangedScatter(self, op, turn, like, features, sizes, pieces)

    def take_turn(self, op: str, kind: str, signature: str, num_bytes: int) -> Turn:
        """As `FlightTransport.take_turn`.

        Raises:
            PeerError: an earlier call has failed. That a peer calls something else is found where messages are sent.
            ValueError: the call is captured but has not run before.
        """
        self.refuse_if_failed(op)
        if not (self.has_room(kind, num_bytes) and self._channel.has_agreed(signature)):
            refuse_in_capture(op, self._device, signature)
        exchange = partial(
            open_exchange, self._channel.group, op, signature, device=self._device, overlapped=True, paced=False
        )
        return replace(self.lane(op, kind, num_bytes).take(), exchange=exchange)

    def make_buffer(self, op: str, kind: str, num_bytes: int) -> tuple[tuple[()], Buffer]:
        whole = torch.empty(sum(part_bytes(self.world, num_bytes, _ALIGNMENT)), dtype=torch.uint8, device=self._device)
        mine = split_buffer(whole, self.world, num_bytes, _ALIGNMENT)
        mine.flags.fill_(self._first_epoch)
        self._memory.append(whole)
        # No peer is told when it has been read.
        return (), mine


class ExchangedGather(BufferedGather):
    """Our rows are sent to all peers, at once; theirs come in as they do."""

    def _send(self, after: Mark) -> None:
        steps = []
        for distance in range(1, self._world):
            dst, src = (self._rank - distance) % self._world, (self._rank + distance) % self._world
            for piece in range(self._pieces):
                steps.append(Step(distance, dst, self._chunk(self._rank, piece), src, self._chunk(src, piece)))
        self._steps = steps
        outgoing = [None if step.send is None else self.x_full[step.send.start : step.send.stop] for step in steps]
        incoming = [None if step.recv is None else self.x_full[step.recv.start : step.recv.stop] for step in steps]
        self._exchange = _start(self._transport, self._turn, steps, outgoing, incoming)
        super()._send(after)

    def _push(self) -> None:
        for index in range(len(self._steps)):
            self._exchange.send(index)
        for index, step in enumerate(self._steps):
            if step.recv is not None:
                self._exchange.wait(index)
                self._place.raise_flag(self._arrived, step.src * self._pieces + index % self._pieces, self._turn.epoch)
        self._exchange.finish()


class ExchangedScatter(BufferedScatter):
    """Each chunk is sent to its owner when the kernel has announced it."""

    def _send(self, after: Mark) -> None:
        steps, own = [], self._bounds[self._rank * self._pieces]
        for distance in range(1, self._world):
            dst, src = (self._rank + distance) % self._world, (self._rank - distance) % self._world
            for piece in range(self._pieces):
                steps.append(Step(distance, dst, self._chunk(dst, piece), src, self._chunk(self._rank, piece)))
        self._steps = steps
        outgoing = [None if step.send is None else self.y_partial[step.send.start : step.send.stop] for step in steps]
        incoming = [
            None if step.recv is None else self.summands[step.src, step.recv.start - own : step.recv.stop - own]
            for step in steps
        ]
        self._exchange = _start(self._transport, self._turn, steps, outgoing, incoming)
        super()._send(after)

    def _push(self) -> None:
        pieces, epoch = self._pieces, self._turn.epoch
        for index, step in enumerate(self._steps):
            if step.send is not None:
                self._place.await_chunk(self._op, self.chunks, step.dst * pieces + index % pieces, self.status)
            self._exchange.send(index)
        own = self._bounds[self._rank * pieces]
        for chunk, rows in self._chunks_of(self._rank):
            self._place.await_chunk(self._op, self.chunks, chunk, self.status)
            into = self.summands[self._rank, rows.start - own : rows.stop - own]
            self._place.copy(f"{self._op} own", self.y_partial[rows], into)
            self._place.raise_flag(self._arrived, chunk, epoch)
        for index, step in enumerate(self._steps):
            if step.recv is not None:
                self._exchange.wait(index)
                self._place.raise_flag(self._arrived, step.src * pieces + index % pieces, epoch)
        self._exchange.finish()


def _nccl_sms(device: torch.device) -> int:
    """How many SMs a kernel that waits must leave, so that NCCL's programs always find some."""
    has_clusters = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return _NCCL_SMS_IN_CLUSTERS if has_clusters else _NCCL_SMS


def _start(transport: FlightTransport, turn: Turn, steps: Sequence[Step], outgoing: Rows, incoming: Rows) -> Exchange:
    """In the caller's thread, since it counts the group's calls."""
    assert turn.exchange is not None, "`ExchangedTransport.take_turn` gives it"
    exchange = turn.exchange(steps, outgoing, incoming)
    try:
        exchange.start()
    except PeerError as error:
        transport.fail(error)
        raise
    return exchange
