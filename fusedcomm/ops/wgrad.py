"""Weight gradients that somebody else computes, when and where it suits: the W half of a split backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fusedcomm.comm.record import span
from fusedcomm.ops.activation import Activation, activate


class WeightGradient:
    """The gradient `dy.T @ activation(x)` of a weight `[N, K]`, still to be computed.

    `dy [..., N]` and `x [..., K]`, two of them for swiglu, hold the same rows, and are held until it is let go.
    """

    def __init__(self, dy: Tensor, xs: Sequence[Tensor], activation: Activation | None = None) -> None:
        self._dy, self._xs = dy, xs
        self._activation: Activation | None = activation

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
            dy, x = self._matrices()
            if dy.dtype == out.dtype:
                out.addmm_(dy.t(), x, beta=0 if overwrite else 1)
                return
            grad = torch.mm(dy.t(), x, out_dtype=out.dtype) if dy.is_cuda else dy.t() @ x
            if overwrite:
                out.copy_(grad)
            else:
                out.add_(grad)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        xs = [x.flatten(0, -2) for x in self._xs]
        return self._dy.flatten(0, -2), activate(self._activation, xs)


# Called in backward once per weight, of which autograd then has no gradient.
DeferWgrad = Callable[[Tensor, WeightGradient], None]


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
