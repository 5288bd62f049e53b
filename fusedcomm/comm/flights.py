"""The flights of fused calls where the order of streams does the work, and no host or thread has to.

Rows are copied into the peers' buffers on a stream for copies, and each chunk's copy is followed there by one of four
bytes, the epoch, into its flag. What the copies wait for, the stream waits for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusedcomm.comm.buffers import NUM_BUFFERS, Buffer, Lane, check_chunks, gather_bytes, scatter_bytes
from fusedcomm.comm.places import Mark, Place
from fusedcomm.comm.ring import chunk_bounds
from fusedcomm.kernels.flags import Chunks


@dataclass(frozen=True)
class Turn:
    """What one call uses: a buffer of every rank, and on this rank's device its epoch, and the one before that."""

    buffers: list[Buffer]
    epoch: Tensor
    before: Tensor


class StreamLane(Lane):
    """A lane whose epochs the device counts, so that a captured graph goes on counting when it is replayed."""

    def __init__(
        self, num_bytes: int, by_rank: Sequence[Sequence[Buffer]], first_epoch: int, device: torch.device
    ) -> None:
        super().__init__(num_bytes, by_rank)
        words = torch.tensor([first_epoch, first_epoch - 1], dtype=torch.int32, device=device)
        self._words = [words.clone() for _ in range(NUM_BUFFERS)]

    def next_turn(self, *, stay: bool = False) -> Turn:
        """For the next call. With `stay` the epoch, for which all flags are up, and the turn remain as they are."""
        turn, buffers = self.take_turn(stay=stay)
        words = self._words[turn]
        if not stay:
            words.add_(1)
        return Turn(buffers, words[:1], words[1:])


class StreamTransport(ABC):
    """`FlagTransport` by the order of streams; whose buffers they are and what is agreed is up to the subclass."""

    name: str
    communication_sms: int

    def __init__(self, rank: int, world: int, device: torch.device, place: Place) -> None:
        self.rank, self.world = rank, world
        self.place = place
        self.status = torch.zeros(4, dtype=torch.int32, device=device)
        self._device = device
        # Kept: to make one, the host would have to wait for the stream.
        self._starts: dict[tuple[int, ...], Tensor] = {}

    def gather(self, op: str, signature: str, shard: Tensor, sizes: Sequence[int], pieces: int) -> StreamGather:
        """As `FlagTransport.gather`; raises what `take_turn` does."""
        check_chunks(op, self.world, pieces)
        turn = self.take_turn(op, "gather", signature, gather_bytes(shard, sizes))
        return StreamGather(self, turn, shard, sizes, pieces)

    def scatter(
        self, op: str, signature: str, like: Tensor, features: int, sizes: Sequence[int], pieces: int
    ) -> StreamScatter:
        """As `FlagTransport.scatter`; raises what `take_turn` does."""
        check_chunks(op, self.world, pieces)
        turn = self.take_turn(op, "scatter", signature, scatter_bytes(like, features, sizes))
        return StreamScatter(self, turn, like, features, sizes, pieces)

    @abstractmethod
    def take_turn(self, op: str, kind: str, signature: str, num_bytes: int) -> Turn:
        """What the next call of a kind uses, with room for so many bytes."""

    @abstractmethod
    def note_finish(self) -> None:
        """A flight's kernels are launched, and peers are told on the stream when they have run."""

    def starts(self, bounds: Sequence[int]) -> Tensor:
        """The bounds on the device."""
        key = tuple(bounds)
        if key not in self._starts:
            self._starts[key] = torch.tensor(bounds, dtype=torch.int64, device=self._device)
        return self._starts[key]


