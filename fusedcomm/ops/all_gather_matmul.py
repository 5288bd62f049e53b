"""All-gather-matmul: the GEMM of a column-parallel layer, on rows that are gathered while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import group_named
from fusedcomm.comm.record import Path, note_path, span
from fusedcomm.ops.activation import Activation, activate, check_activation
from fusedcomm.ops.check import (
    as_biases,
    autocast,
    check_matrix_inputs,
    check_save,
    check_sizes,
    differentiable_once,
    refusing,
    row_dim,
)
from fusedcomm.ops.chunked import GATHER_DIRECTIONS, Call, Gather, Scatter, flat, run_backward, run_by
from fusedcomm.ops.wgrad import DeferWgrad, Sink, WeightGradient, check_defer, local_linear
from fusedcomm.tune.cost import check_method

_OP = "all_gather_matmul"
Save = Literal["shard", "gathered"]


def all_gather_matmul(
    x_shard: Tensor,
    w_shard: Tensor | Sequence[Tensor],
    *,
    group: ProcessGroup,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    activation: Activation | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    save: Save = "shard",
    return_gathered: bool = False,
    defer_wgrad: DeferWgrad | None = None,
    method: str = "auto",
) -> Any:
    """Gather the rows of `x` over `group` and multiply them with this rank's rows of the weight.

    Per rank, for a group of W ranks and rows along `dim` (any dimension but the last):

        x_shard   [..., sizes[rank], ..., K]     rows of this rank
        w_shard   [N, K], or several of them     this rank's output features; they share one gather
        result    [..., sum(sizes), ..., N]      one per weight

    Forward: at distance 1, 2, ... W-1 every rank's rows travel from their owner, while rows that are there are
    multiplied. Backward: the partial `dx` of each peer's rows travels to its owner as soon as it is computed, while
    the others and `dw` are; partials are added in fp32 in the order of ranks. With `save="shard"` the gathered input
    is not kept: it is gathered again behind the `dx` GEMM. `save="gathered"` keeps it, W times the activation.

    Args:
        bias: `[N]`, or one (or None) per weight; added on every row.
        activation: `gelu` (tanh form) or `silu` on each result, or `swiglu` on two weights: one result `silu(a) * b`.
        sizes: rows of every rank along `dim`; None when all ranks hold as many as this one.
        return_gathered: return `(result, x)` with the gathered input `[..., sum(sizes), ..., K]`, differentiable.
        defer_wgrad: is handed each weight's `WeightGradient` in backward, to compute at once where gradients are
            kept, or later if it is `kept()`.
        method: `auto`, `serial`, `chunked` or `fused`, or by a certain transport `fused:symmetric`, `fused:shared` or
            `fused:c10d`.

    Returns:
        The result, or a list of them when `w_shard` is a sequence (a single one for `swiglu`).

    Raises:
        ValueError: an input is wrong on this rank; nothing was sent but the news of it.
        PeerError: a peer called something else, refused its input, was late beyond the group's time-out or died.

    Source of the method: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large
    Deep Learning Models", ASPLOS 2023.
    """
    weights = [w_shard] if isinstance(w_shard, Tensor) else list(w_shard)
    world = group.size()
    with refusing(_OP, group):
        biases = as_biases(_OP, bias, weights)
        (x_shard,), weights, biases = autocast(_OP, [x_shard], weights, biases, defers_wgrad=defer_wgrad is not None)
        check_matrix_inputs(_OP, "x_shard", x_shard, weights, biases)
        dim = row_dim(_OP, dim, x_shard.dim())
        rows = x_shard.shape[dim]
        sizes = [rows] * world if sizes is None else [int(size) for size in sizes]
        check_sizes(_OP, sizes, world, group.rank(), shard=rows, full=None)
        check_defer(_OP, defer_wgrad)
        check_method(method)
        check_save(_OP, save)
        check_activation(_OP, activation)
        if activation == "swiglu" and (len(weights) != 2 or weights[0].shape != weights[1].shape):
            shapes = [list(w.shape) for w in weights]
            raise ValueError(f"{_OP}: activation='swiglu' needs two weights of one shape but got {shapes}")

    within, is_swiglu = None, activation == "swiglu"
    front = x_shard.movedim(dim, 0)
    lead = front.shape[1:-1]
    x = front.reshape(rows, prod(lead), front.shape[-1])
    if world == 1:
        if not torch.compiler.is_compiling():
            note_path(Path(_OP, "local", 1, "a group of one"))
        padded = biases or [None] * len(weights)
        outputs = [x, *(local_linear(x, w, b, defer_wgrad) for w, b in zip(weights, padded))]
    elif defer_wgrad is not None:
        outputs = _DeferredAllGatherMatmul.apply(
            x, group, sizes, save, method, return_gathered, defer_wgrad, *weights, *biases
        )
    else:
        if not _needs_gradient(x, weights, biases):
            # Nobody will ask for what the activation was applied to: it may be the kernel's last step.
            within, activation = activation, None
        outputs = _forward_op(x, weights, biases, group.group_name, sizes, save, method, return_gathered, within)
    gathered, *results = outputs
    results = [y.reshape(sum(sizes), *lead, y.shape[-1]).movedim(0, dim) for y in results]
    results = _activate(results, activation)
    result = results[0] if isinstance(w_shard, Tensor) or is_swiglu else results
    if not return_gathered:
        return result
    return result, gathered.reshape(sum(sizes), *lead, gathered.shape[-1]).movedim(0, dim)


def _needs_gradient(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights, *biases))


def _activate(results: list[Tensor], activation: Activation | None) -> list[Tensor]:
    return [activate(activation, results)] if activation == "swiglu" else [activate(activation, [y]) for y in results]


def _forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    call: Call,
    activation: Activation | None,
    *,
    keep: bool,
) -> list[Tensor]:
    """`[x_full, y, ...]` from `x [rows of this rank, lead, K]`; `x_full` is empty unless it is to be kept."""
    if call.transport is not None:
        from fusedcomm.ops import fused

        return fused.gather_matmul(fused.FusedCall.of(call), x, weights, biases, activation, keep=keep)
    gather = Gather(call, x.contiguous(), keep=keep)
    results = _activate(multiply_gathered(gather, x, weights, biases), activation)
    return [gather.full if keep else x.new_empty(0), *results]


def multiply_gathered(gather: Gather, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """`[y, ...]` from the gathered rows of `x`, chunk by chunk as they come in."""
    results = [x.new_empty(gather.call.rows, x.shape[1], w.shape[0]) for w in weights]
    for start, stop, there in gather.chunks():
        rows = flat(there)
        with span("compute", _OP):
            for index, (w, y) in enumerate(zip(weights, results)):
                out = flat(y, start, stop)
                if biases:
                    torch.addmm(biases[index], rows, w.t(), out=out)
                else:
                    torch.mm(rows, w.t(), out=out)
    gather.release()
    return results


def _backward(
    grads: Sequence[Tensor],
    grad_full: Tensor | None,
    saved: Tensor,
    weights: Sequence[Tensor],
    group: ProcessGroup,
    sizes: Sequence[int],
    save: str,
    method: str,
    *,
    need_x: bool,
    sink: Sink,
) -> Tensor | None:
    """`dx`, if it is needed; the weights' gradients go to `sink`, while the partial sums of `dx` travel."""
    grads = [grad.contiguous() for grad in grads]
    saved = saved.contiguous()
    regather = sink.is_needed and save == "shard"

    def run(call: Call, sink: Sink) -> Tensor | None:
        if call.transport is None:
            begun = begin_backward(call, grads, grad_full, saved, weights, regather=regather, need_x=need_x, sink=sink)
        else:
            from fusedcomm.ops import fused

            begun = fused.gather_matmul_backward(
                fused.FusedCall.of(call), grads, grad_full, saved, weights, regather=regather, need_x=need_x, sink=sink
            )
        return None if begun is None else begun.finish()

    features = [w.shape[0] for w in weights]
    ways = GATHER_DIRECTIONS if regather else ()
    needs = {"dx": need_x, "gather": regather}
    return run_backward(method, _OP, group, sizes, saved, features, run, sink, needs=needs, directions=ways)


