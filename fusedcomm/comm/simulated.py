"""W virtual ranks in one process: the protocol of flags and chunks where there is one GPU, or none.

On a GPU every rank has a stream for its kernels and one for its copies, and its kernels an equal share of the SMs that
the copies leave: so W persistent grids wait for each other's rows at the same time. On the CPU the ranks take turns:
one runs until the protocol makes it wait, then the next one does, and no interpreted kernel ever has to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from fusedcomm.comm.places import InTurns, Mark, Place, Streams
from fusedcomm.comm.ring import chunk_bounds
from fusedcomm.errors import PeerError
from fusedcomm.kernels.flags import Chunks

_NUM_BUFFERS = 2
_KINDS = ("gather", "scatter")
# Flags of one buffer, and so the most chunks of all ranks together.
_MAX_CHUNKS = 1024

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Buffer:
    """One of a rank's buffers.

    Attributes:
        data: bytes, which peers write rows into.
        flags: [_MAX_CHUNKS] int32, the epoch of each chunk's rows.
        done: [world] int32, up to which epoch each peer has read its own such buffer.
        epoch, before: [1] int32, of this call and of the call before it.
    """

    data: Tensor
    flags: Tensor
    done: Tensor
    epoch: Tensor
    before: Tensor

    def view(self, op: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > len(self.data):
            raise ValueError(
                f"{op}: needs {num_bytes} bytes, the simulation's buffers have {len(self.data)}; make more"
            )
        return self.data[:num_bytes].view(dtype).view(shape)


class Simulation:
    """A group of virtual ranks, of which each has a `FlagTransport`.

    Args:
        world: how many.
        device: a GPU, or the CPU if Triton interprets.
        buffer_bytes: of the largest call: the gathered rows, or the summands of one rank.
        gbyte_per_s: the rate of each rank's outgoing link, on a GPU.
        timeout_s: how long a kernel waits for a chunk, on a GPU. On the CPU it shows at once if one can never come.
        first_epoch: that of all buffers before the first call.
    """

    def __init__(
        self,
        world: int,
        device: torch.device,
        *,
        buffer_bytes: int,
        gbyte_per_s: float = 500.0,
        timeout_s: float = 10.0,
        first_epoch: int = 0,
    ) -> None:
        self.place: Place = InTurns() if device.type == "cpu" else Streams(world, device, gbyte_per_s, timeout_s)
        self.calls: dict[tuple[str, int], str] = {}
        self._device = device
        words = torch.full((_MAX_CHUNKS + world + 2,), first_epoch, dtype=torch.int32, device=device)

        def make_buffer() -> _Buffer:
            # Poisoned: what is read before it was written shows.
            data = torch.full((buffer_bytes,), 255, dtype=torch.uint8, device=device)
            return _Buffer(data, *words.clone().split([_MAX_CHUNKS, world, 1, 1]))

        self.buffers = {kind: [[make_buffer() for _ in range(_NUM_BUFFERS)] for _ in range(world)] for kind in _KINDS}
        # Kept: to make one, the host would have to wait for the stream.
        self._starts: dict[tuple[int, ...], Tensor] = {}
        self.transports = [SimulatedTransport(self, rank, world, device) for rank in range(world)]

    def run(self, function: Callable[[SimulatedTransport], Result]) -> list[Result]:
        """Call `function` for every rank, as each would in a process of its own; returns the results by rank.

        On a GPU everything that it launches must have run before (`warm_up`): what is loaded while a kernel spins may
        have to wait for that kernel.

        Raises:
            PeerError: a wait was in vain. Not while a graph is captured: call `check` after a replay.
        """
        results = self.place.run([lambda transport=transport: function(transport) for transport in self.transports])
        self.check()
        return results

    def check(self) -> None:
        """PeerError if a wait was in vain so far; waits for the device."""
        self.place.check([transport.status for transport in self.transports])

    def starts(self, bounds: Sequence[int]) -> Tensor:
        """The bounds on the device."""
        key = tuple(bounds)
        if key not in self._starts:
            self._starts[key] = torch.tensor(bounds, dtype=torch.int64, device=self._device)
        return self._starts[key]

    def warm_up(self, function: Callable[[SimulatedTransport], object]) -> None:
        """Let a GPU compile and load what `function` launches, and make room for it.

        Epochs stand still, so nothing is waited for; the results are void.
        """
        for transport in self.transports:
            transport.dry = True
        self.place.run([lambda transport=transport: function(transport) for transport in self.transports])
        for transport in self.transports:
            transport.dry = False


class SimulatedTransport:
    """`FlagTransport` of one virtual rank."""

    name = "simulated"

    def __init__(self, simulation: Simulation, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world = rank, world
        self.simulation = simulation
        self.communication_sms = simulation.place.communication_sms
        self.status = torch.zeros(4, dtype=torch.int32, device=device)
        # Whether epochs stand still, and all flags are up.
        self.dry = False
        self._num_calls: dict[str, int] = dict.fromkeys(_KINDS, 0)

    def gather(self, op: str, signature: str, shard: Tensor, sizes: Sequence[int], pieces: int) -> SimulatedGather:
        """As `FlagTransport.gather`.

        Raises:
            PeerError: another rank calls something else.
            ValueError: the simulation's buffers are too small.
        """
        return SimulatedGather(self, self._turn(op, "gather", signature), op, shard, sizes, pieces)

    def scatter(
        self, op: str, signature: str, like: Tensor, features: int, sizes: Sequence[int], pieces: int
    ) -> SimulatedScatter:
        """As `FlagTransport.scatter`; raises what `gather` does."""
        return SimulatedScatter(self, self._turn(op, "scatter", signature), op, like, features, sizes, pieces)

    def _turn(self, op: str, kind: str, signature: str) -> list[_Buffer]:
        """For the next call of a kind, the buffer of every rank."""
        number = self._num_calls[kind]
        if not self.dry:
            self._num_calls[kind] += 1
            first = self.simulation.calls.setdefault((kind, number), signature)
            if first != signature:
                raise PeerError(op, -1, -1, f"rank {self.rank} calls {signature!r}, an earlier rank {first!r}")
        return [buffers[number % _NUM_BUFFERS] for buffers in self.simulation.buffers[kind]]


class _SimulatedFlight:
    """What both kinds of `Flight` have in common."""

    def __init__(
        self, transport: SimulatedTransport, buffers: list[_Buffer], op: str, sizes: Sequence[int], pieces: int
    ) -> None:
        if transport.world * pieces > _MAX_CHUNKS:
            raise ValueError(f"{op}: {pieces} chunks on each of {transport.world} ranks; at most {_MAX_CHUNKS} in all")
        self.status = transport.status
        self._transport, self._op = transport, op
        self._place = transport.simulation.place
        self.timeout_us = self._place.timeout_us
        self._rank, self._world, self._pieces = transport.rank, transport.world, pieces
        self._bounds = chunk_bounds(sizes, pieces)
        self._buffers, self._mine = buffers, buffers[transport.rank]
        if not transport.dry:
            self._mine.before.copy_(self._mine.epoch)
            self._mine.epoch.add_(1)
        self._sent: Mark = None

    def _chunks(self, bounds: Sequence[int], flags: Tensor) -> Chunks:
        starts = self._transport.simulation.starts(bounds)
        return Chunks(self._rank, self._world, starts, flags, self._mine.epoch)

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
        self._place.await_flag(self._mine.done, peer, self._mine.before, self.status)

    def _deliver(self, peer: int, chunk: int, rows: Tensor, into: Tensor) -> None:
        self._place.copy(rows, into)
        self._buffers[peer].flags[chunk : chunk + 1].copy_(self._mine.epoch)

    def finish(self) -> None:
        """As `Flight.finish`; the current stream waits until our own rows are all sent."""
        self._place.wait(self._sent)
        # Flags that this call had no use for keep up, so that none is ever half of all epochs behind.
        self._mine.flags.copy_(self._mine.epoch.expand_as(self._mine.flags))
        for buffer in self._buffers:
            buffer.done[self._rank : self._rank + 1].copy_(self._mine.epoch)


class SimulatedGather(_SimulatedFlight):
    """`GatherFlight` between virtual ranks."""

    def __init__(
        self,
        transport: SimulatedTransport,
        buffers: list[_Buffer],
        op: str,
        shard: Tensor,
        sizes: Sequence[int],
        pieces: int,
    ) -> None:
        super().__init__(transport, buffers, op, sizes, pieces)
        shape = (sum(sizes), shard.shape[1])
        self._by_rank = [buffer.view(op, shape, shard.dtype) for buffer in buffers]
        self.x_full = self._by_rank[self._rank]
        self.chunks = self._chunks(self._bounds, self._arrived)
        start = sum(sizes[: self._rank])
        self.x_full[start : start + len(shard)] = shard
        own = slice(self._rank * pieces, (self._rank + 1) * pieces)
        self._arrived[own] = self._mine.epoch
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


class SimulatedScatter(_SimulatedFlight):
    """`ScatterFlight` between virtual ranks."""

    def __init__(
        self,
        transport: SimulatedTransport,
        buffers: list[_Buffer],
        op: str,
        like: Tensor,
        features: int,
        sizes: Sequence[int],
        pieces: int,
    ) -> None:
        super().__init__(transport, buffers, op, sizes, pieces)
        rank, world = self._rank, self._world
        self._by_rank = [buffer.view(op, (world, size, features), like.dtype) for buffer, size in zip(buffers, sizes)]
        self.summands = self._by_rank[rank]
        start = self._bounds[rank * pieces]
        own = [bound - start for bound in self._bounds[rank * pieces : (rank + 1) * pieces]]
        bounds = [source * sizes[rank] + bound for source in range(world) for bound in own]
        self.arrivals = self._chunks([*bounds, world * sizes[rank]], self._arrived)
        self.y_partial = like.new_empty(sum(sizes), features)
        self.chunks = self._chunks(self._bounds, self._mine.before.repeat(world * pieces))
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
                self._place.await_flag(self.chunks.flags, chunk, self._mine.epoch, self.status)
                into = self._by_rank[owner][self._rank, rows.start - start : rows.stop - start]
                self._deliver(owner, first + chunk % self._pieces, self.y_partial[rows], into)
