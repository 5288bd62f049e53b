"""`x @ w.T` for one weight or several, and how every launch of the kernel is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fusedcomm.kernels._triton import INTERPRETED, TensorDescriptor, triton
from fusedcomm.kernels.checks import MAX_WEIGHTS, check_matmul
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.epilogue import NOTHING, Epilogue
from fusedcomm.kernels.flags import HAS_CLOCK, Chunks, num_lanes
from fusedcomm.kernels.gemm_kernel import gemm_kernel

# Tensors whose strides TMA takes begin at, and go on in, multiples of so many bytes.
_TMA_ALIGNMENT = 16


class Load(NamedTuple):
    """How the kernel loads an operand, and why not through a TMA descriptor where `config.tma` asked for one."""

    path: Literal["pointer", "tma", "tma_transposed"]
    reason: str


class Loads(NamedTuple):
    x: Load
    w: Load


def gemm(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    y: Tensor | Sequence[Tensor],
    *,
    config: GemmConfig,
    num_programs: int,
    epilogue: Epilogue = NOTHING,
) -> Loads:
    """Writes `activation(x @ w.T + bias) + residual` into `y`; returns how the operands are loaded.

    x [M, K], w [N, K], y [M, N] with any strides, so transposed views give the products of backward; or up to three
    weights of equal strides, and an output for each of them (one for both of swiglu). fp32, bf16, fp16, or fp8 e4m3
    with row-wise scales, accumulated in fp32; `y`, bias and residual may be of other types than `x`. `num_programs` is
    the size of the persistent grid. Raises ValueError on tensors that do not fit together.
    """
    weights, outputs = check_matmul("gemm", x, w, y, epilogue=epilogue, num_programs=num_programs)
    return launch(x, weights, outputs, epilogue=epilogue, config=config, num_programs=num_programs)


def choose_load(config: GemmConfig, operand: Tensor, num_tensors: int = 1) -> Load:
    """TMA where the configuration asks for it and the operand's strides allow it, else pointers."""
    if not config.tma:
        return Load("pointer", "")
    if num_tensors > 1:
        return Load("pointer", f"a TMA descriptor holds one weight, not {num_tensors}")
    if not operand.numel():
        return Load("pointer", "a TMA descriptor holds at least one element")
    inner = int(operand.stride(1) == 1)
    if operand.stride(inner) != 1:
        return Load("pointer", f"strides {operand.stride()}; TMA needs one of them to be 1")
    outer_bytes = operand.stride(1 - inner) * operand.element_size()
    if outer_bytes % _TMA_ALIGNMENT or not outer_bytes or operand.data_ptr() % _TMA_ALIGNMENT:
        return Load(
            "pointer",
            f"strides {operand.stride()} of {operand.dtype} at address {operand.data_ptr():#x}; "
            f"TMA needs multiples of {_TMA_ALIGNMENT} bytes",
        )
    return Load("tma" if inner else "tma_transposed", "")


def launch(
    x: Tensor,
    weights: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    config: GemmConfig,
    num_programs: int,
    epilogue: Epilogue = NOTHING,
    chunks: Chunks | None = None,
    status: Tensor | None = None,
    counters: Tensor | None = None,
    timeout_us: int = 0,
) -> Loads:
    """Starts the kernel on checked tensors: with a `status` it waits, with `counters` it publishes."""
    w, *others = weights
    M, K = x.shape
    loads = Loads(choose_load(config, x), choose_load(config, w, len(weights)))
    if not any(y.numel() for y in outputs):
        return loads
    columns = [len(weight) for weight in weights] + [0] * (MAX_WEIGHTS - len(weights))
    others += [None] * (MAX_WEIGHTS - len(weights))
    absent = MAX_WEIGHTS - len(outputs)
    signals = (chunks.starts, chunks.flags, chunks.epoch) if chunks else (None, None, None)
    rank, world, num_chunks = (chunks.rank, chunks.world, chunks.num_chunks) if chunks else (0, 1, 1)
    tile_columns = config.tile_n // 2 if epilogue.activation == "swiglu" else config.tile_n
    num_tiles_n = sum(triton.cdiv(count, tile_columns) for count in columns)
    num_tiles = triton.cdiv(M, config.tile_m) * num_tiles_n
    residual = epilogue.residual
    gemm_kernel[(min(num_programs, num_tiles),)](
        _operand(x, loads.x, (config.tile_m, config.tile_k)),
        _operand(w, loads.w, (config.tile_n, config.tile_k)),
        *others,
        *epilogue.tensors,
        *outputs,
        *[None] * absent,
        M,
        *columns,
        K,
        *x.stride(),
        *w.stride(),
        *((0, 0) if residual is None else residual.stride()),
        *[y.stride(0) for y in outputs],
        *[0] * absent,
        outputs[0].stride(1),
        *signals,
        status,
        counters,
        rank,
        world,
        num_chunks,
        timeout_us,
        WAIT=status is not None,
        PUBLISH=counters is not None,
        LANES=num_lanes(num_chunks, config.num_warps),
        CLOCK=HAS_CLOCK,
        X_LOAD=loads.x.path,
        W_LOAD=loads.w.path,
        TILE_M=config.tile_m,
        TILE_N=config.tile_n,
        TILE_K=config.tile_k,
        GROUP_M=config.group_for(M // num_chunks, num_tiles_n, num_programs),
        ACTIVATION=epilogue.activation,
        UPCAST=INTERPRETED and x.dtype == torch.bfloat16,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return loads


def _operand(tensor: Tensor, load: Load, tile: tuple[int, int]) -> Any:
    if load.path == "pointer":
        return tensor
    if load.path == "tma_transposed":
        tensor, tile = tensor.T, (tile[1], tile[0])
    return TensorDescriptor.from_tensor(tensor, list(tile))
