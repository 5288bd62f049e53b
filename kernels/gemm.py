"""`x @ w.T` as one persistent kernel whose tiles can wait for their rows, and announce them.

The plain product, the one that eats chunks as they arrive (all_gather_matmul.py) and the one that gives them
away (matmul_reduce_scatter.py) are this kernel: its hooks are compile-time switches around the same tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedcomm.kernels._triton import INTERPRETED, tl, triton
from fusedcomm.kernels.checks import check_matmul
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.flags import ALL_GATHER_MATMUL, Chunks, announce_rows, wait_for_rows
from fusedcomm.kernels.tile_order import first_gathered_tile, first_scattered_tile, tile_at


@triton.jit
def activate(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    return y


@triton.jit
def gemm_tile(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    tile_m,
    tile_n,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_ym,
    stride_yn,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes and stores one tile of `activation(x @ w.T + bias)`, accumulated in fp32."""
    offs_m = tile_m * TILE_M + tl.arange(0, TILE_M)
    offs_n = tile_n * TILE_N + tl.arange(0, TILE_N)
    offs_k = tl.arange(0, TILE_K)
    mask_m = offs_m < M
    mask_n = offs_n < N
    # Offsets are 64-bit: a tensor may hold more than 2^31 elements.
    rows_m = offs_m.to(tl.int64)[:, None]
    rows_n = offs_n.to(tl.int64)[None, :]
    depth = offs_k.to(tl.int64)
    step = tl.full((), TILE_K, tl.int64)

    x_ptrs = x_ptr + rows_m * stride_xm + depth[None, :] * stride_xk
    w_ptrs = w_ptr + rows_n * stride_wn + depth[:, None] * stride_wk
    accumulator = tl.zeros((TILE_M, TILE_N), tl.float32)
    for k in tl.range(0, K, TILE_K):
        mask_k = offs_k < K - k
        x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)  # [TILE_M, TILE_K]
        w = tl.load(w_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)  # [TILE_K, TILE_N]
        if UPCAST:
            # The interpreter multiplies the bit patterns of bf16.
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        # Without "ieee" fp32 would be rounded to tf32, which torch does not do either.
        accumulator = tl.dot(x, w, accumulator, input_precision="ieee")
        x_ptrs += step * stride_xk
        w_ptrs += step * stride_wk

    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0)
        accumulator += bias.to(tl.float32)[None, :]
    y = activate(accumulator, ACTIVATION).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + rows_m * stride_ym + rows_n * stride_yn, y, mask=mask_m[:, None] & mask_n[None, :])


# Numbers that differ between ranks, or from run to run, must not make Triton compile the kernel anew.
@triton.jit(do_not_specialize=["rank", "max_polls"])
def gemm_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_ym,
    stride_yn,
    chunk_starts_ptr,
    flags_ptr,
    epoch_ptr,
    status_ptr,
    counters_ptr,
    rank,
    world,
    num_chunks,
    max_polls,
    WAIT: tl.constexpr,
    PUBLISH: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    num_tiles_m = tl.cdiv(M, TILE_M)
    num_tiles_n = tl.cdiv(N, TILE_N)
    first_tile_m = 0
    # False once a chunk did not come, in this kernel or in one before it: what is left to do is void.
    alive = True
    if WAIT:
        epoch = tl.load(epoch_ptr)
        alive = tl.load(status_ptr) == 0
        own_start = tl.load(chunk_starts_ptr + rank * (num_chunks // world)).to(tl.int32)
        first_tile_m = first_gathered_tile(own_start, num_tiles_m, TILE_M)
    if PUBLISH:
        epoch = tl.load(epoch_ptr)
        next_rank = (rank + 1) % world
        next_start = tl.load(chunk_starts_ptr + next_rank * (num_chunks // world)).to(tl.int32)
        first_tile_m = first_scattered_tile(next_start, M, TILE_M)

    # Not flattened with the loop over K: a wait in between would end the pipelining of its loads.
    for index in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0)):
        tile_m, tile_n = tile_at(index, first_tile_m, num_tiles_m, num_tiles_n, GROUP_M)
        row_begin = tile_m * TILE_M
        row_end = tl.minimum(row_begin + TILE_M, M)
        if WAIT:
            if alive:
                alive = wait_for_rows(
                    chunk_starts_ptr,
                    flags_ptr,
                    status_ptr,
                    epoch,
                    row_begin,
                    row_end,
                    num_chunks,
                    world,
                    max_polls,
                    OP=ALL_GATHER_MATMUL,
                    MAX_CHUNKS=MAX_CHUNKS,
                )
        if alive:
            gemm_tile(
                x_ptr,
                w_ptr,
                bias_ptr,
                y_ptr,
                tile_m,
                tile_n,
                M,
                N,
                K,
                stride_xm,
                stride_xk,
                stride_wn,
                stride_wk,
                stride_ym,
                stride_yn,
                TILE_M,
                TILE_N,
                TILE_K,
                ACTIVATION,
                UPCAST,
            )
            if PUBLISH:
                announce_rows(
                    chunk_starts_ptr,
                    flags_ptr,
                    counters_ptr,
                    epoch,
                    row_begin,
                    row_end,
                    num_chunks,
                    num_tiles_n,
                    TILE_M,
                    MAX_CHUNKS,
                )


def gemm(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    config: GemmConfig,
    num_programs: int,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Writes `activation(x @ w.T + bias)` into `y`.

    x [M, K], w [N, K], y [M, N] with any strides, so transposed views give the products of backward;
    bias [N]. fp32, bf16 or fp16, accumulated in fp32; `y` and `bias` may be of other types than `x`.
    `activation` is None, "gelu" (exact) or "silu". `num_programs` is the size of the persistent grid.
    Raises ValueError on tensors that do not fit together.
    """
    check_matmul("gemm", x, w, y, bias=bias, activation=activation, num_programs=num_programs)
    launch(x, w, y, bias=bias, activation=activation, config=config, num_programs=num_programs)


def launch(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    config: GemmConfig,
    num_programs: int,
    bias: Tensor | None = None,
    activation: str | None = None,
    chunks: Chunks | None = None,
    status: Tensor | None = None,
    counters: Tensor | None = None,
    max_polls: int = 0,
) -> None:
    """Starts the kernel on checked tensors: with a `status` it waits, with `counters` it publishes."""
    M, K = x.shape
    N = w.shape[0]
    if not M or not N:
        return
    signals = (chunks.starts, chunks.flags, chunks.epoch) if chunks else (None, None, None)
    rank, world, num_chunks = (chunks.rank, chunks.world, chunks.num_chunks) if chunks else (0, 1, 1)
    num_tiles = triton.cdiv(M, config.tile_m) * triton.cdiv(N, config.tile_n)
    gemm_kernel[(min(num_programs, num_tiles),)](
        x,
        w,
        bias,
        y,
        M,
        N,
        K,
        *x.stride(),
        *w.stride(),
        *y.stride(),
        *signals,
        status,
        counters,
        rank,
        world,
        num_chunks,
        max_polls,
        WAIT=status is not None,
        PUBLISH=counters is not None,
        MAX_CHUNKS=triton.next_power_of_2(num_chunks),
        TILE_M=config.tile_m,
        TILE_N=config.tile_n,
        TILE_K=config.tile_k,
        GROUP_M=config.group_for(M // num_chunks),
        ACTIVATION=activation,
        UPCAST=INTERPRETED and x.dtype == torch.bfloat16,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
