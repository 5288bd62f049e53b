"""Every op in plain torch, on the tensors of all ranks at once: the oracle of the tests and the benchmarks.

Inputs and results are lists with one entry per rank. Differentiable; computed in the inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def all_gather_matmul(
    x_shards: Sequence[Tensor],
    w_shards: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    dim: int = 0,
) -> list[Tensor]:
    """`x [..., M, ..., K]` concatenated from the shards, times each rank's `w_shard [N, K]`."""
    x = torch.cat(list(x_shards), dim)
    return [F.linear(x, w, None if bias is None else bias[rank]) for rank, w in enumerate(w_shards)]


def matmul_reduce_scatter(
    xs: Sequence[Tensor],
    w_shards: Sequence[Tensor],
    *,
    sizes: Sequence[int],
    bias: Tensor | None = None,
    dim: int = 0,
) -> list[Tensor]:
    """The GEMM over the whole of K, its rows split by `sizes`."""
    y = F.linear(torch.cat(list(xs), -1), torch.cat(list(w_shards), 1), bias)
    return list(y.split(list(sizes), dim))


def matmul_all_reduce(xs: Sequence[Tensor], w_shards: Sequence[Tensor], *, bias: Tensor | None = None) -> list[Tensor]:
    """The GEMM over the whole of K, on every rank: one and the same tensor, to be differentiated once."""
    return [F.linear(torch.cat(list(xs), -1), torch.cat(list(w_shards), 1), bias)] * len(xs)
