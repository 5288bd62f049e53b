"""Matmul-all-reduce: the GEMM of a row-parallel layer whose sum every rank needs whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import group_named
from fusedcomm.comm.pool import STAGING
from fusedcomm.comm.record import Path, note_path, span
from fusedcomm.comm.ring import Block, Chunk, all_reduce_blocks, chunk_sizes
from fusedcomm.comm.transport import open_exchange
from fusedcomm.ops.check import check_matrix_inputs, refusing
from fusedcomm.ops.chunked import Call, ordered_sum, run_by
from fusedcomm.ops.wgrad import DeferWgrad, check_defer, local_linear
from fusedcomm.tune.cost import check_method

_OP = "matmul_all_reduce"


def matmul_all_reduce(
    x: Tensor,
    w_shard: Tensor,
    *,
    group: ProcessGroup,
    bias: Tensor | None = None,
    defer_wgrad: DeferWgrad | None = None,
    method: str = "auto",
) -> Tensor:
    """Multiply with this rank's share of K and sum over `group`; every rank gets all of the sum, bit for bit the same.

    Per rank:

        x         [..., K]     all rows, this rank's input features
        w_shard   [N, K]       this rank's input features
        result    [..., N]     summed over the ranks (not averaged)

    Forward: rows are computed in blocks. The partial sums of a block leave for the owners of its rows as soon as they
    are computed; an owner adds the partials in fp32 in the order of ranks and sends the sum back to everybody, while
    the next blocks are computed.

    Backward: nothing travels. The result is the same on all ranks, and so must `dy` be: what follows has to be computed
    alike on every rank, as in Megatron-LM, whose `g` this is (all-reduce forward, identity backward). A rank then has
    all that its own `dx = dy @ w_shard` and `dw = dy.T @ x` depend on. If x came from an input that is the same on all
    ranks, that input's gradient is still to be summed over them (Megatron's `f`).

    Args:
        bias: `[N]`, added once, after the sum, by the owner of the rows; its gradient is complete on every rank.
        defer_wgrad: is handed the weight's gradient GEMM in backward, for a schedule that runs it later.
        method: `auto`, `serial`, `chunked` or `fused`.

    Raises:
        ValueError: an input is wrong on this rank; nothing was sent but the news of it.
        PeerError: a peer called something else, refused its input, was late beyond the group's time-out or died.

    Source of the method: as `all_gather_matmul`.
    """
    world = group.size()
    with refusing(_OP, group):
        check_matrix_inputs(_OP, "x", x, [w_shard], [] if bias is None else [bias])
        check_defer(_OP, defer_wgrad)
        check_method(method)

    matrix = x.flatten(0, -2)
    if world == 1:
        if not torch.compiler.is_compiling():
            note_path(Path(_OP, "local", 1, "a group of one"))
        result = local_linear(matrix, w_shard, bias, defer_wgrad)
    elif defer_wgrad is not None:
        result = _DeferredMatmulAllReduce.apply(matrix, w_shard, bias, group, method, defer_wgrad)
    else:
        result = _forward_op(matrix, w_shard, bias, group.group_name, method)
    return result.unflatten(0, x.shape[:-1])


class _AllReduce:
    """Partial sums of all rows, to be computed block by block; the whole sum comes out on every rank.

    One exchange carries both directions, so that all ranks send in one order. No wait can close a circle: receives are
    posted before anything is sent, and a rank waits only for partials that its peers send before they wait themselves.
    """

    def __init__(self, call: Call, features: int, bias: Tensor | None, like: Tensor) -> None:
        self.call = call
        self._bias = bias
        self._serial = call.choice.method == "serial"
        world = len(call.sizes)
        self._blocks = all_reduce_blocks(call.rank, world, call.rows, call.choice.num_chunks)
        self._total = like.new_empty(call.rows, features)
        # What leaves, laid out as the whole; the own rows' place in it stays unused but for `serial`.
        self._partial = STAGING.take((call.rows, features), like)
        # By block and source rank: the summands of the own rows.
        num_own = [block.own.rows for block in self._blocks]
        self._staged = STAGING.take((world * sum(num_own), features), like)
        pieces = self._staged.split([world * rows for rows in num_own])
        self._summands = [piece.view(world, rows, features) for piece, rows in zip(pieces, num_own)]
        steps, outgoing, incoming = [], [], []
        for block, summands in zip(self._blocks, self._summands):
            own = block.own.start
            for step in block.scatter:
                outgoing.append(_rows(self._partial, step.send))
                incoming.append(_rows(summands[step.src], step.recv, own))
            for step in block.gather:
                outgoing.append(_rows(self._total, step.send))
                incoming.append(_rows(self._total, step.recv))
            steps += [*block.scatter, *block.gather]
        self._exchange = open_exchange(
            call.group,
            call.op,
            call.signature("all-reduce", (1, features), like.dtype),
            steps,
            outgoing,
            incoming,
            like.device,
            overlapped=not self._serial,
            paced=False,
        )
        self._exchange.start()

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        """`(start, stop, out)`: fill `out` `[stop - start, features]` with this rank's partial of those rows.

        In each block peers' rows come first and leave as soon as they are filled.
        """
        if self._serial:
            yield 0, self.call.rows, self._partial
        first = 0
        for block, summands in zip(self._blocks, self._summands):
            own = block.own
            if self._serial:
                summands[self.call.rank] = self._partial[own.start : own.stop]
            for index, step in enumerate(block.scatter, first):
                if step.send is not None and not self._serial:
                    yield step.send.start, step.send.stop, self._partial[step.send.start : step.send.stop]
                self._exchange.send(index)
            if own.rows and not self._serial:
                yield own.start, own.stop, summands[self.call.rank]
            self._sum(block, summands, first)
            first += len(block.scatter) + len(block.gather)

    def _sum(self, block: Block, summands: Tensor, first: int) -> None:
        """Add up the own rows of a block, whose steps begin at `first`, and let the sum go."""
        gather_at = first + len(block.scatter)
        for index in range(first, gather_at):
            self._exchange.wait(index)
        with span("compute", f"{self.call.op} sum"):
            ordered_sum(summands, self._bias, self._total[block.own.start : block.own.stop])
        for index in range(gather_at, gather_at + len(block.gather)):
            self._exchange.send(index)

    def finish(self) -> Tensor:
        """The whole sum, `[rows, features]`, once it is there."""
        first = 0
        for block in self._blocks:
            gather_at, first = first + len(block.scatter), first + len(block.scatter) + len(block.gather)
            for index in range(gather_at, first):
                self._exchange.wait(index)
        self._exchange.finish()
        STAGING.give(self._partial)
        STAGING.give(self._staged)
        return self._total


def _rows(whole: Tensor, chunk: Chunk | None, first: int = 0) -> Tensor | None:
    """The chunk's rows of `whole`, which begins at row `first`."""
    return None if chunk is None else whole[chunk.start - first : chunk.stop - first]