def begin_backward(
    call: Call,
    grads: Sequence[Tensor],
    grad_full: Tensor | None,
    saved: Tensor,
    weights: Sequence[Tensor],
    *,
    regather: bool,
    need_x: bool,
    sink: Sink,
) -> Scatter | None:
    """dx on its way, if it is needed, with the weights' gradients gone to `sink`.

    `saved` are our own rows of x, if it is to `regather` the others' behind the product for dx, or all of them.
    """
    # First in the queue of what travels: it is needed first.
    gather = Gather(replace(call, op=f"{call.op} gather"), saved, keep=False) if regather else None
    if gather is not None and call.is_serial:
        gather.complete()
    scatter = None
    if need_x:
        scatter = Scatter(call, saved.shape[1], saved.shape[2], saved)
        _scatter_input_gradient(scatter, grads, grad_full, weights)
        if call.is_serial:
            scatter.arrive()
    if sink.is_needed:
        if gather is not None and not call.is_serial:
            gather.complete()
        sink([WeightGradient(grad, [gather or saved], hides_transfer=need_x) for grad in grads])
    if gather is not None:
        gather.release()
    return scatter


def _scatter_input_gradient(
    scatter: Scatter, grads: Sequence[Tensor], grad_full: Tensor | None, weights: Sequence[Tensor]
) -> None:
    """Compute this rank's partial `dx` of all rows and let each peer's go."""
    for start, stop, out in scatter.chunks():
        with span("compute", f"{scatter.call.op} dx"):
            matrix = out.flatten(0, 1)
            torch.mm(flat(grads[0], start, stop), weights[0], out=matrix)
            for grad, w in zip(grads[1:], weights[1:]):
                matrix.addmm_(flat(grad, start, stop), w)
            if grad_full is not None:
                out += grad_full[start:stop]


