"""Weight gradients as objects: whoever keeps gradients computes them, where he keeps them and when it suits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fusedcomm.comm.record import span
from fusedcomm.ops.activation import Activation, activate
from fusedcomm.ops.check import differentiable_once


class LentRows(Protocol):
    """All rows of a tensor, in memory that a transfer uses again when the op that gathered them ends."""

    @property
    def full(self) -> Tensor:
        """Them, `[rows, ..., features]`."""
        ...

    def kept(self) -> Tensor:
        """The same rows for good."""
        ...


class WeightGradient:
    """The gradient `dy.T @ activation(x)` of a weight `[N, K]`, still to be computed.

    `dy [..., N]` and `x [..., K]`, two of them for swiglu, hold the same rows, and are held until it is let go. Whoever
    is handed one computes it once: before he returns, or later if he takes `kept()` in its place.

    Attributes:
        hides_transfer: the op that handed it over has something under way that is to travel meanwhile.
    """

    def __init__(
        self,
        dy: Tensor | LentRows,
        xs: Sequence[Tensor | LentRows],
        activation: Activation | None = None,
        *,
        hides_transfer: bool = False,
    ) -> None:
        self.hides_transfer = hides_transfer
        self._dy, self._xs = dy, xs
        self._activation: Activation | None = activation

    def kept(self) -> WeightGradient:
        """The same gradient, which may be computed when the op that handed it over has ended."""
        return WeightGradient(*self._kept_rows(), self._activation)

    @torch.no_grad()
    def compute(self) -> Tensor:
        """The gradient, in the dtype of `dy` and `x`."""
        with span("compute", "dw"):
            dy, x = self._matrices()
            return dy.t() @ x

    @torch.no_grad()
    def add_to(self, out: Tensor, *, overwrite: bool = False) -> None:
        """Add it to `out [N, K]`, or put it in the place of what `out` holds.

        No gradient is allocated where `out` has the dtype of `dy` and `x`. With an fp32 `out` for bf16 or fp16
        the product stays in fp32 on CUDA; elsewhere torch has no such GEMM, and the product is rounded as `compute`
        does before it is added.
        """
        with span("compute", "dw"):
            add_product(out, *self._matrices(), overwrite=overwrite)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        dy, *xs = (rows if isinstance(rows, Tensor) else rows.full for rows in (self._dy, *self._xs))
        return dy.flatten(0, -2), activate(self._activation, [x.flatten(0, -2) for x in xs])

    def _kept_rows(self) -> tuple[Tensor, list[Tensor]]:
        dy, *xs = (rows if isinstance(rows, Tensor) else rows.kept() for rows in (self._dy, *self._xs))
        return dy, xs


def add_product(out: Tensor, dy: Tensor, x: Tensor, *, overwrite: bool) -> None:
    """`out += dy.T @ x` of matrices with the same rows, or `out = dy.T @ x`; rounded as `add_to` above says."""
    if dy.dtype == out.dtype:
        out.addmm_(dy.t(), x, beta=0 if overwrite else 1)
        return
    product = torch.mm(dy.t(), x, out_dtype=out.dtype) if dy.is_cuda else dy.t() @ x
    if overwrite:
        out.copy_(product)
    else:
        out.add_(product)


# Called in backward once per weight, of which autograd then has no gradient. One that computes them all later says so
# by an attribute `keeps_gradients` that is true: the tuner then times the op without them.
DeferWgrad = Callable[[Tensor, WeightGradient], None]


class Sink:
    """Where the gradients of an op's weights go: to `defer_wgrad`, or computed into `dws`, for autograd.

    Called once, with one for each weight, at the moment of the op's backward at which computing them hides the most.
    Something of the op travels then, so what `defer_wgrad` raises is raised by `close`, and the group left in order.
    """

    def __init__(self, weights: Sequence[Tensor], trained: Sequence[bool], defer_wgrad: DeferWgrad | None) -> None:
        self.dws: list[Tensor | None] = [None] * len(weights)
        self._weights, self._trained, self._defer_wgrad = weights, trained, defer_wgrad
        self._error: Exception | None = None

    @property
    def is_needed(self) -> bool:
        return any(self._trained)

    def __call__(self, gradients: Sequence[WeightGradient]) -> None:
        for index, gradient in enumerate(gradients):
            if not self._trained[index]:
                continue
            if self._defer_wgrad is None:
                self.dws[index] = gradient.compute()
                continue
            try:
                self._defer_wgrad(self._weights[index], gradient)
            except Exception as error:
                self._error = error
                return

    def close(self) -> None:
        """Nothing of the op travels any more."""
        if self._error is not None:
            raise self._error

    def for_trial(self) -> Sink:
        """What takes this one's place while a way to run the op is timed: as much is done, and nothing comes of it."""
        keeps = getattr(self._defer_wgrad, "keeps_gradients", False)
        return Sink(self._weights, self._trained, _keep if keeps else None)


def _keep(weight: Tensor, gradient: WeightGradient) -> None:
    gradient.kept()


def check_defer(op: str, defer_wgrad: DeferWgrad | None) -> None:
    if defer_wgrad is not None and torch.compiler.is_compiling():
        raise ValueError(
            f"{op}: defer_wgrad is a Python callback, which torch.compile cannot trace; "
            "leave it out, or leave this layer uncompiled"
        )


class _DeferredLinear(Function):
    """`F.linear` whose weight gradient goes to `defer_wgrad`: the ops on a group of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, defer_wgrad: DeferWgrad) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.defer_wgrad, ctx.weight = defer_wgrad, weight
        return F.linear(x, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.weight.requires_grad:
            ctx.defer_wgrad(ctx.weight, WeightGradient(dy, [x]))
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None, defer_wgrad: DeferWgrad | None) -> Tensor:
    """`x @ weight.T + bias` without a peer."""
    if defer_wgrad is None:
        return F.linear(x, weight, bias)
    return _DeferredLinear.apply(x, weight, bias, defer_wgrad)
