"""Matmul-reduce-scatter: the GEMM of a row-parallel layer, whose partial sums leave while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import group_named
from fusedcomm.comm.record import Path, note_path, span
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.ops.activation import Activation, activate, check_activation, differentiate
from fusedcomm.ops.check import autocast, check_matrix_inputs, check_sizes, differentiable_once, refusing, row_dim
from fusedcomm.ops.chunked import GATHER_DIRECTIONS, Call, Gather, Scatter, flat, run_backward, run_by
from fusedcomm.ops.wgrad import DeferWgrad, Sink, WeightGradient, add_product, check_defer, local_linear
from fusedcomm.tune.cost import check_method

_OP = "matmul_reduce_scatter"


def matmul_reduce_scatter(
    x: Tensor | Sequence[Tensor],
    w_shard: Tensor,
    *,
    group: ProcessGroup,
    bias: Tensor | None = None,
    input_activation: Activation | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    defer_wgrad: DeferWgrad | None = None,
    method: str = "auto",
) -> Tensor:
    """Multiply with this rank's share of K, sum over `group`, and keep this rank's rows.

    Per rank, for a group of W ranks and rows along `dim` (any dimension but the last):

        x         [..., M, ..., K]               all rows, this rank's input features (two of them for swiglu)
        w_shard   [N, K]                         this rank's input features
        result    [..., sizes[rank], ..., N]     this rank's rows, summed over the ranks (not averaged)

    Forward: the partial sums of each peer's rows leave for their owner as soon as they are computed, the own rows come
    last; the owner adds the W partials in fp32 in the order of ranks. Backward: one gather of `dy` feeds `dx` and
    `dw` chunk by chunk. An input activation is computed with each chunk, too, and again in backward, so that it hides
    behind what travels and its result is never kept.

    Args:
        bias: `[N]`, added once, after the sum, by the owner of the rows: its gradient covers those rows alone, and is
            complete when summed over the group.
        input_activation: what is multiplied is `gelu(x)` (tanh form) or `silu(x)`, or with `swiglu` and
            `x = [a, b]` of one shape `silu(a) * b`.
        sizes: rows of every rank along `dim`; None cuts M as `torch.chunk` would.
        defer_wgrad: is handed the weight's `WeightGradient` in backward, to compute at once where gradients are
            kept, or later if it is `kept()`.
        method: `auto`, `serial`, `chunked` or `fused`, or by a certain transport `fused:symmetric`, `fused:shared` or
            `fused:c10d`.

    Raises:
        ValueError: an input is wrong on this rank; nothing was sent but the news of it.
        PeerError: a peer called something else, refused its input, was late beyond the group's time-out or died.

    Source of the method: as `all_gather_matmul`.
    """
    xs = [x] if isinstance(x, Tensor) else list(x)
    world = group.size()
    with refusing(_OP, group):
        xs, w_shard, bias = cast_inputs(xs, w_shard, bias, input_activation, defers_wgrad=defer_wgrad is not None)
        dim = row_dim(_OP, dim, xs[0].dim())
        rows = xs[0].shape[dim]
        sizes = list(chunk_sizes(rows, world)) if sizes is None else [int(size) for size in sizes]
        check_sizes(_OP, sizes, world, group.rank(), shard=None, full=rows)
        check_defer(_OP, defer_wgrad)
        check_method(method)

    fronts = [x.movedim(dim, 0) for x in xs]
    lead = fronts[0].shape[1:-1]
    xs = [front.reshape(rows, prod(lead), front.shape[-1]) for front in fronts]
    if world == 1:
        if not torch.compiler.is_compiling():
            note_path(Path(_OP, "local", 1, "a group of one"))
        result = local_linear(activate(input_activation, xs), w_shard, bias, defer_wgrad)
    elif defer_wgrad is not None:
        result = _DeferredMatmulReduceScatter.apply(
            w_shard, bias, group, input_activation, sizes, method, defer_wgrad, *xs
        )
    else:
        result = _forward_op(xs, w_shard, bias, group.group_name, input_activation, sizes, method)
    return result.reshape(sizes[group.rank()], *lead, result.shape[-1]).movedim(0, dim)


def cast_inputs(
    xs: Sequence[Tensor],
    w_shard: Tensor,
    bias: Tensor | None,
    input_activation: Activation | None,
    *,
    defers_wgrad: bool,
) -> tuple[Sequence[Tensor], Tensor, Tensor | None]:
    """The tensors as an autocast around the call has them; ValueError for what one rank can see of them."""
    check_activation(_OP, input_activation)
    num_inputs = 2 if input_activation == "swiglu" else 1
    if len(xs) != num_inputs or any(x.shape != xs[0].shape or x.dtype != xs[0].dtype for x in xs):
        shapes = " and ".join(f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in xs) or "nothing"
        raise ValueError(
            f"{_OP}: x is {shapes}; it must be two tensors of one shape and dtype with input_activation='swiglu', and "
            "one without"
        )
    biases = [] if bias is None else [bias]
    xs, (w_shard,), biases = autocast(_OP, xs, [w_shard], biases, defers_wgrad=defers_wgrad)
    check_matrix_inputs(_OP, "x", xs[0], [w_shard], biases)
    return xs, w_shard, biases[0] if biases else None


def _forward(
    xs: Sequence[Tensor], w: Tensor, bias: Tensor | None, input_activation: Activation | None, call: Call
) -> Tensor:
    """This rank's rows `[sizes[rank], lead, N]` from `x [M, lead, K]`."""
    if call.transport is not None:
        from fusedcomm.ops import fused

        return fused.matmul_scatter(fused.FusedCall.of(call), activate(input_activation, xs), w, bias)
    scatter = Scatter(call, xs[0].shape[1], w.shape[0], xs[0])
    scatter_products(scatter, xs, w, input_activation)
    return scatter.finish(bias)


