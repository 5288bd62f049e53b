"""Where these tests run, and what is possible there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from host_device import Host
from torch import Tensor

from fusedcomm.bench.gpu_device import Device, Gpu
from fusedcomm.kernels._triton import INTERPRETED
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.grid import architecture_of

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter truncates to bf16, where GPUs and torch round.
TIMES = {torch.float32: 2.0, torch.float16: 2.0, torch.bfloat16: 3.0 if INTERPRETED else 2.0}
only_on_gpu = pytest.mark.skipif(INTERPRETED, reason="nothing runs at the same time in the interpreter")


def open_device() -> Device:
    return Host() if INTERPRETED else Gpu()


def configs(device: Device, dtype: torch.dtype) -> tuple[GemmConfig, ...]:
    """Those that ship for the type; none where the chip lacks it."""
    if dtype == torch.float8_e4m3fn and not INTERPRETED:
        if not architecture_of(torch.cuda.get_device_properties(DEVICE)).has_fp8:
            return ()
    return device.configs(dtype.itemsize)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def capture(work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], object]]:
    """`work` as a graph, after it has run once: what replays fill, and how to replay. Interpreted, it runs again."""
    if INTERPRETED:
        results = work()
        return results, lambda: [result.copy_(again) for result, again in zip(results, work())]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    with torch.cuda.graph(graph, stream=stream):
        results = work()
    return results, graph.replay
