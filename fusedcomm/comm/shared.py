"""Flags and chunks between ranks of one machine: every rank maps the others' buffers in /dev/shm.

`FlagTransport` for CPU tensors. A thread of each rank copies its chunks into the peers' buffers and raises their flags
there; interpreted kernels wait for flags and raise them. So the protocol runs between real processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from fusedcomm.comm.buffers import (
    NUM_BUFFERS,
    Buffer,
    Lane,
    check_chunks,
    gather_bytes,
    rounded_up,
    scatter_bytes,
)
from fusedcomm.comm.channel import Channel
from fusedcomm.comm.pool import STAGING
from fusedcomm.comm.record import span
from fusedcomm.comm.ring import chunk_bounds
from fusedcomm.comm.shared_memory import map_everywhere
from fusedcomm.comm.worker import Worker
from fusedcomm.errors import PeerError
from fusedcomm.kernels.await_rows import await_rows
from fusedcomm.kernels.flags import Chunks, read_status
from fusedcomm.kernels.host_flags import is_up, raise_flag

# Between two looks at a flag by a thread, which must leave the processor to those who will raise it.
_LOOK_S = 50e-6
_CALIBRATION_POLLS = 200


class _Lane(Lane):
    """A lane whose epochs the host counts."""

    def __init__(self, num_bytes: int, by_rank: Sequence[Sequence[Buffer]], epoch: int) -> None:
        super().__init__(num_bytes, by_rank)
        self._epochs = [epoch] * NUM_BUFFERS

    def next_turn(self) -> tuple[list[Buffer], int]:
        """For the next call: the buffer of every rank, and its epoch."""
        turn, buffers = self.take_turn()
        self._epochs[turn] = _wrapped(self._epochs[turn] + 1)
        return buffers, self._epochs[turn]


class SharedTransport:
    """`FlagTransport` of one group over shared memory; its calls are calls of the group's `Channel`.

    Args:
        first_epoch: that of all buffers before the first call.
    """

    name = "shared"
    communication_sms = 0

    def __init__(self, channel: Channel, first_epoch: int = 0) -> None:
        self.rank, self.world = channel.rank, channel.world
        self.channel = channel
        self.timeout_s = channel.timeout_s
        self.status = torch.zeros(4, dtype=torch.int32)
        self._first_epoch = first_epoch
        self._lanes: dict[str, _Lane] = {}
        self._error: Exception | None = None

    def gather(self, op: str, signature: str, shard: Tensor, sizes: Sequence[int], pieces: int) -> SharedGather:
        """As `FlagTransport.gather`.

        Raises:
            PeerError: a peer calls something else, is gone or late; in the first call of a size, else `finish` does.
            ValueError: the ranks do not share a machine, or it has too little shared memory.
        """
        lane = self._lane(op, "gather", gather_bytes(shard, sizes))
        return SharedGather(self, lane, op, signature, shard, sizes, pieces)

    def scatter(
        self, op: str, signature: str, like: Tensor, features: int, sizes: Sequence[int], pieces: int
    ) -> SharedScatter:
        """As `FlagTransport.scatter`; raises what `gather` does."""
        lane = self._lane(op, "scatter", scatter_bytes(like, features, sizes))
        return SharedScatter(self, lane, op, signature, like, features, sizes, pieces)

    def fail(self, error: Exception) -> None:
        """The ranks are out of step: no later call can be trusted."""
        self._error = error

    def _lane(self, op: str, kind: str, num_bytes: int) -> _Lane:
        if self._error is not None:
            rank, chunk = (self._error.rank, self._error.chunk) if isinstance(self._error, PeerError) else (-1, -1)
            raise PeerError(op, rank, chunk, f"an earlier call of this group failed ({self._error}); make a new group")
        lane = self._lanes.get(kind)
        if lane is None or lane.num_bytes < num_bytes:
            # All ranks come to this together: a call's shapes are the same on all of them.
            num_bytes = rounded_up(num_bytes)
            self.channel.check_same(op, f"{op}: {kind} in {num_bytes} bytes of shared memory", torch.device("cpu"))
            by_rank = map_everywhere(self.channel, op, num_bytes, self._first_epoch)
            lane = self._lanes[kind] = _Lane(num_bytes, by_rank, self._first_epoch)
        return lane


class _SharedFlight:
    """What both kinds of `Flight` have in common."""

    def __init__(
        self, transport: SharedTransport, lane: _Lane, op: str, signature: str, sizes: Sequence[int], pieces: int
    ) -> None:
        check_chunks(op, transport.world, pieces)
        self.status = transport.status
        self.timeout_us = num_polls(transport.timeout_s)
        self._transport = transport
        self._op = op
        self._rank, self._world, self._pieces = transport.rank, transport.world, pieces
        self._bounds = chunk_bounds(sizes, pieces)
        self._buffers, self._epoch = lane.next_turn()
        channel = transport.channel
        self._headers = channel.announce(op, channel.next_call(), f"{signature}, epoch {self._epoch}")
        self._error: Exception | None = None
        self._sent = threading.Event()

    def _chunks(self, bounds: Sequence[int], flags: Tensor) -> Chunks:
        return Chunks(
            self._rank,
            self._world,
            starts=torch.tensor(bounds, dtype=torch.int64),
            flags=flags,
            epoch=torch.tensor([self._epoch], dtype=torch.int32),
        )

    @property
    def _arrived(self) -> Tensor:
        """The flags that peers raise."""
        return self._buffers[self._rank].flags[: self._world * self._pieces]

    def _chunks_of(self, rank: int) -> list[int]:
        """The chunks of that rank's shard that have rows."""
        return [
            chunk
            for chunk in range(rank * self._pieces, (rank + 1) * self._pieces)
            if self._bounds[chunk] < self._bounds[chunk + 1]
        ]

    def _run(self, push: Callable[[], None]) -> None:
        """The sending thread's part of the call."""
        try:
            push()
            # Looked at last: a peer that is late, or calls something else, does not keep our rows from the others.
            self._headers.check()
        except Exception as error:
            self._error = error
            # Lets our kernels go on, in vain: `finish` raises this.
            self._arrived.fill_(self._epoch)

    def _deliver(self, peer: int, chunk: int, rows: Tensor, into: Tensor) -> None:
        with span("transfer", f"{self._op} to {peer}", rows.nbytes):
            into.copy_(rows)
            raise_flag(self._buffers[peer].flags, chunk, self._epoch)

    def _await_done(self, peer: int) -> None:
        """The reuse barrier: return when `peer` has read what the call before left in the buffer of this one."""
        self._await(self._buffers[self._rank].done, peer, _wrapped(self._epoch - 1), peer, "did not finish its call")

    def _await(self, flags: Tensor, index: int, epoch: int, peer: int, what: str) -> None:
        deadline_s = time.monotonic() + self._transport.timeout_s
        while not is_up(flags, index, epoch):
            if time.monotonic() > deadline_s:
                what = f"rank {peer} of the group {what} of epoch {epoch} in {self._transport.timeout_s:g} s"
                raise PeerError(self._op, peer, -1, what)
            time.sleep(_LOOK_S)

    def finish(self) -> None:
        """As `Flight.finish`; our own rows are all sent then."""
        with span("wait", f"{self._op} sent"):
            self._sent.wait()
        error = self._error or self._timeout()
        if error is not None:
            self._transport.fail(error)
            raise error
        # Flags that this call had no use for keep up, so that none is ever half of all epochs behind.
        self._buffers[self._rank].flags.fill_(self._epoch)
        for buffer in self._buffers:
            raise_flag(buffer.done, self._rank, self._epoch)

    def _timeout(self) -> PeerError | None:
        timeout = read_status(self.status)
        if timeout is None:
            return None
        what = f"rank {timeout.rank} of the group did not deliver chunk {timeout.chunk} of epoch {timeout.epoch}"
        limit = f"in {self._transport.timeout_s:g} s ({timeout.op} kernel)"
        return PeerError(self._op, timeout.rank, timeout.chunk, f"{what} {limit}")


