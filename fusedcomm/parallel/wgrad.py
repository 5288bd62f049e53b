"""Weight gradients put off: the second half of a backward that a zero-bubble schedule splits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class WgradQueue:
    """Holds the weight-gradient GEMMs of a stage until its schedule has time for them.

    `put` is what ops and layers take as `defer_wgrad`; `take`, called after each backward, returns a function that
    computes what that backward put off, each GEMM once (the `dw_builder` of a torch `PipelineStage`).
    `accumulate(param, grad)` receives the gradients: `GradientBuckets.accumulate`, or `add_to_grad`.
    """

    def __init__(self, accumulate: Callable[[Tensor, Tensor], None]) -> None:
        self.accumulate = accumulate
        self._pending: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def put(self, weight: Tensor, compute: Callable[[], Tensor]) -> None:
        """Put off the gradient of `weight`; `compute` keeps its activations until it has run."""
        self._pending.append((weight, compute))

    def take(self) -> Callable[[], None]:
        """Everything put off since the last call, as one function to be called once."""
        taken, self._pending = self._pending, []
        taken.reverse()

        @torch.no_grad()
        def run() -> None:
            # Popping frees each GEMM's activations as soon as it is done.
            while taken:
                weight, compute = taken.pop()
                self.accumulate(weight, compute())

        return run

    def __len__(self) -> int:
        return len(self._pending)


@torch.no_grad()
def add_to_grad(param: Tensor, grad: Tensor) -> None:
    """What autograd does with a leaf's gradient, but without its hooks."""
    param.grad = grad.to(param.dtype) if param.grad is None else param.grad.add_(grad)
