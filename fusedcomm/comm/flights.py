"""The flights of fused calls, whoever carries the rows and wherever they run.

A *place* (`comm.places`) says what runs where: on a GPU all is enqueued on streams, whose order does the work; on a CPU
a thread sends, while the kernels run in the caller's. Here is what they do: own rows into our buffer, each peer's after
it has said that its buffer is free, the chunk's flag behind it, and at the end the word that we have read ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fusedcomm.comm.buffers import Buffer, check_chunks, gather_bytes, rounded_up, scatter_bytes
from fusedcomm.comm.lanes import Lane, Turn
from fusedcomm.comm.places import Mark, Place
from fusedcomm.comm.pool import STAGING
from fusedcomm.comm.record import wait_span
from fusedcomm.comm.ring import Chunk, chunk_bounds
from fusedcomm.comm.transport import GatherFlight, ScatterFlight
from fusedcomm.errors import PeerError
from fusedcomm.kernels.flags import Chunks, Timeout, read_status


class FlightTransport(ABC):
    """`FlagTransport` of these flights; whose buffers they are, and what ranks agree on, is up to the subclass."""

    name: str
    reason: str = ""
    communication_sms: int

    def __init__(self, rank: int, world: int, device: torch.device, place: Place, first_epoch: int) -> None:
        self.rank, self.world = rank, world
        self.place = place
        self.status = torch.zeros(4, dtype=torch.int32, device=device)
        self._device = device
        # A GPU's status as it was when the latest flight whose kernels have all run was finished.
        self._known_status = torch.zeros(4, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._error: Exception | None = None
        self._first_epoch = first_epoch
        self._lanes: dict[str, Lane] = {}
        # Kept: to make one on a GPU, the host would have to wait for the stream.
        self._starts: dict[tuple[int, ...], Tensor] = {}

    def gather(self, op: str, signature: str, shard: Tensor, sizes: Sequence[int], pieces: int) -> GatherFlight:
        """As `FlagTransport.gather`; raises what `take_turn` does."""
        check_chunks(op, self.world, pieces)
        turn = self.take_turn(op, "gather", signature, gather_bytes(shard, sizes))
        return PushedGather(self, op, turn, shard, sizes, pieces)

    def scatter(
        self, op: str, signature: str, like: Tensor, features: int, sizes: Sequence[int], pieces: int
    ) -> ScatterFlight:
        """As `FlagTransport.scatter`; raises what `take_turn` does."""
        check_chunks(op, self.world, pieces)
        turn = self.take_turn(op, "scatter", signature, scatter_bytes(like, features, sizes))
        return PushedScatter(self, op, turn, like, features, sizes, pieces)

    @abstractmethod
    def take_turn(self, op: str, kind: str, signature: str, num_bytes: int) -> Turn:
        """What the next call of a kind uses, with room for so many bytes."""

    @abstractmethod
    def make_buffer(self, op: str, kind: str, num_bytes: int) -> tuple[Sequence[Buffer], Buffer]:
        """Another buffer on every rank, all of which come to this together, as in `Turn`."""

    def has_room(self, kind: str, num_bytes: int) -> bool:
        """Whether the next call of a kind finds a buffer of that size."""
        lane = self._lanes.get(kind)
        return lane is not None and num_bytes <= lane.num_bytes and not lane.is_short

    def lane(self, op: str, kind: str, num_bytes: int) -> Lane:
        """Those of a kind, with room for the next call. A call's shapes are the same on all ranks."""
        lane = self._lanes.get(kind)
        if lane is None or lane.num_bytes < num_bytes:
            lane = self._lanes[kind] = Lane(rounded_up(num_bytes), self._first_epoch, self.status)
        while lane.is_short:
            # Later calls, and other threads, write to what is made here, whatever the mode of this call.
            with torch.inference_mode(False):
                lane.add(*self.make_buffer(op, kind, lane.num_bytes))
        return lane

    def starts(self, bounds: Sequence[int]) -> Tensor:
        """The bounds on the device."""
        key = tuple(bounds)
        if key not in self._starts:
            self._starts[key] = torch.tensor(bounds, dtype=torch.int64, device=self._device)
        return self._starts[key]

    def fail(self, error: Exception) -> None:
        """The ranks are out of step: no later call can be trusted."""
        self._error = self._error or error

    def refuse_if_failed(self, op: str) -> None:
        """As `FlagTransport.refuse_if_failed`."""
        if self._error is None and self._known_status[0]:
            self.check()
        if self._error is not None:
            rank, chunk = (self._error.rank, self._error.chunk) if isinstance(self._error, PeerError) else (-1, -1)
            raise PeerError(op, rank, chunk, f"an earlier call of this group failed ({self._error}); make a new group")

    def check(self) -> None:
        """PeerError if a kernel of a call so far has waited in vain; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        timeout = read_status(self.status)
        if timeout is not None:
            self.fail(self._timeout_error(timeout))
        if self._error is not None:
            raise self._error

    def examine(self) -> None:
        """As `check`, when a flight ends; on a GPU the status is on its way from then on, and nobody waits for it."""
        if self._device.type == "cpu":
            self.check()
        else:
            self._known_status.copy_(self.status, non_blocking=True)

    def _timeout_error(self, timeout: Timeout) -> PeerError:
        what = f"rank {timeout.rank} of the group did not deliver chunk {timeout.chunk} of epoch {timeout.epoch}"
        return PeerError(timeout.op, timeout.rank, timeout.chunk, f"{what} in time ({timeout.op} kernel)")


class _Flight(ABC):
    """What both kinds of `Flight` have in common."""

    def __init__(self, transport: FlightTransport, op: str, turn: Turn, sizes: Sequence[int], pieces: int) -> None:
        self.status = transport.status
        self._op, self._transport, self._turn = op, transport, turn
        self._place = transport.place
        self.timeout_us = self._place.timeout_us
        self._rank, self._world, self._pieces = transport.rank, transport.world, pieces
        self._bounds = chunk_bounds(sizes, pieces)
        # What each peer has read of its own such buffer, as a chunk.
        read = self._chunks(range(self._world + 1), turn.mine.done)
        self._read = replace(read, epoch=turn.before)
        self._sent: Mark = None

    @abstractmethod
    def _push(self) -> None:
        """Where copies run: send what the call sends."""

    def _send(self, after: Mark) -> None:
        def push() -> None:
            try:
                self._push()
                # Looked at last: a peer that is late, or calls something else, does not keep our rows from the others.
                self._turn.check_peers()
            except Exception:
                # Lets our kernels go on, in vain: `finish` raises this.
                self._arrived.copy_(self._turn.epoch.expand_as(self._arrived))
                raise

        self._sent = self._place.send(self._rank, after, push)

    def _chunks(self, bounds: Sequence[int], flags: Tensor) -> Chunks:
        return Chunks(self._rank, self._world, self._transport.starts(bounds), flags, self._turn.epoch)

    @property
    def _arrived(self) -> Tensor:
        """The flags that rise as peers' rows come in."""
        return self._turn.mine.flags[: self._world * self._pieces]

    def _chunk(self, rank: int, piece: int) -> Chunk | None:
        """One of the chunks of that rank's shard, if it has rows."""
        start, stop = self._bounds[rank * self._pieces + piece :][:2]
        return Chunk(rank, start, stop) if start < stop else None

    def _chunks_of(self, rank: int) -> Iterator[tuple[int, slice]]:
        """Number and rows of the chunks of that rank's shard that have rows."""
        for chunk in range(rank * self._pieces, (rank + 1) * self._pieces):
            if self._bounds[chunk] < self._bounds[chunk + 1]:
                yield chunk, slice(self._bounds[chunk], self._bounds[chunk + 1])

    def _await_done(self, peer: int) -> None:
        """The reuse barrier: until `peer` has read what the call before left in the buffer of this one."""
        self._place.await_chunk(self._op, self._read, peer, self.status)

    def _deliver(self, peer: int, chunk: int, rows: Tensor, into: Tensor) -> None:
        self._place.copy(f"{self._op} to {peer}", rows, into)
        self._place.raise_flag(self._turn.buffers[peer].flags, chunk, self._turn.epoch)

    def finish(self) -> None:
        """As `Flight.finish`; our own rows are all sent then, or on a GPU the current stream waits until they are."""
        try:
            with wait_span(f"{self._op} sent", self.status.device):
                self._place.wait(self._sent)
            self._transport.examine()
        except Exception as error:
            self._transport.fail(error)
            raise
        epoch, mine = self._turn.epoch, self._turn.mine
        # Flags that this call had no use for keep up, so that none is ever half of all epochs behind.
        mine.flags.copy_(epoch.expand_as(mine.flags))
        for buffer in self._turn.buffers:
            self._place.raise_flag(buffer.done, self._rank, epoch)
        self._turn.release()