class SharedGather(_SharedFlight):
    """`GatherFlight` over shared memory."""

    def __init__(
        self,
        transport: SharedTransport,
        lane: _Lane,
        op: str,
        signature: str,
        shard: Tensor,
        sizes: Sequence[int],
        pieces: int,
    ) -> None:
        super().__init__(transport, lane, op, signature, sizes, pieces)
        shape = (sum(sizes), shard.shape[1])
        self._by_rank = [buffer.view(shape, shard.dtype) for buffer in self._buffers]
        self.x_full = self._by_rank[self._rank]
        self.chunks = self._chunks(self._bounds, self._arrived)
        start = sum(sizes[: self._rank])
        self.x_full[start : start + len(shard)] = shard
        for chunk in self._chunks_of(self._rank):
            raise_flag(self._arrived, chunk, self._epoch)
        self._sent = _pusher().submit(lambda: self._run(self._push))

    def _push(self) -> None:
        for distance in range(1, self._world):
            peer = (self._rank - distance) % self._world
            own = self._chunks_of(self._rank)
            if own:
                self._await_done(peer)
            for chunk in own:
                rows = slice(self._bounds[chunk], self._bounds[chunk + 1])
                self._deliver(peer, chunk, self.x_full[rows], self._by_rank[peer][rows])


