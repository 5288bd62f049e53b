"""The kernel: `x @ w.T` as one persistent grid whose tiles can wait for their rows, and announce them.

The plain product, the one that eats chunks as they arrive (all_gather_matmul.py) and the one that gives them
away (matmul_reduce_scatter.py) are this kernel: its hooks are compile-time switches around the same tile.
"""

from __future__ import annotations

from fusedcomm.kernels._triton import tl, triton
from fusedcomm.kernels.epilogue import store_tile
from fusedcomm.kernels.flags import ALL_GATHER_MATMUL, announce_rows, wait_for_rows
from fusedcomm.kernels.tile_order import all_chunks, first_gathered_tile, first_scattered_tile, tile_at


@triton.jit
def next_weight(
    tile_n, w_ptr, y_ptr, column, N, stride_ym, after_w_ptr, after_y_ptr, after_N, after_stride_ym, TILE_N: tl.constexpr
):
    """Goes on to the weight after this one, and its output, if the tile's columns are behind this one."""
    num_tiles = tl.cdiv(N, TILE_N)
    behind = tile_n >= num_tiles
    return (
        tl.where(behind, tile_n - num_tiles, tile_n),
        tl.where(behind, after_w_ptr, w_ptr),
        tl.where(behind, after_y_ptr, y_ptr),
        tl.where(behind, column + N, column),
        tl.where(behind, after_N, N),
        tl.where(behind, after_stride_ym, stride_ym),
    )


