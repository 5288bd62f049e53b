"""Matmul-reduce-scatter: the GEMM of a row-parallel layer, whose partial sums leave while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import group_named
from fusedcomm.comm.record import Path, note_path, span
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.ops.check import check_matrix_inputs, check_sizes, refusing, row_dim
from fusedcomm.ops.chunked import Call, Gather, Scatter, flat, run_by
from fusedcomm.ops.wgrad import DeferWgrad, check_defer, local_linear
from fusedcomm.tune.cost import check_method

_OP = "matmul_reduce_scatter"


def matmul_reduce_scatter(
    x: Tensor,
    w_shard: Tensor,
    *,
    group: ProcessGroup,
    bias: Tensor | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    defer_wgrad: DeferWgrad | None = None,
    method: str = "auto",
) -> Tensor:
    """Multiply with this rank's share of K, sum over `group`, and keep this rank's rows.

    Per rank, for a group of W ranks and rows along `dim` (any dimension but the last):

        x         [..., M, ..., K]               all rows, this rank's input features
        w_shard   [N, K]                         this rank's input features
        result    [..., sizes[rank], ..., N]     this rank's rows, summed over the ranks (not averaged)

    Forward: the partial sums of each peer's rows leave for their owner as soon as they are computed, the own rows come
    last; the owner adds the W partials in fp32 in the order of ranks. Backward: one gather of `dy` feeds `dx` and
    `dw` chunk by chunk.

    Args:
        bias: `[N]`, added once, after the sum, by the owner of the rows: its gradient covers those rows alone, and is
            complete when summed over the group.
        sizes: rows of every rank along `dim`; None cuts M as `torch.chunk` would.
        defer_wgrad: is handed the weight's gradient GEMM in backward, for a schedule that runs it later.
        method: `auto`, `serial`, `chunked` or `fused`.

    Raises:
        ValueError: an input is wrong on this rank; nothing was sent but the news of it.
        PeerError: a peer called something else, refused its input, was late beyond the group's time-out or died.

    Source of the method: as `all_gather_matmul`.
    """
    biases = [] if bias is None else [bias]
    world = group.size()
    with refusing(_OP, group):
        check_matrix_inputs(_OP, "x", x, [w_shard], biases)
        dim = row_dim(_OP, dim, x.dim())
        rows = x.shape[dim]
        sizes = list(chunk_sizes(rows, world)) if sizes is None else [int(size) for size in sizes]
        check_sizes(_OP, sizes, world, group.rank(), shard=None, full=rows)
        check_defer(_OP, defer_wgrad)
        check_method(method)

    front = x.movedim(dim, 0)
    lead = front.shape[1:-1]
    matrix = front.reshape(rows, prod(lead), front.shape[-1])
    if world == 1:
        if not torch.compiler.is_compiling():
            note_path(Path(_OP, "local", 1, "a group of one"))
        result = local_linear(matrix, w_shard, bias, defer_wgrad)
    elif defer_wgrad is not None:
        result = _DeferredMatmulReduceScatter.apply(matrix, w_shard, bias, group, sizes, method, defer_wgrad)
    else:
        result = _forward_op(matrix, w_shard, bias, group.group_name, sizes, method)
    return result.reshape(sizes[group.rank()], *lead, result.shape[-1]).movedim(0, dim)


def _forward(x: Tensor, w: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """This rank's rows `[sizes[rank], lead, N]` from `x [M, lead, K]`."""
    scatter = Scatter(call, x.shape[1], w.shape[0], x)
    scatter_products(scatter, x, w)
    return scatter.finish(bias)


def scatter_products(scatter: Scatter, x: Tensor, w: Tensor) -> None:
    """Compute this rank's partial sums of all rows and let each peer's go."""
    for start, stop, out in scatter.chunks():
        with span("compute", _OP):
            torch.mm(flat(x, start, stop), w.t(), out=out.flatten(0, 1))