class SharedScatter(_SharedFlight):
    """`ScatterFlight` over shared memory."""

    def __init__(
        self,
        transport: SharedTransport,
        lane: _Lane,
        op: str,
        signature: str,
        like: Tensor,
        features: int,
        sizes: Sequence[int],
        pieces: int,
    ) -> None:
        super().__init__(transport, lane, op, signature, sizes, pieces)
        rank, world = self._rank, self._world
        self._by_rank = [buffer.view((world, size, features), like.dtype) for buffer, size in zip(self._buffers, sizes)]
        self.summands = self._by_rank[rank]
        start = self._bounds[rank * pieces]
        own = [bound - start for bound in self._bounds[rank * pieces : (rank + 1) * pieces]]
        bounds = [source * sizes[rank] + bound for source in range(world) for bound in own]
        self.arrivals = self._chunks([*bounds, world * sizes[rank]], self._arrived)
        self.y_partial = STAGING.take((sum(sizes), features), like)
        behind = torch.full((world * pieces,), _wrapped(self._epoch - 1), dtype=torch.int32)
        self.chunks = self._chunks(self._bounds, behind)
        self.counters = torch.zeros(world * pieces, dtype=torch.int32)

    def produce(self, launch: Callable[[], object]) -> None:
        """As `ScatterFlight.produce`: the kernel runs in this thread, while the other one sends."""
        self._sent = _pusher().submit(lambda: self._run(self._push))
        launch()

    def _push(self) -> None:
        first = self._rank * self._pieces
        for distance in range(1, self._world + 1):
            # The owner of the chunks that the kernel finishes next; our own come last.
            owner = (self._rank + distance) % self._world
            start = self._bounds[owner * self._pieces]
            chunks = self._chunks_of(owner)
            if chunks:
                self._await_done(owner)
            for chunk in chunks:
                self._await(self.chunks.flags, chunk, self._epoch, self._rank, f"did not compute chunk {chunk}")
                rows = slice(self._bounds[chunk], self._bounds[chunk + 1])
                into = self._by_rank[owner][self._rank, rows.start - start : rows.stop - start]
                self._deliver(owner, first + chunk % self._pieces, self.y_partial[rows], into)

    def finish(self) -> None:
        super().finish()
        STAGING.give(self.y_partial)


@cache
def _pusher() -> Worker:
    return Worker("fusedcomm-pusher")


def _wrapped(epoch: int) -> int:
    """The epoch as an int32 holds it."""
    return (epoch + 2**31) % 2**32 - 2**31


def num_polls(timeout_s: float) -> int:
    """How often an interpreted kernel may look at a flag, so that it waits for about as long."""
    return max(1, min(2**31 - 1, round(timeout_s / _poll_s())))


@cache
def _poll_s() -> float:
    """How long one look takes in the interpreter of this process, at its fastest."""
    words = {name: torch.zeros(1, dtype=torch.int32) for name in ("flags", "epoch")}
    chunks = Chunks(0, 1, starts=torch.tensor([0, 1]), **words)
    chunks.epoch.fill_(1)
    seconds = []
    for _ in range(3):
        start_s = time.perf_counter()
        status = torch.zeros(4, dtype=torch.int32)
        await_rows(chunks, 1, status=status, timeout_us=_CALIBRATION_POLLS)
        seconds.append(time.perf_counter() - start_s)
    return min(seconds) / _CALIBRATION_POLLS