def scatter_products(scatter: Scatter, xs: Sequence[Tensor], w: Tensor, input_activation: Activation | None) -> None:
    """Compute this rank's partial sums of all rows and let each peer's go."""
    for start, stop, out in scatter.chunks():
        with span("compute", _OP):
            rows = activate(input_activation, [flat(x, start, stop) for x in xs])
            torch.mm(rows, w.t(), out=out.flatten(0, 1))


def _backward(
    grad: Tensor,
    xs: Sequence[Tensor],
    w: Tensor,
    group: ProcessGroup,
    input_activation: Activation | None,
    sizes: Sequence[int],
    method: str,
    *,
    need_x: bool,
    sink: Sink,
) -> list[Tensor]:
    """`[dx, ...]` from `grad [sizes[rank], lead, N]`, none if it is not needed; the gradient of `w` goes to `sink`."""
    grad = grad.contiguous()

    def run(call: Call, sink: Sink) -> list[Tensor]:
        if call.transport is not None:
            from fusedcomm.ops import fused

            rows = fused.Gather(fused.FusedCall.of(call), grad)
            return fused.multiply_gathered_gradient(rows, xs, w, input_activation, need_x=need_x, sink=sink)
        gather = Gather(call, grad, keep=False)
        return multiply_gathered_gradient(gather, xs, w, input_activation, need_x=need_x, sink=sink)

    features, needs = w.shape[1:], {"dx": need_x}
    ways = GATHER_DIRECTIONS
    return run_backward(method, _OP, group, sizes, grad, features, run, sink, needs=needs, directions=ways)


def multiply_gathered_gradient(
    gather: Gather,
    xs: Sequence[Tensor],
    w: Tensor,
    input_activation: Activation | None,
    *,
    need_x: bool,
    sink: Sink,
) -> list[Tensor]:
    """`[dx, ...]` from rows of `dy` that are on their way, none if it is not needed; the gradient of `w` to `sink`."""
    gradient = _GatheredGradient(gather, xs, w, input_activation, need_x=need_x)
    if sink.is_needed:
        sink([gradient])
    return gradient.finish()


class _GatheredGradient(WeightGradient):
    """That of rows of `dy` which are on their way: `dx` is computed with it, chunk by chunk as they come in."""

    def __init__(
        self, gather: Gather, xs: Sequence[Tensor], w: Tensor, input_activation: Activation | None, *, need_x: bool
    ) -> None:
        super().__init__(gather, xs, input_activation, hides_transfer=True)
        self._gather, self._inputs, self._w = gather, xs, w
        self._dxs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs] if need_x else []
        self._is_over = False

    def compute(self) -> Tensor:
        """Summed over the chunks in at least fp32."""
        dw = self._w.new_empty(self._w.shape, dtype=torch.promote_types(self._w.dtype, torch.float32))
        self._multiply(dw, overwrite=True)
        return dw.to(self._w.dtype)

    def add_to(self, out: Tensor, *, overwrite: bool = False) -> None:
        self._multiply(out, overwrite=overwrite)

    def kept(self) -> WeightGradient:
        self._multiply(None)
        return super().kept()

    def finish(self) -> list[Tensor]:
        """`[dx, ...]`."""
        if not self._is_over:
            self._multiply(None)
        self._gather.release()
        return self._dxs

    @torch.no_grad()
    def _multiply(self, dw: Tensor | None, *, overwrite: bool = False) -> None:
        for start, stop, there in self._gather.chunks():
            rows = flat(there)
            with span("compute", self._gather.call.op):
                inputs = [flat(x, start, stop) for x in self._inputs]
                outs = [flat(dx, start, stop) for dx in self._dxs]
                if self._activation is not None and outs:
                    inner = differentiate(self._activation, inputs, rows @ self._w, outs)
                else:
                    inner = activate(self._activation, inputs)
                    if outs:
                        torch.mm(rows, self._w, out=outs[0])
                if dw is not None:
                    add_product(dw, rows, inner, overwrite=overwrite)
            overwrite = False
        if dw is not None and overwrite:
            # No rank has rows.
            dw.zero_()
        self._is_over = True


