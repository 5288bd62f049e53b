"""The configuration and the persistent grid for the device at hand."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from fusedcomm.kernels.config import (
    CONFIGS,
    INTERPRETER,
    Architecture,
    GemmConfig,
    architecture,
    check_fits,
    shared_bytes,
    thread_registers,
)

# What the system keeps of shared memory for each program.
_SYSTEM_SHARED_BYTES = 1024


class Grid(NamedTuple):
    """How a GEMM is launched."""

    config: GemmConfig
    num_programs: int


@cache
def grid_of(
    device: torch.device, dtype: torch.dtype, rows: int, columns: tuple[int, ...], communication_sms: int = 0
) -> Grid:
    """The configuration that should be fastest for `x @ w.T` of so many rows of x and of each w; as `num_programs`.

    On the CPU, where programs are interpreted one after the other, a few: enough for them to share the tiles.
    """
    if device.type == "cpu":
        return Grid(INTERPRETER, 2)
    arch = architecture_of(torch.cuda.get_device_properties(device))
    grids = [
        Grid(config, num_programs(config, device, element_bytes=dtype.itemsize, communication_sms=communication_sms)[0])
        for config in CONFIGS[arch.name][dtype.itemsize]
    ]
    return min(grids, key=lambda grid: relative_time(grid, rows, columns))


def relative_time(grid: Grid, rows: int, columns: tuple[int, ...]) -> float:
    """How long the GEMM takes next to others of its depth: whole waves of tiles, at the configuration's speed."""
    config, num_programs = grid
    num_tiles = -(-rows // config.tile_m) * sum(-(-count // config.tile_n) for count in columns)
    return -(-num_tiles // num_programs) * num_programs * config.tile_m * config.tile_n / config.speed


def num_programs(
    config: GemmConfig, device: torch.device, *, element_bytes: int, communication_sms: int = 0
) -> tuple[int, Architecture]:
    """Programs that are resident at once, less the SMs left to communication, and the chip they are for.

    A grid of more, whose programs spin, could wait for a kernel of NCCL's that never finds an SM. Reads the device.
    Raises ValueError if the chip is unknown, the configuration does not fit it, or no SM is left.
    """
    return count_programs(
        config,
        torch.cuda.get_device_properties(device),
        element_bytes=element_bytes,
        communication_sms=communication_sms,
    )


def count_programs(
    config: GemmConfig, properties: Any, *, element_bytes: int, communication_sms: int
) -> tuple[int, Architecture]:
    """`num_programs` of a device with these properties, as torch names them."""
    arch = architecture_of(properties)
    check_fits(config, arch, element_bytes)
    sms = properties.multi_processor_count - communication_sms
    if sms < 1 or communication_sms < 0:
        raise ValueError(
            f"kernels: communication_sms={communication_sms} of {properties.multi_processor_count}; "
            f"must be 0 to {properties.multi_processor_count - 1}"
        )
    shared = shared_bytes(config, arch, element_bytes) + _SYSTEM_SHARED_BYTES
    # One program too many would not be resident. Compilers take more than the estimate, and NVIDIA's up to all that a
    # thread can have where operands are not aligned.
    registers = arch.thread_registers
    if arch.backend == "hip":
        registers = min(registers, thread_registers(config, arch, element_bytes) * 5 // 4)
    registers *= config.num_warps * arch.warp_size
    resident = min(properties.shared_memory_per_multiprocessor // shared, arch.registers // registers)
    return sms * max(1, resident), arch


def architecture_of(properties: Any) -> Architecture:
    """The chip of a device with these properties; ValueError if it is none of those that are known."""
    # AMD's is followed by the features that are on, as in gfx942:sramecc+:xnack-. Torch has it on every GPU.
    name = properties.gcnArchName.split(":")[0]
    return architecture(name if name.startswith("gfx") else f"sm_{properties.major}{properties.minor}")
