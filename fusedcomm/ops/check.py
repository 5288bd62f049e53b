"""What every op checks before anything is sent, and how a rank that finds fault tells its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import channel_of, has_gloo

# Those that the kernels compute in.
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@contextmanager
def refusing(op: str, group: ProcessGroup) -> Iterator[None]:
    """A `ValueError` in the block reaches the peers as well, instead of leaving them to their time-outs."""
    try:
        yield
    except ValueError as error:
        if group.size() > 1 and not torch.compiler.is_compiling():
            # Over NCCL a lone message would hang: there the peers' own check, or the watchdog, ends the call.
            if has_gloo(group):
                channel_of(group).refuse(op, str(error).removeprefix(f"{op}: "))
        raise


def as_biases(op: str, bias: Tensor | Sequence[Tensor | None] | None, weights: Sequence[Tensor]) -> list[Tensor]:
    """One bias per weight, or none at all; a missing one among others is zero."""
    if bias is None:
        return []
    biases = [bias] if isinstance(bias, Tensor) else list(bias)
    if len(biases) != len(weights):
        raise ValueError(f"{op}: {len(biases)} biases for {len(weights)} weights; give one (or None) per weight")
    if all(b is None for b in biases):
        return []
    return [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases)]


def autocast(op: str, *groups: Sequence[Tensor], defers_wgrad: bool) -> Sequence[Sequence[Tensor]]:
    """The tensors as `nn.Linear` takes its own: in the dtype of a `torch.autocast` around the call; float64 stays.

    Raises:
        ValueError: there is one, and the gradient of the weight itself is to be handed on.
    """
    device_type = next((tensor.device.type for group in groups for tensor in group), "cpu")
    if not torch.is_autocast_enabled(device_type):
        return groups
    if defers_wgrad:
        raise ValueError(
            f"{op}: defer_wgrad within torch.autocast, where a cast of the weight is multiplied; keep weights in the "
            "dtype to compute in, or leave autocast"
        )
    dtype = torch.get_autocast_dtype(device_type)
    return [[tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in group] for group in groups]


def check_matrix_inputs(op: str, x_name: str, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
    """One dtype and device; `x [..., K]`, every weight `[N, K]`, every bias `[N]`."""
    check_dtype(op, x_name, x)
    if x.dim() < 2:
        raise ValueError(f"{op}: {x_name} has shape {list(x.shape)}; it needs rows and features, at least 2 dimensions")
    if not weights:
        raise ValueError(f"{op}: w_shard is an empty list; give at least one weight")
    for index, w in enumerate(weights):
        name = "w_shard" if len(weights) == 1 else f"w_shard[{index}]"
        if w.dim() != 2:
            raise ValueError(f"{op}: {name} has shape {list(w.shape)}; weights are [N, K] as nn.Linear stores them")
        if w.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{op}: {name} has K={w.shape[1]} but {x_name} has K={x.shape[-1]}; "
                "both must hold the same K on this rank"
            )
        _check_alike(op, x_name, x, name, w)
    for index, b in enumerate(biases):
        if b.shape != (weights[index].shape[0],):
            raise ValueError(
                f"{op}: bias has shape {list(b.shape)} but its weight has N={weights[index].shape[0]}; a bias is [N]"
            )
        _check_alike(op, x_name, x, "bias", b)


def check_dtype(op: str, name: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"{op}: {name} has dtype {x.dtype}; the ops compute in float32, bfloat16, float16 or float64")


def check_save(op: str, save: str) -> None:
    if save not in ("shard", "gathered"):
        raise ValueError(f"{op}: save={save!r} is unknown; use 'shard' or 'gathered'")


def check_fused_dtype(op: str, dtype: torch.dtype) -> None:
    """ValueError for a dtype that `method="fused"` cannot compute in."""
    if dtype not in FUSED_DTYPES:
        raise ValueError(
            f"{op}: method='fused' computes in float32, bfloat16 or float16 but x has {dtype}; "
            "cast it, or use method='chunked'"
        )


def check_current_gpu(op: str, device: torch.device) -> None:
    """ValueError unless kernels and streams are those of the tensors' GPU."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"{op}: the tensors are on {device}, but the current GPU is cuda:{torch.cuda.current_device()}, on which "
            "kernels and transfers would start; call torch.cuda.set_device(LOCAL_RANK) first"
        )


def _check_alike(op: str, x_name: str, x: Tensor, name: str, other: Tensor) -> None:
    if other.dtype != x.dtype:
        raise ValueError(f"{op}: {name} has dtype {other.dtype} but {x_name} has {x.dtype}; cast one of them")
    if other.device != x.device:
        raise ValueError(f"{op}: {name} is on {other.device} but {x_name} is on {x.device}; move one of them")


def row_dim(op: str, dim: int, ndim: int) -> int:
    """`dim` counted from the front; any but the last."""
    if not -ndim <= dim < ndim:
        raise ValueError(f"{op}: dim={dim} is out of range for {ndim} dimensions")
    dim %= ndim
    if dim == ndim - 1:
        raise ValueError(
            f"{op}: dim={dim} is the last one, the features K; gathering or scattering K is another operation: "
            "choose a dimension of rows"
        )
    return dim


def check_sizes(op: str, sizes: Sequence[int], world: int, rank: int, *, shard: int | None, full: int | None) -> None:
    """`sizes` has one entry per rank, fits this rank's `shard` and sums to `full`."""
    if len(sizes) != world or any(size < 0 for size in sizes):
        raise ValueError(
            f"{op}: sizes={list(sizes)} must hold one row count >= 0 for each of the {world} ranks of the group"
        )
    if shard is not None and sizes[rank] != shard:
        raise ValueError(
            f"{op}: sizes={list(sizes)} gives rank {rank} {sizes[rank]} rows but its shard has {shard}; "
            "sizes[rank] must be the shard's rows along dim"
        )
    if full is not None and sum(sizes) != full:
        raise ValueError(
            f"{op}: sizes={list(sizes)} sum to {sum(sizes)} rows but x has {full} along dim; they must agree"
        )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """An op's backward, whose results raise a RuntimeError where their own gradients are asked for.

    They depend on peers' tensors, of which autograd knows nothing here. torch's `once_differentiable` lets results pass
    as constants where `dy` is one, though they depend on the saved tensors.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        return tuple(None if r is None else _NotTwice.apply(r.detach().requires_grad_(), *grads) for r in results)

    return once


class _NotTwice(Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *grads: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "fusedcomm: the backward of an op was to be differentiated, but only first derivatives are computed; leave "
            "its gradients out of what is differentiated again, or compute that part without fusedcomm's ops"
        )
