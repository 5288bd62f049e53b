"""What lies between the two GEMMs of an MLP: element by element, so that an op may compute it chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fusedcomm.ops.check import differentiable_once

# gelu in its tanh form; swiglu takes two tensors.
Activation = Literal["gelu", "silu", "swiglu"]


def check_activation(op: str, activation: str | None) -> None:
    if activation not in (None, "gelu", "silu", "swiglu"):
        raise ValueError(f"{op}: activation={activation!r} is unknown; use 'gelu', 'silu' or 'swiglu'")


def activate(activation: Activation | None, inputs: Sequence[Tensor]) -> Tensor:
    """`silu(inputs[0]) * inputs[1]` for swiglu, else the function of the only input; None is the identity.

    Differentiable. Backward keeps the inputs alone, and not `silu(inputs[0])` as autograd would.
    """
    if activation is None:
        return inputs[0]
    # A compiler decides for itself what to keep.
    return _compute(activation, inputs) if torch.compiler.is_compiling() else _Activate.apply(activation, *inputs)


def _compute(activation: Activation, inputs: Sequence[Tensor]) -> Tensor:
    if activation == "swiglu":
        return F.silu(inputs[0]) * inputs[1]
    return F.silu(inputs[0]) if activation == "silu" else F.gelu(inputs[0], approximate="tanh")


def differentiate(activation: Activation, inputs: Sequence[Tensor], grad: Tensor, outs: Sequence[Tensor]) -> Tensor:
    """The activation once more; the gradient of each input goes to its place in `outs`."""
    first = inputs[0]
    if activation == "gelu":
        torch.ops.aten.gelu_backward(grad, first, approximate="tanh", grad_input=outs[0])
        return F.gelu(first, approximate="tanh")
    silu = F.silu(first)
    if activation == "silu":
        torch.ops.aten.silu_backward(grad, first, grad_input=outs[0])
        return silu
    torch.mul(silu, grad, out=outs[1])
    torch.ops.aten.silu_backward(grad * inputs[1], first, grad_input=outs[0])
    return silu.mul_(inputs[1])


class _Activate(Function):
    @staticmethod
    def forward(ctx: Any, activation: Activation, *inputs: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(*inputs)
        # In place, since nothing of autograd's reads it: one buffer less in the cache.
        return F.silu(inputs[0]).mul_(inputs[1]) if activation == "swiglu" else _compute(activation, inputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Once: checkpointing gives them out a single time.
        inputs = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in inputs]
        differentiate(ctx.activation, inputs, grad, grads)
        return None, *grads
