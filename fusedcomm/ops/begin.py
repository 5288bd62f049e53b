"""The two ops in two parts each: begun now, finished after other work that hides what travels.

A part is an autograd function of its own, tied to the other by an empty tensor. Autograd runs functions in the reverse
order of their making: whatever was computed between beginning and finishing is differentiated between the two again,
so that backward hides its transfers behind the same work, and all ranks make their calls in one order. Several ops may
be under way at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from fusedcomm.comm.record import Path, note_path
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.ops.activation import Activation, activate
from fusedcomm.ops.all_gather_matmul import Save, multiply_gathered, scatter_input_gradient
from fusedcomm.ops.check import check_matrix_inputs, check_sizes, refusing
from fusedcomm.ops.chunked import Call, Gather, Scatter
from fusedcomm.ops.matmul_reduce_scatter import check_inputs, multiply_gathered_gradient, scatter_products
from fusedcomm.ops.wgrad import DeferWgrad, WeightGradient, local_linear
from fusedcomm.tune.cost import Choice, check_method, chunked, is_fused, serial


def begin_all_gather_matmul(
    x_shard: Tensor,
    weights: Sequence[Tensor],
    *,
    group: ProcessGroup,
    biases: Sequence[Tensor] = (),
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
        check_matrix_inputs(op, "x_shard", x_shard, weights, biases)
        rows = x_shard.shape[0]
        sizes = [rows] * world if sizes is None else [int(size) for size in sizes]
        check_sizes(op, sizes, world, group.rank(), shard=rows, full=None)
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
    call = _call(op, group, sizes, method, x.shape[1])
    flight = _GatherFlight(call, save, defer_wgrad)
    token = _BeginGather.apply(x, flight)

    def finish() -> list[Tensor]:
        results = _FinishGather.apply(token, x.detach(), flight, len(weights), *weights, *biases)
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
        check_inputs(xs, w_shard, bias, input_activation)
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
    flight = _ScatterFlight(_call(op, group, sizes, method, xs[0].shape[1]), input_activation, defer_wgrad)
    token = _BeginScatter.apply(w_shard, flight, *xs)
    return lambda: _FinishScatter.apply(token, bias, flight).reshape(shape)


def _check_run(op: str, method: str) -> None:
    check_method(method)
    if is_fused(method):
        raise ValueError(
            f"{op}: begun and finished apart, it cannot run with method='{method}', whose one kernel computes and "
            "waits within one call; use 'auto', 'chunked' or 'serial'"
        )
    if torch.compiler.is_compiling():
        raise ValueError(
            f"{op}: begun and finished apart, it keeps a transfer under way, which torch.compile cannot trace; "
            "call the whole op, or leave this layer uncompiled"
        )


def _call(op: str, group: ProcessGroup, sizes: Sequence[int], method: str, lead: int) -> Call:
    if method == "serial":
        choice = serial("asked for")
    elif method == "chunked":
        choice = chunked("asked for", world=group.size(), rows=sum(sizes) * lead)
    else:
        choice = Choice("chunked", 1, "other work hides the transfer")
    return Call(op, group, tuple(sizes), choice)


def _noted(call: Call, device: torch.device, part: str = "") -> Call:
    """The call under the name of its part, with the path that it takes noted."""
    call = replace(call, op=f"{call.op}{part}")
    note_path(call.path(device))
    return call


@dataclass
class _GatherFlight:
    """What the two parts of one all-gather-matmul have in common; the transfers only while they are under way."""

    call: Call
    save: Save
    defer_wgrad: DeferWgrad | None
    gather: Gather | None = None
    scatter: Scatter | None = None


class _BeginGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _GatherFlight) -> Tensor:
        ctx.flight = flight
        flight.gather = Gather(_noted(flight.call, x.device), x.contiguous(), keep=flight.save == "gathered")
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        scatter, ctx.flight.scatter = ctx.flight.scatter, None
        return scatter.finish(), None


class _FinishGather(Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, x: Tensor, flight: _GatherFlight, num_weights: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        gather, flight.gather = flight.gather, None
        assert gather is not None, "an op is finished once"
        results = multiply_gathered(gather, x, weights, biases)
        ctx.flight, ctx.weights, ctx.num_biases = flight, weights, len(biases)
        ctx.save_for_backward(gather.full if flight.save == "gathered" else x, *weights)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flight, (saved, *weights) = ctx.flight, ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)
        defer_wgrad = flight.defer_wgrad
        trained = ctx.needs_input_grad[4 : 4 + len(weights)]
        call = _noted(flight.call, saved.device, " backward")
        gather = None
        if any(trained) and flight.save == "shard":
            again = Call(f"{call.op} gather", call.group, call.sizes, call.choice)
            gather = Gather(again, saved.contiguous(), keep=defer_wgrad is not None)
        if ctx.needs_input_grad[0]:
            flight.scatter = Scatter(call, saved.shape[1], saved.shape[2], saved)
            scatter_input_gradient(flight.scatter, grads, None, weights)
        x_full = saved if gather is None else gather.complete()
        dws: list[Tensor | None] = [None] * len(weights)
        for index, (weight, grad) in enumerate(zip(ctx.weights, grads)):
            if trained[index] and defer_wgrad is not None:
                defer_wgrad(weight, WeightGradient(grad, [x_full]))
            elif trained[index]:
                dws[index] = WeightGradient(grad, [x_full]).compute()
        if gather is not None:
            gather.release()
        dbs = [grad.sum((0, 1)) for grad in grads[: ctx.num_biases]]
        return saved.new_empty(0), None, None, None, *dws, *dbs


@dataclass
class _ScatterFlight:
    """The same for a matmul-reduce-scatter."""

    call: Call
    input_activation: Activation | None
    defer_wgrad: DeferWgrad | None
    scatter: Scatter | None = None
    gather: Gather | None = None


class _BeginScatter(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, flight: _ScatterFlight, *xs: Tensor) -> Tensor:
        ctx.flight, ctx.weight = flight, w
        ctx.save_for_backward(w, *xs)
        flight.scatter = Scatter(_noted(flight.call, w.device), xs[0].shape[1], w.shape[0], xs[0])
        scatter_products(flight.scatter, xs, w, flight.input_activation)
        return w.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        w, *xs = ctx.saved_tensors
        flight = ctx.flight
        gather, flight.gather = flight.gather, None
        need_w, _, *need_xs = ctx.needs_input_grad
        defer_wgrad, activation = flight.defer_wgrad, flight.input_activation
        dxs, dw = multiply_gathered_gradient(
            gather, xs, w, activation, need_x=any(need_xs), need_w=need_w and defer_wgrad is None
        )
        if need_w and defer_wgrad is not None:
            defer_wgrad(ctx.weight, WeightGradient(gather.full, xs, activation))
        return dw, None, *(dxs or [None] * len(xs))


class _FinishScatter(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, bias: Tensor | None, flight: _ScatterFlight) -> Tensor:
        scatter, flight.scatter = flight.scatter, None
        assert scatter is not None, "an op is finished once"
        ctx.flight = flight
        return scatter.finish(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        flight = ctx.flight
        if ctx.needs_input_grad[0]:
            call = _noted(flight.call, grad.device, " backward")
            flight.gather = Gather(call, grad.contiguous(), keep=flight.defer_wgrad is not None)
        db = grad.sum((0, 1)) if ctx.needs_input_grad[1] else None
        return grad.new_empty(0), db, None
