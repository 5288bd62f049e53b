"""Weight gradients put off: the second half of a backward that a schedule splits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fusedcomm.ops.wgrad import DeferWgrad, WeightGradient

# What one backward has put off, in its order.
PutOff = list[tuple[Tensor, WeightGradient]]


class WgradQueue:
    """Holds the weight-gradient GEMMs of a stage until its schedule comes to them.

    It is what ops and layers take as `defer_wgrad`; `take`, called after each backward, returns what that backward
    put off, and `compute` computes that of one or more backwards, each GEMM once; `computing_with` does so during one
    more backward.
    `accumulate` is handed them then, and computes them where it keeps gradients: that of `GradientBuckets` or of
    `FullySharded`, or `add_to_grad`.
    """

    keeps_gradients = True

    def __init__(self, accumulate: DeferWgrad) -> None:
        self.accumulate = accumulate
        self._pending: PutOff = []
        # What earlier backwards have put off, while one computes it together with its own.
        self._earlier: dict[Tensor, deque[WeightGradient]] | None = None

    def __call__(self, weight: Tensor, gradient: WeightGradient) -> None:
        """Put off the gradient of `weight`; its activations are kept until it has been computed."""
        if self._earlier is None:
            self._pending.append((weight, gradient.kept()))
            return
        self._compute(weight, self._earlier.pop(weight, deque()))
        self.accumulate(weight, gradient)

    @contextmanager
    def computing_with(self, earlier: Sequence[PutOff]) -> Iterator[None]:
        """Around a backward that puts nothing off: a weight's gradients of `earlier` ones are computed before its own.

        They are complete as backward comes to them, the last layer's first.
        """
        self._earlier = _by_weight(earlier)
        try:
            yield
            # Weights that this backward did not come to.
            self._compute_all(self._earlier)
        finally:
            self._earlier = None

    def take(self) -> PutOff:
        """Everything put off since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def compute(self, backwards: Sequence[PutOff]) -> None:
        """Compute and forget what they put off, weight by weight: those first that the forward uses first.

        So a weight's sum over data-parallel ranks can start while the others are computed, and the next forward finds
        it early. A weight's gradients are added in the order of `backwards`.
        """
        self._compute_all(_by_weight(backwards))

    def __len__(self) -> int:
        return len(self._pending)

    def _compute_all(self, of_weight: dict[Tensor, deque[WeightGradient]]) -> None:
        while of_weight:
            # The last one that backward came to.
            self._compute(*of_weight.popitem())

    def _compute(self, weight: Tensor, gradients: deque[WeightGradient]) -> None:
        # Popping frees each GEMM's activations as soon as it is done.
        while gradients:
            self.accumulate(weight, gradients.popleft())


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