@torch.library.custom_op("fusedcomm::all_gather_matmul", mutates_args=())
def _forward_op(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    group_name: str,
    sizes: Sequence[int],
    save: str,
    method: str,
    return_gathered: bool,
    activation: str | None,
) -> list[Tensor]:
    """`[x_full, y, ...]`; x_full is empty unless asked for, because checkpointing keeps whole lists of outputs.

    An `activation` has no gradient here: it is given where none is needed.
    """
    keep = return_gathered or save == "gathered"
    features = [w.shape[0] for w in weights]
    return run_by(
        method,
        _OP,
        group_named(group_name),
        sizes,
        x,
        x.shape[1:],
        features,
        lambda call: _forward(x, weights, biases, call, cast(Activation, activation), keep=keep),
        directions=GATHER_DIRECTIONS,
    )


@_forward_op.register_fake
def _(x, weights, biases, group_name, sizes, save, method, return_gathered, activation):
    rows = sum(sizes)
    if activation == "swiglu":
        weights = weights[:1]
    x_full = x.new_empty(rows, *x.shape[1:]) if return_gathered or save == "gathered" else x.new_empty(0)
    return [x_full] + [x.new_empty(rows, x.shape[1], w.shape[0]) for w in weights]


@torch.library.custom_op("fusedcomm::all_gather_matmul_backward", mutates_args=())
def _backward_op(
    grads: Sequence[Tensor],
    grad_full: Tensor | None,
    saved: Tensor,
    weights: Sequence[Tensor],
    group_name: str,
    sizes: Sequence[int],
    save: str,
    method: str,
    need_x: bool,
    need_w: bool,
) -> list[Tensor]:
    """`[dx, dw, ...]`; an empty tensor where one is not needed."""
    sink = Sink(weights, [need_w] * len(weights), None)
    group = group_named(group_name)
    dx = _backward(grads, grad_full, saved, weights, group, sizes, save, method, need_x=need_x, sink=sink)
    return [saved.new_empty(0) if tensor is None else tensor for tensor in (dx, *sink.dws)]


@_backward_op.register_fake
def _(grads, grad_full, saved, weights, group_name, sizes, save, method, need_x, need_w):
    rank = group_named(group_name).rank()
    dx = saved.new_empty(sizes[rank], *saved.shape[1:]) if need_x else saved.new_empty(0)
    return [dx] + [saved.new_empty(w.shape if need_w else 0) for w in weights]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, _, ctx.group_name, ctx.sizes, ctx.save, ctx.method, ctx.return_gathered, _ = inputs
    ctx.save_for_backward(output[0] if ctx.save == "gathered" else x, *weights)


def _autograd(ctx: Any, grads: list[Tensor | None]) -> Any:
    saved, *weights = ctx.saved_tensors
    grad_full, *grad_results = grads
    if not ctx.return_gathered:
        grad_full = None
    lead = saved.shape[1]
    filled = [
        saved.new_zeros(sum(ctx.sizes), lead, w.shape[0]) if grad is None else grad
        for grad, w in zip(grad_results, weights)
    ]
    need_x, need_ws, need_bs, *_ = ctx.needs_input_grad
    need_w = any(need_ws)
    dx, *dws = _backward_op(
        filled, grad_full, saved, weights, ctx.group_name, ctx.sizes, ctx.save, ctx.method, need_x, need_w
    )
    dbs = [grad.sum((0, 1)) if need else None for grad, need in zip(filled, need_bs)]
    return (
        dx if need_x else None,
        [dw if need else None for dw, need in zip(dws, need_ws)],
        dbs,
        *(None for _ in range(6)),
    )


_forward_op.register_autograd(_autograd, setup_context=_setup_context)


class _DeferredAllGatherMatmul(Function):
    """The same op, with the weight gradients handed to `defer_wgrad`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: ProcessGroup,
        sizes: list[int],
        save: str,
        method: str,
        return_gathered: bool,
        defer_wgrad: DeferWgrad,
        *weights_and_biases: Tensor,
    ) -> tuple[Tensor, ...]:
        weights = [t for t in weights_and_biases if t.dim() == 2]
        biases = [t for t in weights_and_biases if t.dim() == 1]
        # Through the registered op, whose outputs selective checkpointing can keep.
        outputs = _forward_op(x, weights, biases, group.group_name, sizes, save, method, return_gathered, None)
        ctx.group, ctx.sizes, ctx.method = group, sizes, method
        ctx.return_gathered = return_gathered
        ctx.save, ctx.defer_wgrad, ctx.weights, ctx.num_biases = save, defer_wgrad, weights, len(biases)
        ctx.save_for_backward(outputs[0] if save == "gathered" else x, *weights)
        return tuple(outputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_full: Tensor, *grads: Tensor) -> Any:
        saved, *weights = ctx.saved_tensors
        dx = _backward(
            grads,
            grad_full if ctx.return_gathered else None,
            saved,
            weights,
            ctx.group,
            ctx.sizes,
            ctx.save,
            ctx.method,
            need_x=ctx.needs_input_grad[0],
            sink=Sink(ctx.weights, [w.requires_grad for w in ctx.weights], ctx.defer_wgrad),
        )
        dbs = [grad.sum((0, 1)) for grad in grads[: ctx.num_biases]]
        return dx, None, None, None, None, None, None, *(None for _ in weights), *dbs
