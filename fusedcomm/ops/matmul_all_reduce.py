"""Matmul-all-reduce: the GEMM of a row-parallel layer whose sum every rank needs whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import group_named
from fusedcomm.comm.pool import STAGING
from fusedcomm.comm.record import Path, note_path, span
from fusedcomm.comm.ring import Chunk, Step, all_reduce_blocks, chunk_sizes
from fusedcomm.comm.transport import open_exchange
from fusedcomm.ops.check import autocast, check_matrix_inputs, differentiable_once, refusing
from fusedcomm.ops.chunked import Call, ordered_sum, run_by
from fusedcomm.ops.wgrad import DeferWgrad, WeightGradient, check_defer, local_linear
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
    the next blocks are computed. In a group over several nodes `auto` also tries to add up in each node first, and
    across nodes what that leaves: the nodes' links then carry less, and the node's sum is rounded once on its way.

    Backward: nothing travels. The result is the same on all ranks, and so must `dy` be: what follows has to be computed
    alike on every rank, as in Megatron-LM, whose `g` this is (all-reduce forward, identity backward). A rank then has
    all that its own `dx = dy @ w_shard` and `dw = dy.T @ x` depend on. If x came from an input that is the same on all
    ranks, that input's gradient is still to be summed over them (Megatron's `f`).

    Args:
        bias: `[N]`, added once, after the sum, by the owner of the rows; its gradient is complete on every rank.
        defer_wgrad: is handed the weight's `WeightGradient` in backward, to compute at once where gradients are
            kept, or later if it is `kept()`.
        method: `auto`, `serial`, `chunked` or `fused`, or by a certain transport `fused:symmetric`, `fused:shared` or
            `fused:c10d`.

    Raises:
        ValueError: an input is wrong on this rank; nothing was sent but the news of it.
        PeerError: a peer called something else, refused its input, was late beyond the group's time-out or died.

    Source of the method: as `all_gather_matmul`.
    """
    world = group.size()
    with refusing(_OP, group):
        biases = [] if bias is None else [bias]
        (x,), (w_shard,), biases = autocast(_OP, [x], [w_shard], biases, defers_wgrad=defer_wgrad is not None)
        check_matrix_inputs(_OP, "x", x, [w_shard], biases)
        bias = biases[0] if biases else None
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

    A block passes through stages: its rows are computed and leave for their owners; on each level (`comm.ring`) its own
    rows are added up and leave for the next level, or as finished sums for everybody; those go down the levels again.
    The next block is computed before this one goes on to its next stage, so that what a stage waits for has a block's
    computing to travel.

    One exchange carries everything, so that all ranks send in one order. No wait can close a circle: receives are
    posted before anything is sent, and a rank waits only for what its peers send before they wait themselves.
    """

    def __init__(self, call: Call, features: int, bias: Tensor | None, like: Tensor) -> None:
        self.call = call
        self._bias = bias
        choice = call.choice
        self._blocks = all_reduce_blocks(call.rank, len(call.sizes), call.rows, choice.num_chunks, choice.nodes)
        self._num_levels = len(self._blocks[0]) if self._blocks else 1
        self._total = like.new_empty(call.rows, features)
        # What leaves, laid out as the whole; on the first level the own rows' place in it is used by `serial` alone.
        # Each level's rows are some of those of the level before: its sums replace their own summands.
        self._partial = STAGING.take((call.rows, features), like)
        # By level, block and source: the summands of the own rows.
        counts = [len(level.members) * level.own.rows for block in self._blocks for level in block]
        self._staged = STAGING.take((sum(counts), features), like)
        pieces = iter(self._staged.split(counts))
        self._summands = [
            [next(pieces).view(len(level.members), level.own.rows, features) for level in block]
            for block in self._blocks
        ]
        # By block: the index of the first step of its scatters, and of its gathers, on every level.
        self._scatter_at = [[0] * self._num_levels for _ in self._blocks]
        self._gather_at = [[0] * self._num_levels for _ in self._blocks]
        steps, outgoing, incoming = [], [], []
        for block, stage in self._turns():
            level = min(stage, 2 * self._num_levels - 1 - stage)
            rows = self._blocks[block][level]
            if stage < self._num_levels:
                self._scatter_at[block][level] = len(steps)
                steps += rows.scatter
                for step in rows.scatter:
                    outgoing.append(_rows(self._partial, step.send))
                    source = self._summands[block][level][rows.members.index(step.src)]
                    incoming.append(_rows(source, step.recv, rows.own.start))
            else:
                self._gather_at[block][level] = len(steps)
                steps += rows.gather
                outgoing += [_rows(self._total, step.send) for step in rows.gather]
                incoming += [_rows(self._total, step.recv) for step in rows.gather]
        self._exchange = open_exchange(
            call.group,
            call.op,
            call.signature("all-reduce", (1, features), like.dtype),
            steps,
            outgoing,
            incoming,
            like.device,
            overlapped=not call.is_serial,
            paced=False,
        )
        self._exchange.start()

    def _turns(self) -> Iterator[tuple[int, int]]:
        """Blocks and their stages, each of which lets something travel, in the order in which they run."""
        num_stages = 2 * self._num_levels
        for turn in range(len(self._blocks) + num_stages - 1):
            for stage in range(num_stages):
                if 0 <= turn - stage < len(self._blocks):
                    yield turn - stage, stage

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        """`(start, stop, out)`: fill `out` `[stop - start, features]` with this rank's partial of those rows.

        In each block peers' rows come first and leave as soon as they are filled.
        """
        if self.call.is_serial:
            yield 0, self.call.rows, self._partial
        for block, stage in self._turns():
            if stage == 0:
                yield from self._compute(block)
            elif stage <= self._num_levels:
                self._sum(block, stage - 1)
            else:
                # Finished rows of one level come in, and go on in the level below.
                level = 2 * self._num_levels - stage
                self._receive(self._gather_at[block][level], self._blocks[block][level].gather)
                self._send(self._gather_at[block][level - 1], self._blocks[block][level - 1].gather)

    def _compute(self, block: int) -> Iterator[tuple[int, int, Tensor]]:
        rows, summands = self._blocks[block][0], self._summands[block][0][self._place(block, 0)]
        if self.call.is_serial:
            summands.copy_(self._partial[rows.own.start : rows.own.stop])
            self._send(self._scatter_at[block][0], rows.scatter)
            return
        for index, step in enumerate(rows.scatter, self._scatter_at[block][0]):
            if step.send is not None:
                yield step.send.start, step.send.stop, self._partial[step.send.start : step.send.stop]
            self._exchange.send(index)
        if rows.own.rows:
            yield rows.own.start, rows.own.stop, summands

    def _sum(self, block: int, level: int) -> None:
        """Add up the own rows of a level, and let the sum go: to the next level, or to everybody."""
        rows, summands = self._blocks[block][level], self._summands[block][level]
        self._receive(self._scatter_at[block][level], rows.scatter)
        own = slice(rows.own.start, rows.own.stop)
        is_last = level == self._num_levels - 1
        with span("compute", f"{self.call.op} sum"):
            if is_last:
                ordered_sum(summands, self._bias, self._total[own])
            else:
                ordered_sum(summands, None, self._partial[own])
                above = self._blocks[block][level + 1].own
                summands_above = self._summands[block][level + 1][self._place(block, level + 1)]
                summands_above.copy_(self._partial[above.start : above.stop])
        if is_last:
            self._send(self._gather_at[block][level], rows.gather)
        else:
            self._send(self._scatter_at[block][level + 1], self._blocks[block][level + 1].scatter)

    def _place(self, block: int, level: int) -> int:
        return self._blocks[block][level].members.index(self.call.rank)

    def _send(self, first: int, steps: Sequence[Step]) -> None:
        for index in range(first, first + len(steps)):
            self._exchange.send(index)

    def _receive(self, first: int, steps: Sequence[Step]) -> None:
        for index in range(first, first + len(steps)):
            self._exchange.wait(index)

    def finish(self) -> Tensor:
        """The whole sum, `[rows, features]`, once it is there."""
        for block, first in zip(self._blocks, self._gather_at):
            self._receive(first[0], block[0].gather)
        self._exchange.finish()
        STAGING.give(self._partial)
        STAGING.give(self._staged)
        return self._total


def _rows(whole: Tensor, chunk: Chunk | None, first: int = 0) -> Tensor | None:
    """The chunk's rows of `whole`, which begins at row `first`."""
    return None if chunk is None else whole[chunk.start - first : chunk.stop - first]