def _backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    group: ProcessGroup,
    sizes: Sequence[int],
    method: str,
    *,
    need_x: bool,
    need_w: bool,
    keep: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`(dx, dw, dy_full)` from `grad [sizes[rank], lead, N]`, each if it is asked for.

    `dw` is summed over the chunks in at least fp32.
    """
    grad = grad.contiguous()

    def run(call: Call) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        gather = Gather(call, grad, keep=keep)
        dx, dw = multiply_gathered_gradient(gather, x, w, need_x=need_x, need_w=need_w)
        return dx, dw, gather.full if keep else None

    return run_by(method, f"{_OP} backward", group, sizes, grad, grad.shape[1:], w.shape[1:], run)


def multiply_gathered_gradient(
    gather: Gather, x: Tensor, w: Tensor, *, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """`(dx, dw)` from the gathered rows of `dy`, chunk by chunk as they come in."""
    wide = torch.promote_types(w.dtype, torch.float32)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
    dw = w.new_zeros(w.shape, dtype=wide) if need_w else None
    for start, stop, there in gather.chunks():
        rows = flat(there)
        with span("compute", gather.call.op):
            if dx is not None:
                torch.mm(rows, w, out=flat(dx, start, stop))
            if dw is not None and dw.dtype == x.dtype:
                dw.addmm_(rows.t(), flat(x, start, stop))
            elif dw is not None:
                dw += rows.t() @ flat(x, start, stop)
    gather.release()
    return dx, None if dw is None else dw.to(w.dtype)


@torch.library.custom_op("fusedcomm::matmul_reduce_scatter", mutates_args=())
def _forward_op(
    x: Tensor, w: Tensor, bias: Tensor | None, group_name: str, sizes: Sequence[int], method: str
) -> Tensor:
    group, travel = group_named(group_name), (x.shape[1], w.shape[0])
    return run_by(method, _OP, group, sizes, x, travel, w.shape[1:], lambda call: _forward(x, w, bias, call))


@_forward_op.register_fake
def _(x, w, bias, group_name, sizes, method):
    return x.new_empty(sizes[group_named(group_name).rank()], x.shape[1], w.shape[0])


@torch.library.custom_op("fusedcomm::matmul_reduce_scatter_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    group_name: str,
    sizes: Sequence[int],
    method: str,
    need_x: bool,
    need_w: bool,
) -> list[Tensor]:
    """`[dx, dw]`; an empty tensor where one is not needed."""
    dx, dw, _ = _backward(grad, x, w, group_named(group_name), sizes, method, need_x=need_x, need_w=need_w, keep=False)
    return [x.new_empty(0) if dx is None else dx, x.new_empty(0) if dw is None else dw]


@_backward_op.register_fake
def _(grad, x, w, group_name, sizes, method, need_x, need_w):
    return [
        x.new_empty(x.shape) if need_x else x.new_empty(0),
        w.new_empty(w.shape) if need_w else x.new_empty(0),
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, ctx.group_name, ctx.sizes, ctx.method = inputs
    ctx.save_for_backward(x, w)


def _autograd(ctx: Any, grad: Tensor) -> Any:
    x, w = ctx.saved_tensors
    need_x, need_w, need_b, *_ = ctx.needs_input_grad
    dx, dw = _backward_op(grad, x, w, ctx.group_name, ctx.sizes, ctx.method, need_x, need_w)
    db = grad.sum((0, 1)) if need_b else None
    return dx if need_x else None, dw if need_w else None, db, None, None, None


_forward_op.register_autograd(_autograd, setup_context=_setup_context)


class _DeferredMatmulReduceScatter(Function):
    """The same op, with the weight gradient handed to `defer_wgrad`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        sizes: list[int],
        method: str,
        defer_wgrad: DeferWgrad,
    ) -> Tensor:
        ctx.group, ctx.sizes, ctx.method = group, sizes, method
        ctx.weight, ctx.defer_wgrad = w, defer_wgrad
        ctx.save_for_backward(x, w)
        # Through the registered op, whose output selective checkpointing can keep.
        return _forward_op(x, w, bias, group.group_name, sizes, method)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        need_x = ctx.needs_input_grad[0]
        dx, _, grad_full = _backward(
            grad, x, w, ctx.group, ctx.sizes, ctx.method, need_x=need_x, need_w=False, keep=True
        )
        assert grad_full is not None
        if ctx.weight.requires_grad:
            ctx.defer_wgrad(ctx.weight, lambda: flat(grad_full).t() @ flat(x))
        db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
        return dx, None, db, None, None, None, None
