"""W virtual ranks in one process: the protocol of flags and chunks where there is one GPU, or none.

On a GPU every rank has a stream for its kernels and one for its copies, and its kernels an equal share of the SMs that
the copies leave: so W persistent grids wait for each other's rows at the same time. On the CPU the ranks take turns:
one runs until the protocol makes it wait, then the next one does, and no interpreted kernel ever has to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from fusedcomm.comm.buffers import MAX_CHUNKS, Buffer
from fusedcomm.comm.flights import FlightTransport
from fusedcomm.comm.lanes import Lane, Turn
from fusedcomm.comm.places import InTurns, SimulatedPlace, VirtualStreams
from fusedcomm.errors import PeerError

_KINDS = ("gather", "scatter")

Result = TypeVar("Result")


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
        on_cpu = device.type == "cpu"
        self.place: SimulatedPlace = InTurns() if on_cpu else VirtualStreams(world, device, gbyte_per_s, timeout_s)
        self.calls: dict[tuple[str, int], str] = {}
        self._words = torch.full((MAX_CHUNKS + world,), first_epoch, dtype=torch.int32, device=device)
        self._buffer_bytes = buffer_bytes
        # Of each kind, in the order of their making: every rank's.
        self._buffers: dict[str, list[list[Buffer]]] = {kind: [] for kind in _KINDS}
        self.transports = [
            SimulatedTransport(self, rank, world, device, buffer_bytes, first_epoch) for rank in range(world)
        ]

    def buffer(self, kind: str, number: int) -> list[Buffer]:
        """The ranks' buffers of that number."""
        made = self._buffers[kind]
        if number == len(made):
            made.append([self._make_buffer() for _ in self.transports])
        return made[number]

    def _make_buffer(self) -> Buffer:
        # Poisoned: what is read before it was written shows.
        data = torch.full((self._buffer_bytes,), 255, dtype=torch.uint8, device=self._words.device)
        words = self._words.clone()
        if data.is_cuda:
            # Other streams will use it. Nothing waits for a peer yet: buffers are made while all warms up.
            torch.cuda.synchronize()
        return Buffer(data, *words.split([MAX_CHUNKS, len(self.transports)]))

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

    def warm_up(self, function: Callable[[SimulatedTransport], object]) -> None:
        """Let a GPU compile and load what `function` launches, and make room for it.

        Epochs stand still, so nothing is waited for; the results are void.
        """
        for transport in self.transports:
            transport.dry = True
        self.place.run([lambda transport=transport: function(transport) for transport in self.transports])
        for transport in self.transports:
            transport.dry = False


class SimulatedTransport(FlightTransport):
    """`FlagTransport` of one virtual rank."""

    name = "simulated"

    def __init__(
        self,
        simulation: Simulation,
        rank: int,
        world: int,
        device: torch.device,
        buffer_bytes: int,
        first_epoch: int,
    ) -> None:
        super().__init__(rank, world, device, simulation.place, first_epoch)
        self.communication_sms = simulation.place.communication_sms
        # Whether epochs stand still, and all flags are up.
        self.dry = False
        self._simulation = simulation
        self._lanes |= {kind: Lane(buffer_bytes, first_epoch, self.status) for kind in _KINDS}
        self._num_buffers: dict[str, int] = dict.fromkeys(_KINDS, 0)
        self._num_calls: dict[str, int] = dict.fromkeys(_KINDS, 0)

    def take_turn(self, op: str, kind: str, signature: str, num_bytes: int) -> Turn:
        """As `FlightTransport.take_turn`.

        Raises:
            PeerError: another rank calls something else.
            ValueError: the simulation's buffers are too small.
        """
        room = self._lanes[kind].num_bytes
        if num_bytes > room:
            raise ValueError(f"{op}: needs {num_bytes} bytes, the simulation's buffers have {room}; make more")
        if not self.dry:
            first = self._simulation.calls.setdefault((kind, self._num_calls[kind]), signature)
            self._num_calls[kind] += 1
            if first != signature:
                raise PeerError(op, -1, -1, f"rank {self.rank} calls {signature!r}, an earlier rank {first!r}")
        return self.lane(op, kind, num_bytes).take(dry=self.dry)

    def make_buffer(self, op: str, kind: str, num_bytes: int) -> tuple[list[Buffer], Buffer]:
        by_rank = self._simulation.buffer(kind, self._num_buffers[kind])
        self._num_buffers[kind] += 1
        return by_rank, by_rank[self.rank]

    def examine(self) -> None:
        # `Simulation.run` looks when all ranks are through.
        return None