class BufferedGather(_Flight):
    """`GatherFlight` into a buffer of ours; whatever sends our rows and brings the peers' is up to the subclass."""

    def __init__(
        self, transport: FlightTransport, op: str, turn: Turn, shard: Tensor, sizes: Sequence[int], pieces: int
    ) -> None:
        super().__init__(transport, op, turn, sizes, pieces)
        self._shape = (sum(sizes), shard.shape[1])
        self.x_full = turn.mine.view(self._shape, shard.dtype)
        self.chunks = self._chunks(self._bounds, self._arrived)
        start = sum(sizes[: self._rank])
        self.x_full[start : start + len(shard)] = shard
        self._arrived[self._rank * pieces : (self._rank + 1) * pieces] = turn.epoch
        self._send(self._place.mark())
        self._place.await_arrivals(self.chunks)


class PushedGather(BufferedGather):
    """Our rows are copied into the peers' buffers."""

    def _push(self) -> None:
        own = list(self._chunks_of(self._rank))
        for distance in range(1, self._world) if own else ():
            peer = (self._rank - distance) % self._world
            into = self._turn.buffers[peer].view(self._shape, self.x_full.dtype)
            self._await_done(peer)
            for chunk, rows in own:
                self._deliver(peer, chunk, self.x_full[rows], into[rows])


