"""Weight gradients that somebody else computes later: the W half of a split backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

# Called in backward once per weight, with a closure that computes its gradient [N, K]. Autograd then has none for it.
DeferWgrad = Callable[[Tensor, Callable[[], Tensor]], None]


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
            ctx.defer_wgrad(ctx.weight, lambda: dy.flatten(0, -2).t() @ x.flatten(0, -2))
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None, defer_wgrad: DeferWgrad | None) -> Tensor:
    """`x @ weight.T + bias` without a peer."""
    if defer_wgrad is None:
        return F.linear(x, weight, bias)
    return _DeferredLinear.apply(x, weight, bias, defer_wgrad)
