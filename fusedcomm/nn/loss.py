"""Cross entropy over a vocabulary that is split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from fusedcomm.nn.embedding import check_ids
from fusedcomm.nn.layout import at_least_fp32

# Rows are widened to fp32 so many logits at a time, so that the wide copy stays small beside the logits
# themselves.
_LOGITS_AT_A_TIME = 1 << 24


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, group: ProcessGroup, ignore_index: int = -100
) -> Tensor:
    """Per-token losses `log(sum(exp(logits))) - logits[target]` in fp32; 0 where target is `ignore_index`.

    Shapes per rank, W ranks: logits [..., V/W], targets [...] equal on all ranks, result [...] equal on all
    ranks. Two small all-reduces travel in forward (the maximum; the sum of exponentials together with the
    target's logit), nothing in backward, which makes the softmax again from the logits in place of keeping
    it.

    Raises ValueError, before anything is sent, for shapes that do not fit and (on the CPU) for targets
    outside 0..V-1; on a CUDA device such targets fail a device-side assertion. Source of the split:
    Megatron-LM.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"vocab_parallel_cross_entropy: logits are {list(logits.shape)} but targets "
            f"{list(targets.shape)}; targets must have the logits' shape without the last dimension"
        )
    if targets.device != logits.device:
        raise ValueError(
            f"vocab_parallel_cross_entropy: targets are on {targets.device} but logits on "
            f"{logits.device}; move one of them"
        )
    vocab_size = logits.shape[-1] * group.size()
    check_ids("vocab_parallel_cross_entropy", "target", targets, vocab_size, ignore_index)
    matrix = logits.reshape(targets.numel(), logits.shape[-1])
    return _CrossEntropy.apply(matrix, targets.flatten(), group, ignore_index).view(targets.shape)


@torch.no_grad()
def vocab_parallel_hits(logits: Tensor, targets: Tensor, *, group: ProcessGroup) -> Tensor:
    """Where no logit is greater than the target's, as bool; False for targets outside 0..V-1.

    Shapes as `vocab_parallel_cross_entropy`. Two small all-reduces travel: the maximum, and the target's logit.
    """
    matrix = logits.reshape(targets.numel(), logits.shape[-1])
    column, is_local = _local_targets(targets.flatten(), matrix.shape[1], group.rank())
    top = at_least_fp32(matrix.amax(-1))
    picked = at_least_fp32(matrix.gather(1, column[:, None]).squeeze(1)).masked_fill(~is_local, float("-inf"))
    _all_reduce(top, dist.ReduceOp.MAX, group)
    _all_reduce(picked, dist.ReduceOp.MAX, group)
    return (picked >= top).view(targets.shape)


class _CrossEntropy(torch.autograd.Function):
    """logits [T, V/W], targets [T] -> losses [T]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup, ignore_index: int) -> Tensor:
        column, is_local = _local_targets(targets, logits.shape[1], group.rank())
        ignored = targets == ignore_index
        wide = torch.promote_types(logits.dtype, torch.float32)

        top = torch.empty(len(targets), dtype=wide, device=logits.device)
        for rows in _blocks(logits):
            top[rows] = logits[rows].amax(-1)
        _all_reduce(top, dist.ReduceOp.MAX, group)

        # Row 0: the sum of exponentials. Row 1: the target's logit, from the one rank that has it. Both less
        # the maximum.
        sums = torch.empty(2, len(targets), dtype=wide, device=logits.device)
        for rows in _blocks(logits):
            shifted = at_least_fp32(logits[rows]) - top[rows, None]
            picked = shifted.gather(1, column[rows, None]).squeeze(1)
            sums[1, rows] = picked.masked_fill(~is_local[rows], 0)
            sums[0, rows] = shifted.exp_().sum(-1)
        _all_reduce(sums, dist.ReduceOp.SUM, group)

        log_sum = sums[0].log()
        ctx.save_for_backward(logits, log_sum + top, column, is_local, ignored)
        return (log_sum - sums[1]).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, log_sum_exp, column, is_local, ignored = ctx.saved_tensors
        scale = grad.masked_fill(ignored, 0)
        d_logits = torch.empty_like(logits)
        for rows in _blocks(logits):
            softmax = (at_least_fp32(logits[rows]) - log_sum_exp[rows, None]).exp_()
            at_target = is_local[rows].to(softmax.dtype).neg_().unsqueeze(1)
            softmax.scatter_add_(1, column[rows, None], at_target)
            d_logits[rows] = softmax.mul_(scale[rows, None])
        return d_logits, None, None, None


def _local_targets(targets: Tensor, num_local: int, rank: int) -> tuple[Tensor, Tensor]:
    """The targets' columns on this rank, 0 where another rank has them, and where they are local."""
    column = targets.long() - rank * num_local
    is_local = (column >= 0) & (column < num_local)
    return column.masked_fill(~is_local, 0), is_local


def _blocks(logits: Tensor) -> Iterator[slice]:
    num_rows, num_columns = logits.shape
    step = max(1, _LOGITS_AT_A_TIME // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup) -> None:
    if group.size() > 1 and x.numel():
        dist.all_reduce(x, op=op, group=group)
