"""Where ranks run: each on streams of its GPU, several virtual ones on those of one GPU, or on the CPU in turns."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fusedcomm.comm.record import beside_computing
from fusedcomm.comm.tasks import Turns
from fusedcomm.errors import PeerError
from fusedcomm.kernels.await_rows import await_rows
from fusedcomm.kernels.flags import Chunks, read_status
from fusedcomm.kernels.host_flags import is_up
from fusedcomm.kernels.paced_copy import paced_copy

# Enough for more than the fastest link between GPUs brings.
COPY_SMS = 16
PROGRAMS_PER_SM = 4
# Of one GPU.
_MAX_RANKS = 8
# Queues between the host and the GPU, as many as there can be. Streams that share one wait for each other's kernels.
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_NUM_QUEUES = 32

Result = TypeVar("Result")
# A point on a stream that other streams can wait for.
Mark = Any


class Place(Protocol):
    """Where a rank's kernels run, and its copies."""

    timeout_us: int

    def mark(self) -> Mark:
        """Where the current stream is now."""
        ...

    def wait(self, mark: Mark) -> None:
        """Lets the current stream, or the caller, wait for the mark. May raise what the push did that it marks."""
        ...

    def send(self, rank: int, after: Mark, push: Callable[[], None]) -> Mark:
        """Run `push` where that rank's copies run, after the mark; marks the end of it. May raise what `push` does."""
        ...

    def beside(self, launch: Callable[[], object], send: Callable[[], None]) -> None:
        """Call both, which start a kernel and the copies of what it makes: in the order in which they can overlap."""
        ...

    def copy(self, what: str, source: Tensor, target: Tensor) -> None:
        """In a push: over the link. `what` it is goes into the record."""
        ...

    def raise_flag(self, flags: Tensor, index: int, epoch: Tensor) -> None:
        """Let `flags[index]` be the epoch, after all that was done before (on the current stream)."""
        ...

    def await_chunk(self, op: str, chunks: Chunks, chunk: int, status: Tensor) -> None:
        """In a push: go on when one of the chunks is there, whether it has rows or not. May raise a PeerError."""
        ...

    def await_arrivals(self, chunks: Chunks) -> None:
        """Return when kernels may be launched that wait for the chunks."""
        ...


