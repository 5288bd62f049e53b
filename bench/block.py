"""Half a Transformer layer, forward and backward, sequence-parallel: norm, column-parallel, row-parallel.

Inputs and results are `[M/W, K]` per rank. What the two halves, `mlp` and `attention`, have in common.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fusedcomm.bench.case import Method, Results, Spec, normal, world_group
from fusedcomm.ops import all_gather, all_gather_matmul, matmul_reduce_scatter, reduce_scatter
from fusedcomm.ops.activation import Activation, activate

# The normed rows of this rank and the weights to products of all rows; products of all rows and the weight to this
# rank's rows of their sum.
Column = Callable[[Tensor, Sequence[Tensor]], list[Tensor]]
Row = Callable[[list[Tensor], Tensor], Tensor]
# This rank's rows and all weights to this rank's rows of the result.
Forward = Callable[[Tensor, Mapping[str, Tensor]], Tensor]

METHODS = ("torch", "dtensor", "serial", "chunked", "auto")


class Block(ABC):
    """A case for the harness. Subclasses say which weights there are and what lies between them."""

    # Names of the column-parallel weights [N, K] and of the row-parallel one [K, N].
    columns: tuple[str, ...]
    row: str
    # Where `inner` is one, our row-parallel op computes it with its chunks.
    activation: Activation | None = None

    def __init__(self, spec: Spec, rank: int) -> None:
        self.spec, self.rank = spec, rank
        self.group = world_group()
        self._rows = slice(rank * spec.m // spec.world, (rank + 1) * spec.m // spec.world)
        full = self._full_inputs()
        self._x, self._dy = full["x"][self._rows].clone(), full["dy"][self._rows].clone()
        self._x_full, self._dy_full = full["x"], full["dy"]
        self._weights = {name: self._shard(name, full[name]).contiguous() for name in ("norm", *self.columns, self.row)}
        # Forward gathers x and scatters y, backward gathers dy and scatters dx. The gathered x is kept.
        self.min_bytes = 4 * (spec.world - 1) * self._x.nbytes

    @abstractmethod
    def inner(self, products: list[Tensor]) -> Tensor:
        """What lies between the two GEMMs, on `[rows, features]`."""

    @abstractmethod
    def dtensor_model(self, mesh: DeviceMesh, full: Mapping[str, Tensor]) -> torch.nn.Module:
        """The same block as a torch user writes it, with parameters named as here and values as in `full`."""

    def open(self, name: str) -> Method:
        if name == "compute":
            return Method(self._run_compute)
        if name == "transfer":
            return Method(self._run_transfers)
        if name == "dtensor":
            return self._open_dtensor()
        forward = self._torch_forward if name == "torch" else self.our_forward(name)
        return Method(lambda: self._run(forward))

    def reference(self, dtype: torch.dtype) -> Results:
        full = {name: tensor.to(dtype) for name, tensor in self._full_inputs().items()}
        weights = {name: full[name] for name in self._weights}
        found = self._differentiate(full["x"], full["dy"], weights, self._one_after_the_other(_all_products, self._row))
        mine = {name: self._shard(name.removeprefix("d_"), value) for name, value in found.items() if name[:2] == "d_"}
        return {"y": found["y"][self._rows], "dx": found["dx"][self._rows], **mine}

    def _full_inputs(self) -> dict[str, Tensor]:
        spec = self.spec
        inner = spec.n * spec.world
        shapes: dict[str, tuple[int, ...]] = {"x": (spec.m, spec.k), "dy": (spec.m, spec.k), "norm": (spec.k,)}
        weights: dict[str, tuple[int, ...]] = dict.fromkeys(self.columns, (inner, spec.k)) | {self.row: (spec.k, inner)}
        full: dict[str, Tensor] = {}
        for index, (name, shape) in enumerate((shapes | weights).items()):
            full[name] = normal(shape, index, scale=shape[1] ** -0.5 if name in weights else 1.0).to(spec.dtype)
        return full

    def _shard(self, name: str, full: Tensor) -> Tensor:
        if name in self.columns:
            return full.chunk(self.spec.world, 0)[self.rank]
        return full.chunk(self.spec.world, 1)[self.rank] if name == self.row else full

    def our_forward(self, method: str) -> Forward:
        def column(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
            # As DTensor does, keep the gathered rows: the same bytes travel.
            return all_gather_matmul(x, weights, group=self.group, save="gathered", method=method)

        def row(products: list[Tensor], weight: Tensor) -> Tensor:
            if self.activation is None:
                return matmul_reduce_scatter(self.inner(products), weight, group=self.group, method=method)
            return matmul_reduce_scatter(
                products, weight, group=self.group, input_activation=self.activation, method=method
            )

        return self._one_after_the_other(column, row)

    def _run(self, forward: Forward) -> Results:
        found = self._differentiate(self._x, self._dy, self._weights, forward)
        # Every rank has seen its own rows.
        dist.all_reduce(found["d_norm"])
        return found

    def _differentiate(self, x: Tensor, dy: Tensor, weights: Mapping[str, Tensor], forward: Forward) -> Results:
        x = x.detach().requires_grad_()
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        y = forward(x, leaves)
        dx, *grads = torch.autograd.grad(loss_of(y, dy), [x, *leaves.values()])
        return {"y": y.detach(), "dx": dx, **{f"d_{name}": grad for name, grad in zip(leaves, grads)}}

    def _one_after_the_other(self, column: Column, row: Row) -> Forward:
        def forward(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
            products = column(rms_norm(x, weights["norm"]), [weights[name] for name in self.columns])
            return row(products, weights[self.row])

        return forward

    def _row(self, products: list[Tensor], weight: Tensor) -> Tensor:
        return F.linear(self.inner(products), weight)

    def _torch_forward(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        def column(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
            return _all_products(functional.all_gather_tensor_autograd(x, 0, self.group), weights)

        def row(products: list[Tensor], weight: Tensor) -> Tensor:
            return functional.reduce_scatter_tensor_autograd(self._row(products, weight), "sum", 0, self.group)

        return self._one_after_the_other(column, row)(x, weights)

    def _run_compute(self) -> Results:
        def column(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
            return _all_products(_PretendGather.apply(x, self._x_full), weights)

        def row(products: list[Tensor], weight: Tensor) -> Tensor:
            inner = self.inner(products) if self.activation is None else activate(self.activation, products)
            return _PretendScatter.apply(F.linear(inner, weight), self._rows, self._dy_full)

        return self._differentiate(self._x, self._dy, self._weights, self._one_after_the_other(column, row))

    def _run_transfers(self) -> Results:
        for tensor, full in ((self._x, self._x_full), (self._dy, self._dy_full)):
            all_gather(tensor, group=self.group)
            reduce_scatter(full, group=self.group)
        return {}

    def _open_dtensor(self) -> Method:
        mesh = init_device_mesh("cpu", (self.spec.world,))
        model = self.dtensor_model(mesh, self._full_inputs())

        def run() -> Results:
            model.zero_grad()
            x = self._x.detach().requires_grad_()
            y = model(x)
            loss_of(y, self._dy).backward()
            assert x.grad is not None
            # "mlp.gate.weight": the weight `gate`.
            grads = {f"d_{name.split('.')[-2]}": _local_grad(param) for name, param in model.named_parameters()}
            return {"y": y.detach(), "dx": x.grad, **grads}

        return Method(run, note="parallelize_module: SequenceParallel norm, ColwiseParallel, RowwiseParallel")


class DTensorNorm(torch.nn.Module):
    """The block's norm, for `SequenceParallel`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


def linear_of(weight: Tensor) -> torch.nn.Linear:
    """`nn.Linear` with this weight and no bias."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear


class _PretendGather(Function):
    """The gathered rows, at no cost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, x_full: Tensor) -> Tensor:
        ctx.num_rows = x.shape[0]
        return x_full.view_as(x_full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[: ctx.num_rows], None


class _PretendScatter(Function):
    """This rank's rows, as if the others' had gone, at no cost."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: slice, dy_full: Tensor) -> Tensor:
        ctx.dy_full = dy_full
        return y[rows].view_as(y[rows])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.dy_full, None, None


def loss_of(y: Tensor, dy: Tensor) -> Tensor:
    """A loss whose gradient is `dy`: backward begins when all of y is there, as the layers in between would have it.

    With y's gradient at hand, functional collectives (DTensor's too) would let backward begin while y still travels.
    """
    return (y * dy).sum()


def _all_products(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [F.linear(x, weight) for weight in weights]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def _local_grad(param: Tensor) -> Tensor:
    """This rank's shard; of the norm the sum over the ranks, which DTensor leaves to whoever uses the gradient."""
    assert isinstance(param, DTensor)
    assert isinstance(param.grad, DTensor)
    return param.grad.redistribute(placements=param.placements).to_local()
