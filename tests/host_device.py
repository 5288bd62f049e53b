"""The GPU benchmark's device without a GPU: Triton's interpreter, and times that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fusedcomm.bench.gpu_device import Work
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.grid import Grid


class Host:
    """Streams are one: what is launched runs at once, and so must not wait for what is launched later."""

    def __init__(self, seconds_of_run: Callable[[int], float] = lambda number: 3e-5) -> None:
        self.torch_device = torch.device("cpu")
        self.name = "Triton's interpreter"
        self.num_sms = 19
        self.rotate_bytes = 30_000
        # Counts what was timed.
        self.num_timed = 0
        self._seconds_of_run = seconds_of_run
        self._depth = 0

    def configs(self, element_bytes: int) -> tuple[GemmConfig, ...]:
        # Few tiles: the interpreter takes a millisecond for each step of one.
        return (GemmConfig(16, 64, 64, group_m=2), GemmConfig(32, 64, 64, group_m=2))

    def num_programs(self, config: GemmConfig, element_bytes: int, communication_sms: int) -> int:
        return self.num_sms - communication_sms

    def grid(self, dtype: torch.dtype, rows: int, columns: int, communication_sms: int) -> Grid:
        config = self.configs(dtype.itemsize)[0]
        return Grid(config, self.num_programs(config, dtype.itemsize, communication_sms))

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return None

    @contextmanager
    def beside(self, after: None) -> Iterator[None]:
        # One side stream: a block in a block would wait for itself.
        assert not self._depth
        self._depth += 1
        yield
        self._depth -= 1

    def sleep(self, seconds: float) -> None:
        return None

    def capture(self, work: Work) -> Work:
        work()
        return work

    def time_s(self, work: Work) -> float:
        # It has run when it was captured.
        self.num_timed += 1
        return self._seconds_of_run(self.num_timed)

    def synchronize(self) -> None:
        return None
