"""The sum of all ranks' partial results, in one fixed order."""

from __future__ import annotations

from torch import Tensor

from fusedcomm.kernels._triton import tl, triton
from fusedcomm.kernels.checks import check_device, check_dtypes, check_vector

TILE_M = 32
TILE_N = 128


@triton.jit
def reduce_kernel(
    partials_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    stride_pw,
    stride_pm,
    stride_pn,
    stride_ym,
    stride_yn,
    WORLD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    offs_m = (tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)[:, None]
    offs_n = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    partial_ptrs = partials_ptr + offs_m * stride_pm + offs_n * stride_pn
    step = tl.full((), 1, tl.int64) * stride_pw
    total = tl.load(partial_ptrs, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(WORLD - 1):  # pyright: ignore[reportGeneralTypeIssues]
        partial_ptrs += step
        total += tl.load(partial_ptrs, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs_m * stride_ym + offs_n * stride_yn, total.to(y_ptr.dtype.element_ty), mask=mask)


def reduce(partials: Tensor, y: Tensor, *, bias: Tensor | None = None) -> None:
    """Writes `partials[0] + partials[1] + ... + bias` into `y`, added in fp32 in that order.

    partials [W, rows, N] and y [rows, N] with any strides; bias [N]. fp32, bf16 or fp16, not necessarily one
    of them. Raises ValueError on tensors that do not fit together.
    """
    if partials.ndim != 3 or not partials.shape[0] or y.shape != partials.shape[1:]:
        raise ValueError(
            f"reduce: partials are {tuple(partials.shape)} and the output is {tuple(y.shape)}; must be "
            "[W, rows, N] with W at least 1, and [rows, N]"
        )
    check_dtypes("reduce", partials=partials, output=y, bias=bias)
    check_vector("reduce", "bias", bias, "N", y.shape[1])
    check_device("reduce", partials, y, bias)
    world, M, N = partials.shape
    if not M or not N:
        return
    reduce_kernel[(triton.cdiv(M, TILE_M), triton.cdiv(N, TILE_N))](
        partials, bias, y, M, N, *partials.stride(), *y.stride(), WORLD=world, TILE_M=TILE_M, TILE_N=TILE_N
    )