@triton.jit
def gemm_tile(
    x_ptr,
    w_ptr,
    w1_ptr,
    w2_ptr,
    bias_ptr,
    residual_ptr,
    x_scale_ptr,
    w_scale_ptr,
    y_ptr,
    y1_ptr,
    y2_ptr,
    tile_m,
    tile_n,
    M,
    N,
    N1,
    N2,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_rm,
    stride_rn,
    stride_ym,
    stride_y1m,
    stride_y2m,
    stride_yn,
    X_LOAD: tl.constexpr,
    W_LOAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes and stores one tile of the product of x and one of the weights, accumulated in fp32, in its output."""
    column = 0
    lane_n = tl.arange(0, TILE_N)
    offs_m = tile_m * TILE_M + tl.arange(0, TILE_M)
    if ACTIVATION == "swiglu":
        offs_n = tile_n * (TILE_N // 2) + lane_n // 2
        # Columns of gate and up alternate, so that one thread holds both.
        w_ptr = tl.where((lane_n % 2 == 0)[None, :], w_ptr, w1_ptr)
    else:
        if w1_ptr is not None:
            tile_n, w_ptr, y_ptr, column, N, stride_ym = next_weight(
                tile_n, w_ptr, y_ptr, column, N, stride_ym, w1_ptr, y1_ptr, N1, stride_y1m, TILE_N
            )
        if w2_ptr is not None:
            tile_n, w_ptr, y_ptr, column, N, stride_ym = next_weight(
                tile_n, w_ptr, y_ptr, column, N, stride_ym, w2_ptr, y2_ptr, N2, stride_y2m, TILE_N
            )
        offs_n = tile_n * TILE_N + lane_n
    offs_k = tl.arange(0, TILE_K)
    # Offsets are 64-bit: a tensor may hold more than 2^31 elements.
    depth = offs_k.to(tl.int64)
    step = tl.full((), TILE_K, tl.int64)
    if X_LOAD == "pointer":
        mask_m = (offs_m < M)[:, None]
        x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * stride_xm + depth[None, :] * stride_xk
    if W_LOAD == "pointer":
        mask_n = (offs_n < N)[None, :]
        w_ptrs = w_ptr + offs_n.to(tl.int64)[None, :] * stride_wn + depth[:, None] * stride_wk

    accumulator = tl.zeros((TILE_M, TILE_N), tl.float32)
    for k in tl.range(0, K, TILE_K):
        mask_k = offs_k < K - k
        if X_LOAD == "pointer":
            x = tl.load(x_ptrs, mask=mask_m & mask_k[None, :], other=0.0)  # [TILE_M, TILE_K]
            x_ptrs += step * stride_xk
        elif X_LOAD == "tma":
            x = x_ptr.load([tile_m * TILE_M, k])
        else:
            x = x_ptr.load([k, tile_m * TILE_M]).T
        if W_LOAD == "pointer":
            w = tl.load(w_ptrs, mask=mask_k[:, None] & mask_n, other=0.0)  # [TILE_K, TILE_N]
            w_ptrs += step * stride_wk
        elif W_LOAD == "tma":
            w = w_ptr.load([tile_n * TILE_N, k]).T
        else:
            w = w_ptr.load([k, tile_n * TILE_N])
        if UPCAST:
            # The interpreter multiplies the bit patterns of bf16.
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        # Without "ieee" fp32 would be rounded to tf32, which torch does not do either. Tensor cores of sm_90 add
        # products of fp8 with 14 bits; their sums go to fp32 at every step.
        accumulator = tl.dot(
            x,
            w,
            accumulator,
            input_precision="ieee",
            max_num_imprecise_acc=TILE_K if x.dtype.is_fp8() else None,
        )

    store_tile(
        accumulator,
        bias_ptr,
        residual_ptr,
        x_scale_ptr,
        w_scale_ptr,
        y_ptr,
        offs_m,
        tile_n * TILE_N,
        column,
        M,
        N,
        stride_rm,
        stride_rn,
        stride_ym,
        stride_yn,
        ACTIVATION,
        TILE_M,
        TILE_N,
    )


# Numbers that differ between ranks, or from run to run, must not make Triton compile the kernel anew.
@triton.jit(do_not_specialize=["rank", "timeout_us"])
def gemm_kernel(
    x_ptr,
    w_ptr,
    w1_ptr,
    w2_ptr,
    bias_ptr,
    residual_ptr,
    x_scale_ptr,
    w_scale_ptr,
    y_ptr,
    y1_ptr,
    y2_ptr,
    M,
    N,
    N1,
    N2,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_rm,
    stride_rn,
    stride_ym,
    stride_y1m,
    stride_y2m,
    stride_yn,
    chunk_starts_ptr,
    flags_ptr,
    epoch_ptr,
    status_ptr,
    counters_ptr,
    rank,
    world,
    num_chunks,
    timeout_us,
    WAIT: tl.constexpr,
    PUBLISH: tl.constexpr,
    LANES: tl.constexpr,
    CLOCK: tl.constexpr,
    X_LOAD: tl.constexpr,
    W_LOAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    num_tiles_m = tl.cdiv(M, TILE_M)
    if ACTIVATION == "swiglu":
        num_tiles_n = tl.cdiv(N, TILE_N // 2)
    else:
        # An absent weight has no columns.
        num_tiles_n = tl.cdiv(N, TILE_N) + tl.cdiv(N1, TILE_N) + tl.cdiv(N2, TILE_N)
    first_tile_m = 0
    # False once a chunk did not come, in this kernel or in one before it: what is left to do is void.
    alive = True
    if WAIT or PUBLISH:
        epoch = tl.load(epoch_ptr)
        chunks_per_rank = num_chunks // world
        # In registers from here on: a tile looks at them without waiting for memory.
        chunk, starts, stops = all_chunks(chunk_starts_ptr, num_chunks, LANES)
    if WAIT:
        alive = tl.load(status_ptr) == 0
        own_start = tl.load(chunk_starts_ptr + rank * chunks_per_rank).to(tl.int32)
        first_tile_m = first_gathered_tile(own_start, num_tiles_m, TILE_M)
        # Chunks known to be here; a lane without rows has nothing to look at.
        seen = starts >= stops
    if PUBLISH:
        next_start = tl.load(chunk_starts_ptr + (rank + 1) % world * chunks_per_rank).to(tl.int32)
        first_tile_m = first_scattered_tile(next_start, M, TILE_M)

    # Not flattened with the loop over K: a wait in between would end the pipelining of its loads.
    for index in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0)):
        tile_m, tile_n = tile_at(index, first_tile_m, num_tiles_m, num_tiles_n, GROUP_M)
        row_begin = tile_m * TILE_M
        row_end = tl.minimum(row_begin + TILE_M, M)
        if WAIT:
            if alive:
                seen, alive = wait_for_rows(
                    chunk,
                    starts,
                    stops,
                    flags_ptr,
                    status_ptr,
                    epoch,
                    seen,
                    row_begin,
                    row_end,
                    chunks_per_rank,
                    timeout_us,
                    OP=ALL_GATHER_MATMUL,
                    TMA=X_LOAD != "pointer",
                    CLOCK=CLOCK,
                )
        if alive:
            gemm_tile(
                x_ptr,
                w_ptr,
                w1_ptr,
                w2_ptr,
                bias_ptr,
                residual_ptr,
                x_scale_ptr,
                w_scale_ptr,
                y_ptr,
                y1_ptr,
                y2_ptr,
                tile_m,
                tile_n,
                M,
                N,
                N1,
                N2,
                K,
                stride_xm,
                stride_xk,
                stride_wn,
                stride_wk,
                stride_rm,
                stride_rn,
                stride_ym,
                stride_y1m,
                stride_y2m,
                stride_yn,
                X_LOAD,
                W_LOAD,
                TILE_M,
                TILE_N,
                TILE_K,
                ACTIVATION,
                UPCAST,
            )
            if PUBLISH:
                announce_rows(
                    chunk,
                    starts,
                    stops,
                    flags_ptr,
                    counters_ptr,
                    epoch,
                    row_begin,
                    row_end,
                    num_tiles_n,
                    TILE_M,
                )
