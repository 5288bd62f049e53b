"""The two ops in two parts each: begun now, finished after other work that hides what travels.

A part is an autograd function of its own, tied to the other by an empty tensor. Autograd runs functions in the reverse
order of their making: whatever was computed between beginning and finishing is differentiated between the two again,
so that backward hides its transfers behind the same work, and all ranks make their calls in one order. Several ops may
be under way at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from fusedcomm.comm.record import Path, note_path
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.ops.activation import Activation, activate
from fusedcomm.ops.all_gather_matmul import Save
from fusedcomm.ops.begun import FusedGatherParts, FusedScatterParts, GatherParts, ScatterParts
from fusedcomm.ops.check import (
    as_biases,
    autocast,
    check_matrix_inputs,
    check_save,
    check_sizes,
    differentiable_once,
    refusing,
)
from fusedcomm.ops.chunked import Call, new_call
from fusedcomm.ops.matmul_reduce_scatter import cast_inputs
from fusedcomm.ops.wgrad import DeferWgrad, Sink, local_linear
from fusedcomm.tune.cost import Choice, asked_for, check_method


def begin_all_gather_matmul(
    x_shard: Tensor,
    weights: Sequence[Tensor],
    *,
    group: ProcessGroup,
    biases: Sequence[Tensor | None] = (),
    sizes: Sequence[int] | None = None,
    save: Save = "shard",
    defer_wgrad: DeferWgrad | None = None,
    method: str = "auto",
) -> Callable[[], list[Tensor]]:
    """`all_gather_matmul` along dimension 0 of several weights; the returned function, called once, gives its results.

    What travels when: the rows of x from now on; the function waits for them and multiplies. In backward, what it did
    computes the partial gradients of x and of the weights; the former travel until the gradient of x is asked for.

    Arguments and errors as for `all_gather_matmul`; a `method` of `auto` cuts into the fewest chunks, since other work
    hides the transfer. Every rank begins and finishes in the same order.
    """
    op = "all_gather_matmul"
    world = group.size()
    with refusing(op, group):
        biases = as_biases(op, list(biases) or None, weights)
        (x_shard,), weights, biases = autocast(op, [x_shard], weights, biases, defers_wgrad=defer_wgrad is not None)
        check_matrix_inputs(op, "x_shard", x_shard, weights, biases)
        rows = x_shard.shape[0]
        sizes = [rows] * world if sizes is None else [int(size) for size in sizes]
        check_sizes(op, sizes, world, group.rank(), shard=rows, full=None)
        check_save(op, save)
        _check_run(op, method)
    lead = x_shard.shape[1:-1]
    x = x_shard.reshape(rows, prod(lead), x_shard.shape[-1])
    shapes = [(sum(sizes), *lead, w.shape[0]) for w in weights]
    if world == 1:
        note_path(Path(op, "local", 1, "a group of one"))
        padded = biases or [None] * len(weights)
        return lambda: [
            local_linear(x, w, b, defer_wgrad).reshape(shape) for w, b, shape in zip(weights, padded, shapes)
        ]
    call = _call(op, group, sizes, method, x)
    kind = GatherParts if call.transport is None else FusedGatherParts
    parts = kind(call, save)
    token = _BeginGather.apply(x, parts)

    def finish() -> list[Tensor]:
        results = _FinishGather.apply(token, x.detach(), parts, defer_wgrad, len(weights), *weights, *biases)
        return [y.reshape(shape) for y, shape in zip(results, shapes)]

    return finish


def begin_matmul_reduce_scatter(
    x: Tensor | Sequence[Tensor],
    w_shard: Tensor,
    *,
    group: ProcessGroup,
    bias: Tensor | None = None,
    input_activation: Activation | None = None,
    sizes: Sequence[int] | None = None,
    defer_wgrad: DeferWgrad | None = None,
    method: str = "auto",
) -> Callable[[], Tensor]:
    """`matmul_reduce_scatter` along dimension 0; the returned function, called once, gives its result.

    What travels when: this multiplies, and partial sums leave as they are computed; the function waits for those of
    the own rows and adds them up. In backward the rows of `dy` travel until the gradients of x and the weight are
    asked for.

    Arguments and errors as for `matmul_reduce_scatter`; `method` as for `begin_all_gather_matmul`.
    """
    op = "matmul_reduce_scatter"
    xs = [x] if isinstance(x, Tensor) else list(x)
    world = group.size()
    with refusing(op, group):
        xs, w_shard, bias = cast_inputs(xs, w_shard, bias, input_activation, defers_wgrad=defer_wgrad is not None)
        rows = xs[0].shape[0]
        sizes = list(chunk_sizes(rows, world)) if sizes is None else [int(size) for size in sizes]
        check_sizes(op, sizes, world, group.rank(), shard=None, full=rows)
        _check_run(op, method)
    lead = xs[0].shape[1:-1]
    xs = [x.reshape(rows, prod(lead), x.shape[-1]) for x in xs]
    shape = (sizes[group.rank()], *lead, w_shard.shape[0])
    if world == 1:
        note_path(Path(op, "local", 1, "a group of one"))
        result = local_linear(activate(input_activation, xs), w_shard, bias, defer_wgrad).reshape(shape)
        return lambda: result
    call = _call(op, group, sizes, method, xs[0])
    kind = ScatterParts if call.transport is None else FusedScatterParts
    parts = kind(call, input_activation)
    token = _BeginScatter.apply(w_shard, parts, defer_wgrad, *xs)
    return lambda: _FinishScatter.apply(token, bias, parts).reshape(shape)


def _check_run(op: str, method: str) -> None:
    check_method(method)
    if torch.compiler.is_compiling():
        raise ValueError(
            f"{op}: begun and finished apart, it keeps a transfer under way, which torch.compile cannot trace; "
            "call the whole op, or leave this layer uncompiled"
        )


def _call(op: str, group: ProcessGroup, sizes: Sequence[int], method: str, x: Tensor) -> Call:
    if method == "auto":
        choice = Choice("chunked", 1, "other work hides the transfer")
    else:
        choice = asked_for(method, world=group.size(), rows=sum(sizes) * x.shape[1])
    return new_call(op, group, tuple(sizes), x, choice)


class _BeginGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: GatherParts) -> Tensor:
        ctx.parts = parts
        parts.begin(x)
        return x.new_empty(0)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.parts.finish_backward(), None


class _FinishGather(Function):
    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        x: Tensor,
        parts: GatherParts,
        defer_wgrad: DeferWgrad | None,
        num_weights: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        results, saved = parts.finish(x, weights, biases)
        ctx.parts, ctx.weights, ctx.num_biases, ctx.defer_wgrad = parts, weights, len(biases), defer_wgrad
        ctx.save_for_backward(saved, *weights)
        return tuple(results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved, *weights = ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)
        sink = Sink(ctx.weights, ctx.needs_input_grad[5 : 5 + len(weights)], ctx.defer_wgrad)
        ctx.parts.begin_backward(grads, saved, weights, need_x=ctx.needs_input_grad[0], sink=sink)
        # Past an error here what travels is lost, and the group with it: other begun ops are under way as well.
        sink.close()
        dbs = [grad.sum((0, 1)) for grad in grads[: ctx.num_biases]]
        return saved.new_empty(0), None, None, None, None, *sink.dws, *dbs


class _BeginScatter(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, parts: ScatterParts, defer_wgrad: DeferWgrad | None, *xs: Tensor) -> Tensor:
        ctx.parts, ctx.weight, ctx.defer_wgrad = parts, w, defer_wgrad
        ctx.save_for_backward(w, *xs)
        parts.begin(xs, w)
        return w.new_empty(0)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, _: Tensor) -> Any:
        w, *xs = ctx.saved_tensors
        need_w, _, _, *need_xs = ctx.needs_input_grad
        sink = Sink([ctx.weight], [need_w], ctx.defer_wgrad)
        dxs = ctx.parts.finish_backward(xs, w, need_x=any(need_xs), sink=sink)
        sink.close()
        return *sink.dws, None, None, *(dxs or [None] * len(xs))


class _FinishScatter(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, bias: Tensor | None, parts: ScatterParts) -> Tensor:
        ctx.parts = parts
        return parts.finish(bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.needs_input_grad[0]:
            ctx.parts.begin_backward(grad)
        db = grad.sum((0, 1)) if ctx.needs_input_grad[1] else None
        return grad.new_empty(0), db, None
