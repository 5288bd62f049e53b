"""Moving activations between layouts without a GEMM: differentiable any number of times, for shards of any size.

`all_gather` and `reduce_scatter` are each other's backward, as are the two directions of `all_to_all`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from fusedcomm.comm.ring import Step, chunk_sizes
from fusedcomm.comm.transport import open_exchange
from fusedcomm.ops.check import check_dtype, check_sizes, refusing, row_dim
from fusedcomm.ops.chunked import Call, Gather, Scatter
from fusedcomm.tune.cost import Choice

_NO_GEMM = Choice("chunked", 1, "nothing is multiplied")


def all_gather(x: Tensor, *, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """`[..., sizes[rank], ..., K]` on each rank to `[..., sum(sizes), ..., K]` on all; backward is `reduce_scatter`.

    `sizes=None`: all ranks hold as many rows as this one. Errors as `all_gather_matmul`.
    """
    with refusing("all_gather", group):
        dim = row_dim("all_gather", dim, x.dim())
        sizes = [x.shape[dim]] * group.size() if sizes is None else [int(size) for size in sizes]
        check_sizes("all_gather", sizes, group.size(), group.rank(), shard=x.shape[dim], full=None)
    if group.size() == 1:
        return x
    return _move(_AllGather, x.movedim(dim, 0), group, tuple(sizes)).movedim(0, dim)


def reduce_scatter(x: Tensor, *, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """`[..., sum(sizes), ..., K]` on all ranks, summed in fp32 in rank order, to `[..., sizes[rank], ..., K]`.

    `sizes=None` cuts as `torch.chunk` would. Backward is `all_gather`. Errors as `matmul_reduce_scatter`.
    """
    with refusing("reduce_scatter", group):
        check_dtype("reduce_scatter", "x", x)
        dim = row_dim("reduce_scatter", dim, x.dim())
        if sizes is None:
            sizes = chunk_sizes(x.shape[dim], group.size())
        sizes = [int(size) for size in sizes]
        check_sizes("reduce_scatter", sizes, group.size(), group.rank(), shard=None, full=x.shape[dim])
    if group.size() == 1:
        return x
    return _move(_ReduceScatter, x.movedim(dim, 0), group, tuple(sizes)).movedim(0, dim)


def all_to_all(
    x: Tensor,
    *,
    group: ProcessGroup,
    gather_dim: int,
    scatter_dim: int,
    gather_sizes: Sequence[int],
    scatter_sizes: Sequence[int],
) -> Tensor:
    """Gather `gather_dim` and split `scatter_dim` in one exchange: each rank sends each peer only what it keeps.

    Per rank `[.., gather_sizes[rank], .., sum(scatter_sizes), ..]` to
    `[.., sum(gather_sizes), .., scatter_sizes[rank], ..]`. Backward is the exchange the other way. Errors as
    `all_gather_matmul`.
    """
    if group.size() == 1:
        return x
    with refusing("all_to_all", group):
        if x.shape[gather_dim] != gather_sizes[group.rank()] or x.shape[scatter_dim] != sum(scatter_sizes):
            raise ValueError(
                f"all_to_all: x has shape {list(x.shape)} but rank {group.rank()} must hold "
                f"{gather_sizes[group.rank()]} along dim {gather_dim} and {sum(scatter_sizes)} along dim {scatter_dim}"
            )
    return _move(_AllToAll, x, group, gather_dim, scatter_dim, tuple(gather_sizes), tuple(scatter_sizes))


@torch.compiler.disable(reason="fusedcomm moves rows between ranks")
def _move(kind: type[Function], *args: Any) -> Tensor:
    """`kind.apply`, at which torch.compile breaks its graph, or says why it cannot be whole."""
    return kind.apply(*args)


def _gather_rows(x: Tensor, group: ProcessGroup, sizes: tuple[int, ...]) -> Tensor:
    rows = x.reshape(x.shape[0], prod(x.shape[1:-1]), x.shape[-1]).contiguous()
    full = Gather(Call("all_gather", group, sizes, _NO_GEMM), rows, keep=True).complete()
    return full.view(sum(sizes), *x.shape[1:])


def _scatter_rows(x: Tensor, group: ProcessGroup, sizes: tuple[int, ...]) -> Tensor:
    lead = prod(x.shape[1:-1])
    rows = x.reshape(x.shape[0], lead, x.shape[-1])
    scatter = Scatter(Call("reduce_scatter", group, sizes, _NO_GEMM), lead, x.shape[-1], x)
    for start, stop, out in scatter.chunks():
        out.copy_(rows[start:stop])
    return scatter.finish().view(sizes[group.rank()], *x.shape[1:])


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _gather_rows(x, group, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _ReduceScatter.apply(grad, ctx.group, ctx.sizes), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _scatter_rows(x, group, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllGather.apply(grad, ctx.group, ctx.sizes), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: ProcessGroup,
        gather_dim: int,
        scatter_dim: int,
        gather_sizes: tuple[int, ...],
        scatter_sizes: tuple[int, ...],
    ) -> Tensor:
        ctx.group = group
        ctx.reverse = (scatter_dim, gather_dim, scatter_sizes, gather_sizes)
        return _swap(x, group, gather_dim, scatter_dim, gather_sizes, scatter_sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllToAll.apply(grad, ctx.group, *ctx.reverse), None, None, None, None, None


def _swap(
    x: Tensor,
    group: ProcessGroup,
    gather_dim: int,
    scatter_dim: int,
    gather_sizes: tuple[int, ...],
    scatter_sizes: tuple[int, ...],
) -> Tensor:
    rank, world = group.rank(), group.size()
    shape = list(x.shape)
    shape[gather_dim] = sum(gather_sizes)
    signature = (
        f"all_to_all: {shape} {str(x.dtype).removeprefix('torch.')} from dim {gather_dim} {list(gather_sizes)} "
        f"to dim {scatter_dim} {list(scatter_sizes)}"
    )
    sends = [part.contiguous() for part in x.split(scatter_sizes, scatter_dim)]
    shape[scatter_dim] = scatter_sizes[rank]
    parts = []
    for size in gather_sizes:
        shape[gather_dim] = size
        parts.append(x.new_empty(shape))
    parts[rank] = sends[rank]
    steps = [
        Step(distance, (rank + distance) % world, None, (rank - distance) % world, None) for distance in range(1, world)
    ]
    outgoing, incoming = [sends[step.dst] for step in steps], [parts[step.src] for step in steps]
    exchange = open_exchange(
        group, "all_to_all", signature, steps, outgoing, incoming, x.device, overlapped=False, paced=False
    )
    exchange.start()
    for index in range(len(steps)):
        exchange.send(index)
    for index in range(len(steps)):
        exchange.wait(index)
    exchange.finish()
    return torch.cat(parts, gather_dim)
