"""Weight gradients put off: the second half of a backward that a schedule splits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomm.ops.wgrad import DeferWgrad, WeightGradient

# What one backward has put off, in its order.
PutOff = list[tuple[Tensor, WeightGradient]]


class WgradQueue:
    """Holds the weight-gradient GEMMs of a stage until its schedule comes to them.

    `put` is what ops and layers take as `defer_wgrad`; `take`, called after each backward, returns what that backward
    put off, and `compute` computes that of one or more backwards, each GEMM once.
    `accumulate` is handed them then, and computes them where it keeps gradients: that of `GradientBuckets` or of
    `FullySharded`, or `add_to_grad`.
    """

    def __init__(self, accumulate: DeferWgrad) -> None:
        self.accumulate = accumulate
        self._pending: PutOff = []

    def put(self, weight: Tensor, gradient: WeightGradient) -> None:
        """Put off the gradient of `weight`; its activations are kept until it has been computed."""
        self._pending.append((weight, gradient))

    def take(self) -> PutOff:
        """Everything put off since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def compute(self, backwards: Sequence[PutOff]) -> None:
        """Compute and forget what they put off, weight by weight: those first that the forward uses first.

        So a weight's sum over data-parallel ranks can start while the others are computed, and the next forward finds
        it early. A weight's gradients are added in the order of `backwards`.
        """
        of_weight = _by_weight(backwards)
        while of_weight:
            # The last one that backward came to. Popping frees each GEMM's activations as soon as it is done.
            weight, gradients = of_weight.popitem()
            while gradients:
                self.accumulate(weight, gradients.popleft())

    def __len__(self) -> int:
        return len(self._pending)


def _by_weight(backwards: Sequence[PutOff]) -> dict[Tensor, deque[WeightGradient]]:
    """What they put off, which they then no longer hold; weights in the order of the backwards."""
    found: dict[Tensor, deque[WeightGradient]] = {}
    for put_off in backwards:
        for weight, gradient in put_off:
            found.setdefault(weight, deque()).append(gradient)
        put_off.clear()
    return found


def add_to_grad(param: Tensor, gradient: WeightGradient) -> None:
    """What autograd does with a leaf's gradient, but without its hooks."""
    if param.grad is None:
        param.grad = torch.empty_like(param, requires_grad=False)
        gradient.add_to(param.grad, overwrite=True)
    else:
        gradient.add_to(param.grad)