@torch.library.custom_op("fusedcomm::matmul_reduce_scatter", mutates_args=())
def _forward_op(
    xs: Sequence[Tensor],
    w: Tensor,
    bias: Tensor | None,
    group_name: str,
    input_activation: str | None,
    sizes: Sequence[int],
    method: str,
) -> Tensor:
    return run_by(
        method,
        _OP,
        group_named(group_name),
        sizes,
        xs[0],
        (xs[0].shape[1], w.shape[0]),
        w.shape[1:],
        lambda call: _forward(xs, w, bias, cast(Activation, input_activation), call),
    )


@_forward_op.register_fake
def _(xs, w, bias, group_name, input_activation, sizes, method):
    return xs[0].new_empty(sizes[group_named(group_name).rank()], xs[0].shape[1], w.shape[0])


@torch.library.custom_op("fusedcomm::matmul_reduce_scatter_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    xs: Sequence[Tensor],
    w: Tensor,
    group_name: str,
    input_activation: str | None,
    sizes: Sequence[int],
    method: str,
    need_x: bool,
    need_w: bool,
) -> list[Tensor]:
    """`[dw, dx, ...]`; an empty `dw` and no `dx` where they are not needed."""
    sink = Sink([w], [need_w], None)
    dxs = _backward(
        grad,
        xs,
        w,
        group_named(group_name),
        cast(Activation, input_activation),
        sizes,
        method,
        need_x=need_x,
        sink=sink,
    )
    (dw,) = sink.dws
    return [w.new_empty(0) if dw is None else dw, *dxs]


@_backward_op.register_fake
def _(grad, xs, w, group_name, input_activation, sizes, method, need_x, need_w):
    return [w.new_empty(w.shape) if need_w else w.new_empty(0), *(x.new_empty(x.shape) for x in xs if need_x)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    xs, w, _, ctx.group_name, ctx.input_activation, ctx.sizes, ctx.method = inputs
    ctx.save_for_backward(w, *xs)


def _autograd(ctx: Any, grad: Tensor) -> Any:
    w, *xs = ctx.saved_tensors
    need_xs, need_w, need_b, *_ = ctx.needs_input_grad
    need_x = any(need_xs)
    dw, *dxs = _backward_op(grad, xs, w, ctx.group_name, ctx.input_activation, ctx.sizes, ctx.method, need_x, need_w)
    db = grad.sum((0, 1)) if need_b else None
    return dxs if need_x else [None] * len(xs), dw if need_w else None, db, None, None, None, None


_forward_op.register_autograd(_autograd, setup_context=_setup_context)


class _DeferredMatmulReduceScatter(Function):
    """The same op, with the weight gradient handed to `defer_wgrad`."""

    @staticmethod
    def forward(
        ctx: Any,
        w: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        input_activation: Activation | None,
        sizes: list[int],
        method: str,
        defer_wgrad: DeferWgrad,
        *xs: Tensor,
    ) -> Tensor:
        ctx.group, ctx.input_activation, ctx.sizes, ctx.method = group, input_activation, sizes, method
        ctx.weight, ctx.defer_wgrad = w, defer_wgrad
        ctx.save_for_backward(w, *xs)
        # Through the registered op, whose output selective checkpointing can keep.
        return _forward_op(xs, w, bias, group.group_name, input_activation, sizes, method)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Any:
        w, *xs = ctx.saved_tensors
        need_x = any(ctx.needs_input_grad[7:])
        dxs = _backward(
            grad,
            xs,
            w,
            ctx.group,
            ctx.input_activation,
            ctx.sizes,
            ctx.method,
            need_x=need_x,
            sink=Sink([ctx.weight], [ctx.weight.requires_grad], ctx.defer_wgrad),
        )
        db = grad.sum((0, 1)) if ctx.needs_input_grad[1] else None
        return None, db, None, None, None, None, None, *(dxs or [None] * len(xs))
