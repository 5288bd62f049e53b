"""A link that one GPU imitates: copies of a given rate, on SMs that the GEMM leaves free.

Where several GPUs are connected, copy engines move the rows and take no SM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedcomm.bench.errors import BenchError
from fusedcomm.bench.gpu_device import Device
from fusedcomm.comm.places import COPY_SMS, PROGRAMS_PER_SM
from fusedcomm.kernels.all_gather_matmul import all_gather_matmul
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.flags import Chunks, read_status
from fusedcomm.kernels.paced_copy import paced_copy

# Until a wait is given up. Nothing that is measured here takes a hundredth of that.
TIMEOUT_US = 2_000_000
# Begins long after the kernel that waits for it spins on every SM that it has.
_LATE_S = 0.02


@dataclass(frozen=True)
class ImitatedLink:
    """One direction of a rank's link."""

    gbyte_per_s: float

    def copy(self, source: Tensor, target: Tensor) -> None:
        """On the current stream, no faster than the link."""
        paced_copy(source, target, gbyte_per_s=self.gbyte_per_s, num_programs=PROGRAMS_PER_SM * COPY_SMS)


def prove_progress(device: Device, config: GemmConfig, *, as_graph: bool) -> None:
    """Raises BenchError unless copies advance, and raise flags, while a kernel spins on all SMs that it has.

    Whatever is measured with imitated links rests on it: rank 0 of two waits for rows that begin to come when all its
    programs have long been spinning.
    """
    programs = device.num_programs(config, 2, COPY_SMS)
    rows, columns = 2 * config.tile_m, config.tile_n * programs
    x = torch.randn(rows, config.tile_k, device=device.torch_device).bfloat16()
    w = torch.randn(columns, config.tile_k, device=device.torch_device).bfloat16()
    x_full, y = torch.empty_like(x), x.new_empty(rows, columns)
    starts = torch.tensor([0, 0, rows], dtype=torch.int32, device=device.torch_device)
    flags, epoch = starts.new_zeros(2), starts.new_zeros(1)
    chunks, status = Chunks(0, 2, starts, flags, epoch), starts.new_zeros(4)

    def work() -> None:
        epoch.add_(1)
        for tensor in (x_full, y):
            tensor.fill_(float("nan"))
        begin = device.mark()
        with device.beside(begin):
            device.sleep(_LATE_S)
            ImitatedLink(100.0).copy(x, x_full)
            flags[1:].copy_(epoch)
            done = device.mark()
        all_gather_matmul(
            *(x_full, w, y),
            chunks=chunks,
            status=status,
            timeout_us=TIMEOUT_US,
            config=config,
            num_programs=programs,
        )
        device.wait(done)

    # The first run compiles the kernel, and so launches it long after the copy.
    again = device.capture(work) if as_graph else work
    if not as_graph:
        work()
        device.synchronize()
    again()
    device.synchronize()
    timeout = read_status(status)
    if timeout is not None or not torch.equal(x_full, x) or y.isnan().any():
        raise BenchError(
            f"no copy advances beside a kernel that spins on all but {COPY_SMS} SMs ({timeout}), "
            f"{'as a graph' if as_graph else 'launched one by one'}: imitated links cannot be measured here"
        )