class SimulatedPlace(Place, Protocol):
    """Where all ranks of a simulation run."""

    # What each rank's kernels must leave to copies, and to the other ranks' kernels.
    communication_sms: int

    def run(self, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run one task for each rank, at the same time, as far as they wait for each other."""
        ...

    def check(self, statuses: Sequence[Tensor]) -> None:
        """PeerError if a wait was in vain, as far as that is known now."""
        ...


class StreamMarks:
    """Marks of the current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(mark)


class _Streams(StreamMarks, ABC):
    """What streams of any GPU have in common."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.timeout_us = min(2**31 - 1, round(timeout_s * 1e6))
        self._device = device
        self._only: dict[tuple[int, int], Tensor] = {}

    def send(self, rank: int, after: torch.cuda.Event, push: Callable[[], None]) -> torch.cuda.Event:
        with torch.cuda.stream(self._copies_of(rank)), beside_computing():
            self.wait(after)
            push()
            return self.mark()

    @abstractmethod
    def _copies_of(self, rank: int) -> torch.cuda.Stream:
        """That rank's stream for copies."""

    def beside(self, launch: Callable[[], object], send: Callable[[], None]) -> None:
        launch()
        send()

    def raise_flag(self, flags: Tensor, index: int, epoch: Tensor) -> None:
        # Four bytes, by whatever engine copied the rows before.
        flags[index : index + 1].copy_(epoch)

    def await_chunk(self, op: str, chunks: Chunks, chunk: int, status: Tensor) -> None:
        key = (chunks.num_chunks, chunk)
        if key not in self._only:
            # As if there were one row, of that chunk.
            starts = [0] * (chunk + 1) + [1] * (chunks.num_chunks - chunk)
            self._only[key] = torch.tensor(starts, device=self._device)
        await_rows(replace(chunks, starts=self._only[key]), 1, status=status, timeout_us=self.timeout_us)

    def await_arrivals(self, chunks: Chunks) -> None:
        # The kernels wait, beside the copies.
        return None


class RankStreams(_Streams):
    """One rank of a GPU: its kernels are on the current stream, its copies on one beside that."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        super().__init__(device, timeout_s)
        # High priority: the one program of a wait must not queue behind the GEMM whose rows it lets go.
        self._copies = torch.cuda.Stream(device, priority=-1)

    def _copies_of(self, rank: int) -> torch.cuda.Stream:
        return self._copies

    def copy(self, what: str, source: Tensor, target: Tensor) -> None:
        # Of contiguous memory: a copy engine's work.
        target.copy_(source)


class VirtualStreams(_Streams):
    """Ranks on one GPU: two streams each."""

    def __init__(self, world: int, device: torch.device, gbyte_per_s: float, timeout_s: float) -> None:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        if world > min(_MAX_RANKS, num_sms - COPY_SMS):
            raise ValueError(
                f"simulated: {world} ranks on a GPU of {num_sms} SMs, {COPY_SMS} of which copy; at most {_MAX_RANKS}, "
                "one on each SM that is left"
            )
        if os.environ.get(_QUEUES) != str(_NUM_QUEUES):
            raise ValueError(
                f"simulated: {_QUEUES}={os.environ.get(_QUEUES)}; set it to {_NUM_QUEUES} before CUDA is first used, "
                "or ranks wait for each other's kernels"
            )
        super().__init__(device, timeout_s)
        self.communication_sms = num_sms - (num_sms - COPY_SMS) // world
        self._gbyte_per_s = gbyte_per_s
        self._num_copy_programs = max(1, PROGRAMS_PER_SM * COPY_SMS // world)
        streams = _own_streams(device)
        self._compute, self._copy = streams[:world], streams[_MAX_RANKS:][:world]

    def run(self, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
        begin = self.mark()
        results = []
        try:
            for stream, task in zip(self._compute, tasks):
                with torch.cuda.stream(stream):
                    self.wait(begin)
                    results.append(task())
        except BaseException:
            # What the others launched waits for what will not come, up to its limit, and uses their tensors so long.
            torch.cuda.synchronize()
            raise
        for stream in self._compute:
            torch.cuda.current_stream().wait_stream(stream)
        return results

    def _copies_of(self, rank: int) -> torch.cuda.Stream:
        return self._copy[rank]

    def copy(self, what: str, source: Tensor, target: Tensor) -> None:
        paced_copy(source, target, gbyte_per_s=self._gbyte_per_s, num_programs=self._num_copy_programs)

    def check(self, statuses: Sequence[Tensor]) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        for rank, status in enumerate(statuses):
            if (timeout := read_status(status)) is not None:
                what = f"virtual rank {rank} waited in vain for chunk {timeout.chunk} of epoch {timeout.epoch}"
                raise PeerError(timeout.op, timeout.rank, timeout.chunk, f"{what}, {self.timeout_us / 1e6:g} s")


@cache
def _own_streams(device: torch.device) -> list[torch.cuda.ExternalStream]:
    """Two streams for each rank, made in one go: so no two of them share a queue, as streams of torch's pool may."""
    streams = []
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        for _ in range(2 * _MAX_RANKS):
            handle = ctypes.c_void_p()
            torch.cuda.check_error(runtime.cudaStreamCreate(ctypes.addressof(handle)))
            assert handle.value is not None
            streams.append(torch.cuda.ExternalStream(handle.value, device))
    return streams


class InTurns:
    """Ranks on the CPU, one after the other."""

    communication_sms = 0
    # What a kernel waits for is there.
    timeout_us = 1

    def __init__(self) -> None:
        self._turns = Turns()

    def run(self, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
        return self._turns.run(tasks)

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return None

    def send(self, rank: int, after: None, push: Callable[[], None]) -> None:
        push()

    def beside(self, launch: Callable[[], object], send: Callable[[], None]) -> None:
        launch()
        send()

    def copy(self, what: str, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def raise_flag(self, flags: Tensor, index: int, epoch: Tensor) -> None:
        flags[index : index + 1] = epoch

    def await_chunk(self, op: str, chunks: Chunks, chunk: int, status: Tensor) -> None:
        self._wait_until_up(chunks, chunk)

    def _wait_until_up(self, chunks: Chunks, chunk: int) -> None:
        epoch = int(chunks.epoch)
        self._turns.wait_until(lambda: is_up(chunks.flags, chunk, epoch), f"chunk {chunk} of epoch {epoch}")

    def await_arrivals(self, chunks: Chunks) -> None:
        for chunk, size in enumerate(chunks.starts.diff().tolist()):
            if size:
                self._wait_until_up(chunks, chunk)

    def check(self, statuses: Sequence[Tensor]) -> None:
        assert all(read_status(status) is None for status in statuses)
