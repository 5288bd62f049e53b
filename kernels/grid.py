"""How many programs a persistent grid has on the device at hand."""

from __future__ import annotations

from typing import Any

import torch

from fusedcomm.kernels.config import Architecture, GemmConfig, architecture, check_fits, shared_bytes, thread_registers

# What the system keeps of shared memory for each program.
_SYSTEM_SHARED_BYTES = 1024


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
    # Compilers take more than the estimate, and one program too many would not be resident.
    registers = min(arch.thread_registers, thread_registers(config, arch, element_bytes) * 5 // 4)
    registers *= config.num_warps * arch.warp_size
    resident = min(properties.shared_memory_per_multiprocessor // shared, arch.registers // registers)
    return sms * max(1, resident), arch


def architecture_of(properties: Any) -> Architecture:
    """The chip of a device with these properties; ValueError if it is none of those that are known."""
    # AMD's is followed by the features that are on, as in gfx942:sramecc+:xnack-. Torch has it on every GPU.
    name = properties.gcnArchName.split(":")[0]
    return architecture(name if name.startswith("gfx") else f"sm_{properties.major}{properties.minor}")
