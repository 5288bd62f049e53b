"""Weight gradients put off: the second half of a backward that a zero-bubble schedule splits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedcomm.ops.wgrad import DeferWgrad, WeightGradient


class WgradQueue:
    """Holds the weight-gradient GEMMs of a stage until its schedule has time for them.

    `put` is what ops and layers take as `defer_wgrad`; `take`, called after each backward, returns a function that
    computes what that backward put off, each GEMM once (the `dw_builder` of a torch `PipelineStage`).
    `accumulate` is handed them then, and computes them where it keeps gradients: that of `GradientBuckets` or of
    `FullySharded`, or `add_to_grad`.
    """

    def __init__(self, accumulate: DeferWgrad) -> None:
        self.accumulate = accumulate
        self._pending: list[tuple[Tensor, WeightGradient]] = []

    def put(self, weight: Tensor, gradient: WeightGradient) -> None:
        """Put off the gradient of `weight`; its activations are kept until it has been computed."""
        self._pending.append((weight, gradient))

    def take(self) -> Callable[[], None]:
        """Everything put off since the last call, as one function to be called once."""
        taken, self._pending = self._pending, []
        taken.reverse()

        def run() -> None:
            # Popping frees each GEMM's activations as soon as it is done.
            while taken:
                self.accumulate(*taken.pop())

        return run

    def __len__(self) -> int:
        return len(self._pending)


def add_to_grad(param: Tensor, gradient: WeightGradient) -> None:
    """What autograd does with a leaf's gradient, but without its hooks."""
    if param.grad is None:
        param.grad = torch.empty_like(param, requires_grad=False)
        gradient.add_to(param.grad, overwrite=True)
    else:
        gradient.add_to(param.grad)
