"""The GPU under the benchmark: its streams, its graphs and its clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from fusedcomm.comm.places import Mark, StreamMarks
from fusedcomm.kernels import grid
from fusedcomm.kernels.config import CONFIGS, GemmConfig
from fusedcomm.kernels.grid import Grid

# Buffers rotate until this many times the L2 cache lies between two uses of one: weights come from memory, as they do
# between the layers of a model.
_TIMES_L2 = 3

# What runs on the device and returns nothing.
Work = Callable[[], object]


class Device(Protocol):
    """What the benchmark asks of the place where it runs: a GPU, or in tests the interpreter."""

    torch_device: torch.device
    name: str
    num_sms: int
    # Bytes to touch between two uses of a buffer.
    rotate_bytes: int

    def configs(self, element_bytes: int) -> tuple[GemmConfig, ...]:
        """Known good ones."""
        ...

    def num_programs(self, config: GemmConfig, element_bytes: int, communication_sms: int) -> int:
        """The persistent grid on the SMs that are left."""
        ...

    def grid(self, dtype: torch.dtype, rows: int, columns: int, communication_sms: int) -> Grid:
        """The one that the ops choose for a GEMM on the SMs that are left."""
        ...

    def mark(self) -> Mark:
        """Where the current stream is now."""
        ...

    def wait(self, mark: Mark) -> None:
        """Lets the current stream wait for the mark."""
        ...

    def beside(self, after: Mark) -> AbstractContextManager[None]:
        """A block that runs on the other stream, after the mark."""
        ...

    def sleep(self, seconds: float) -> None:
        """Keeps the current stream busy with one thread."""
        ...

    def capture(self, work: Work) -> Work:
        """The work as a graph, which starts without the host's delays; it has run once then."""
        ...

    def time_s(self, work: Work) -> float:
        """Seconds of one run of captured work."""
        ...

    def synchronize(self) -> None:
        """Waits for all that was started."""
        ...


class Gpu(StreamMarks):
    """`Device` of the current CUDA device."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.name: str = properties.name
        self.num_sms: int = properties.multi_processor_count
        self.rotate_bytes: int = _TIMES_L2 * properties.L2_cache_size
        self._arch = grid.architecture_of(properties)
        # High priority: copies must not queue behind the GEMM that they feed.
        self._side = torch.cuda.Stream(priority=-1)
        # Graphs are captured and replayed on a stream of their own: the default one waits for others.
        self._main = torch.cuda.Stream()
        torch.cuda.set_stream(self._main)

    def configs(self, element_bytes: int) -> tuple[GemmConfig, ...]:
        return CONFIGS[self._arch.name][element_bytes]

    def num_programs(self, config: GemmConfig, element_bytes: int, communication_sms: int) -> int:
        number, _ = grid.num_programs(
            config, self.torch_device, element_bytes=element_bytes, communication_sms=communication_sms
        )
        return number

    def grid(self, dtype: torch.dtype, rows: int, columns: int, communication_sms: int) -> Grid:
        return grid.grid_of(self.torch_device, dtype, rows, (columns,), communication_sms)

    @contextmanager
    def beside(self, after: torch.cuda.Event) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            self._side.wait_event(after)
            yield

    def sleep(self, seconds: float) -> None:
        # At 2 GHz, which GPUs hardly exceed.
        torch.cuda._sleep(int(seconds * 2e9))

    def capture(self, work: Work) -> Work:
        # Everything is compiled and loaded by now, as a capture demands, and as a kernel that spins does.
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._main):
            work()
        return graph.replay

    def time_s(self, work: Work) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The first run hides how long the host takes to start the second.
        work()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()