class BufferedScatter(_Flight):
    """`ScatterFlight` into a buffer of ours; whatever sends our partial sums is up to the subclass."""

    def __init__(
        self,
        transport: FlightTransport,
        op: str,
        turn: Turn,
        like: Tensor,
        features: int,
        sizes: Sequence[int],
        pieces: int,
    ) -> None:
        super().__init__(transport, op, turn, sizes, pieces)
        rank, world = self._rank, self._world
        self._sizes = sizes
        self.summands = turn.mine.view((world, sizes[rank], features), like.dtype)
        start = self._bounds[rank * pieces]
        own = [bound - start for bound in self._bounds[rank * pieces : (rank + 1) * pieces]]
        bounds = [source * sizes[rank] + bound for source in range(world) for bound in own]
        self.arrivals = self._chunks([*bounds, world * sizes[rank]], self._arrived)
        shape = (sum(sizes), features)
        # What is staged on a GPU while a graph is captured would be that graph's.
        self.y_partial = STAGING.take(shape, like) if like.device.type == "cpu" else like.new_empty(shape)
        self.chunks = self._chunks(self._bounds, turn.before.repeat(world * pieces))
        self.counters = torch.zeros_like(self.chunks.flags)

    def produce(self, launch: Callable[[], object]) -> None:
        """As `ScatterFlight.produce`: the sending begins when the kernel does, or before that in another thread."""
        begin = self._place.mark()
        self._place.beside(launch, lambda: self._send(begin))
        self._place.await_arrivals(self.arrivals)

    def _owners(self) -> Iterator[int]:
        """In the order in which the kernel finishes their chunks: our own come last."""
        return ((self._rank + distance) % self._world for distance in range(1, self._world + 1))

    def finish(self) -> None:
        super().finish()
        if self.y_partial.device.type == "cpu":
            STAGING.give(self.y_partial)


class PushedScatter(BufferedScatter):
    """Each chunk is copied into its owner's buffer."""

    def _push(self) -> None:
        first = self._rank * self._pieces
        for owner in self._owners():
            chunks = list(self._chunks_of(owner))
            if not chunks:
                continue
            shape = (self._world, self._sizes[owner], self.y_partial.shape[1])
            summands = self._turn.buffers[owner].view(shape, self.y_partial.dtype)[self._rank]
            start = self._bounds[owner * self._pieces]
            self._await_done(owner)
            for chunk, rows in chunks:
                self._place.await_chunk(self._op, self.chunks, chunk, self.status)
                into = summands[rows.start - start : rows.stop - start]
                self._deliver(owner, first + chunk % self._pieces, self.y_partial[rows], into)