def _forward(x: Tensor, w: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """`[M, N]` from `x [M, K]`."""
    all_reduce = _AllReduce(call, w.shape[0], bias, x)
    for start, stop, out in all_reduce.chunks():
        with span("compute", _OP):
            torch.mm(x[start:stop], w.t(), out=out)
    return all_reduce.finish()


@torch.library.custom_op("fusedcomm::matmul_all_reduce", mutates_args=())
def _forward_op(x: Tensor, w: Tensor, bias: Tensor | None, group_name: str, method: str) -> Tensor:
    group = group_named(group_name)
    sizes = chunk_sizes(x.shape[0], group.size())
    return run_by(method, _OP, group, sizes, x, (1, w.shape[0]), w.shape[1:], lambda call: _forward(x, w, bias, call))


@_forward_op.register_fake
def _(x, w, bias, group_name, method):
    return x.new_empty(x.shape[0], w.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, *_ = inputs
    ctx.save_for_backward(x, w)


def _autograd(ctx: Any, grad: Tensor) -> Any:
    x, w = ctx.saved_tensors
    need_x, need_w, need_b, *_ = ctx.needs_input_grad
    dx = grad @ w if need_x else None
    dw = grad.t() @ x if need_w else None
    return dx, dw, grad.sum(0) if need_b else None, None, None


_forward_op.register_autograd(_autograd, setup_context=_setup_context)


class _DeferredMatmulAllReduce(Function):
    """The same op, with the weight gradient handed to `defer_wgrad`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        method: str,
        defer_wgrad: DeferWgrad,
    ) -> Tensor:
        ctx.weight, ctx.defer_wgrad = w, defer_wgrad
        ctx.save_for_backward(x, w)
        # Through the registered op, whose output selective checkpointing can keep.
        return _forward_op(x, w, bias, group.group_name, method)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        if ctx.weight.requires_grad:
            ctx.defer_wgrad(ctx.weight, lambda: grad.t() @ x)
        dx = grad @ w if ctx.needs_input_grad[0] else None
        db = grad.sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None, None, None
