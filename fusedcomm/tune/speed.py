"""Shares for ranks of different speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_ROUNDS = 5


def propose_sizes(total: int, x: Tensor, w: Tensor, *, group: ProcessGroup, multiple: int = 1) -> list[int]:
    """Cut `total` features over the ranks of `group` in proportion to their measured GEMM speed.

    Every rank multiplies all M rows, by its own share of the weight: a rank at half speed sets the pace of all unless
    its share is smaller. That is N of an all-gather-matmul, whose `w_shard [N, K]` may have another N on every rank,
    and K of the matmul-reduce-scatter that follows.

    Args:
        x, w: this rank's `[M, K]` and `[N, K]`, as large as they will be; `x @ w.T` is timed on all ranks at once.
        multiple: sizes are multiples of it (64 for tensor cores, head_dim for attention); it divides `total`.

    Returns:
        One size per rank, the same list on all ranks; `torch.split` cuts a whole weight by it.
    """
    if total % multiple:
        raise ValueError(f"propose_sizes: total={total} is no multiple of {multiple}; choose another multiple")
    seconds = []
    dist.barrier(group)
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        torch.mm(x, w.t())
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        seconds.append(time.perf_counter() - start_s)
    speeds: list[Any] = [None] * group.size()
    dist.all_gather_object(speeds, 1 / statistics.median(seconds), group=group)
    return [size * multiple for size in proportional(total // multiple, speeds)]


def proportional(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers with sum `total` nearest to the weights' shares: largest remainders are rounded up."""
    shares = [total * weight / sum(weights) for weight in weights]
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: sizes[index] - shares[index])
    for index in by_remainder[: total - sum(sizes)]:
        sizes[index] += 1
    return sizes