class _StreamFlight:
    """What both kinds of `Flight` have in common."""

    def __init__(self, transport: StreamTransport, turn: Turn, sizes: Sequence[int], pieces: int) -> None:
        self.status = transport.status
        self._transport = transport
        self._place = transport.place
        self.timeout_us = self._place.timeout_us
        self._rank, self._world, self._pieces = transport.rank, transport.world, pieces
        self._bounds = chunk_bounds(sizes, pieces)
        self._turn, self._mine = turn, turn.buffers[transport.rank]
        # What each peer has read of its own such buffer, as a chunk.
        read = self._chunks(range(self._world + 1), self._mine.done)
        self._read = replace(read, epoch=turn.before)
        self._sent: Mark = None

    def _chunks(self, bounds: Sequence[int], flags: Tensor) -> Chunks:
        return Chunks(self._rank, self._world, self._transport.starts(bounds), flags, self._turn.epoch)

    @property
    def _arrived(self) -> Tensor:
        """The flags that peers raise."""
        return self._mine.flags[: self._world * self._pieces]

    def _chunks_of(self, rank: int) -> Iterator[tuple[int, slice]]:
        """Number and rows of the chunks of that rank's shard that have rows."""
        for chunk in range(rank * self._pieces, (rank + 1) * self._pieces):
            if self._bounds[chunk] < self._bounds[chunk + 1]:
                yield chunk, slice(self._bounds[chunk], self._bounds[chunk + 1])

    def _await_done(self, peer: int) -> None:
        """The reuse barrier: until `peer` has read what the call before left in the buffer of this one."""
        self._place.await_chunk(self._read, peer, self.status)

    def _deliver(self, peer: int, chunk: int, rows: Tensor, into: Tensor) -> None:
        self._place.copy(rows, into)
        self._turn.buffers[peer].flags[chunk : chunk + 1].copy_(self._turn.epoch)

    def finish(self) -> None:
        """As `Flight.finish`; the current stream waits until our own rows are all sent."""
        self._place.wait(self._sent)
        epoch = self._turn.epoch
        # Flags that this call had no use for keep up, so that none is ever half of all epochs behind.
        self._mine.flags.copy_(epoch.expand_as(self._mine.flags))
        for buffer in self._turn.buffers:
            buffer.done[self._rank : self._rank + 1].copy_(epoch)
        self._transport.note_finish()


class StreamGather(_StreamFlight):
    """`GatherFlight` by the order of streams."""

    def __init__(
        self, transport: StreamTransport, turn: Turn, shard: Tensor, sizes: Sequence[int], pieces: int
    ) -> None:
        super().__init__(transport, turn, sizes, pieces)
        shape = (sum(sizes), shard.shape[1])
        self._by_rank = [buffer.view(shape, shard.dtype) for buffer in turn.buffers]
        self.x_full = self._by_rank[self._rank]
        self.chunks = self._chunks(self._bounds, self._arrived)
        start = sum(sizes[: self._rank])
        self.x_full[start : start + len(shard)] = shard
        own = slice(self._rank * pieces, (self._rank + 1) * pieces)
        self._arrived[own] = turn.epoch
        with self._place.sending(self._rank, self._place.mark()):
            self._push()
            self._sent = self._place.mark()
        self._place.await_arrivals(self.chunks)

    def _push(self) -> None:
        for distance in range(1, self._world):
            peer = (self._rank - distance) % self._world
            self._await_done(peer)
            for chunk, rows in self._chunks_of(self._rank):
                self._deliver(peer, chunk, self.x_full[rows], self._by_rank[peer][rows])


class StreamScatter(_StreamFlight):
    """`ScatterFlight` by the order of streams."""

    def __init__(
        self,
        transport: StreamTransport,
        turn: Turn,
        like: Tensor,
        features: int,
        sizes: Sequence[int],
        pieces: int,
    ) -> None:
        super().__init__(transport, turn, sizes, pieces)
        rank, world = self._rank, self._world
        self._by_rank = [buffer.view((world, size, features), like.dtype) for buffer, size in zip(turn.buffers, sizes)]
        self.summands = self._by_rank[rank]
        start = self._bounds[rank * pieces]
        own = [bound - start for bound in self._bounds[rank * pieces : (rank + 1) * pieces]]
        bounds = [source * sizes[rank] + bound for source in range(world) for bound in own]
        self.arrivals = self._chunks([*bounds, world * sizes[rank]], self._arrived)
        self.y_partial = like.new_empty(sum(sizes), features)
        self.chunks = self._chunks(self._bounds, turn.before.repeat(world * pieces))
        self.counters = torch.zeros_like(self.chunks.flags)

    def produce(self, launch: Callable[[], object]) -> None:
        """As `ScatterFlight.produce`: the sending begins when the kernel does."""
        begin = self._place.mark()
        launch()
        with self._place.sending(self._rank, begin):
            self._push()
            self._sent = self._place.mark()
        self._place.await_arrivals(self.arrivals)

    def _push(self) -> None:
        first = self._rank * self._pieces
        for distance in range(1, self._world + 1):
            # The owner of the chunks that the kernel finishes next; our own come last.
            owner = (self._rank + distance) % self._world
            self._await_done(owner)
            start = self._bounds[owner * self._pieces]
            for chunk, rows in self._chunks_of(owner):
                self._place.await_chunk(self.chunks, chunk, self.status)
                into = self._by_rank[owner][self._rank, rows.start - start : rows.stop - start]
                self._deliver(owner, first + chunk % self._pieces, self.y_partial[rows], into)