def _forward(x: Tensor, w: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """`[M, N]` from `x [M, K]`."""
    if call.transport is not None:
        from fusedcomm.ops import fused

        return fused.matmul_reduce(fused.FusedCall.of(call), x.unsqueeze(1), w, bias).squeeze(1)
    all_reduce = _AllReduce(call, w.shape[0], bias, x)
    for start, stop, out in all_reduce.chunks():
        with span("compute", _OP):
            torch.mm(x[start:stop], w.t(), out=out)
    return all_reduce.finish()


@torch.library.custom_op("fusedcomm::matmul_all_reduce", mutates_args=())
def _forward_op(x: Tensor, w: Tensor, bias: Tensor | None, group_name: str, method: str) -> Tensor:
    group = group_named(group_name)
    sizes = chunk_sizes(x.shape[0], group.size())
    return run_by(
        method,
        _OP,
        group,
        sizes,
        x,
        (1, w.shape[0]),
        w.shape[1:],
        lambda call: _forward(x, w, bias, call),
        directions=("by_node",),
    )


@_forward_op.register_fake
def _(x, w, bias, group_name, method):
    return x.new_empty(x.shape[0], w.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, *_ = inputs
    ctx.save_for_backward(x, w)


@differentiable_once
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
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        if ctx.weight.requires_grad:
            ctx.defer_wgrad(ctx.weight, WeightGradient(grad, [x]))
        dx = grad @ w if ctx.needs_input_grad[0] else None
        db = grad.sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None, None, None
