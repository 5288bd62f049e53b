"""Matmul-reduce-scatter forward: `x [M, K] @ w.T [K, N]` summed over the ranks, `M/W` rows each."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from fusedcomm.bench.case import Case, Method, Results, Spec, check_divides, normal, world_group
from fusedcomm.ops import matmul_reduce_scatter, reduce_scatter

METHODS = ("torch", "serial", "chunked", "auto")
# What torch.compile and async-TP start from.
TORCH_METHOD = "torch"
EXTRA_METHODS = ("functional",)


def default_shape(world: int) -> tuple[int, int, int]:
    return 4096, 1024, 4096


def check_spec(spec: Spec) -> None:
    check_divides(spec, "M", spec.m, spec.world)


def make_case(spec: Spec, rank: int) -> Case:
    return _MatmulReduceScatter(spec, rank)


class _MatmulReduceScatter:
    def __init__(self, spec: Spec, rank: int) -> None:
        self._spec = spec
        self._rows = slice(rank * spec.m // spec.world, (rank + 1) * spec.m // spec.world)
        self._group = world_group()
        self._x, self._w = self._inputs_of(rank)
        self._partial = self._x @ self._w.t()
        own_rows = self._partial[self._rows]
        self.min_bytes = self._partial.nbytes - own_rows.nbytes

    def _inputs_of(self, rank: int) -> tuple[Tensor, Tensor]:
        spec = self._spec
        x = normal((spec.m, spec.k), 0, rank)
        w = normal((spec.n, spec.k), 1, rank, scale=(spec.k * spec.world) ** -0.5)
        return x.to(spec.dtype), w.to(spec.dtype)

    def open(self, name: str) -> Method:
        runs = {
            "compute": lambda: {"y": self._x @ self._w.t()},
            "transfer": lambda: {"y": reduce_scatter(self._partial, group=self._group)},
            "torch": self._run_torch,
            "functional": self._run_functional,
        }
        return Method(runs.get(name) or (lambda: self._run_ours(name)))

    def reference(self, dtype: torch.dtype) -> Results:
        inputs = [self._inputs_of(rank) for rank in range(self._spec.world)]
        x = torch.cat([x[self._rows] for x, _ in inputs], 1)
        w = torch.cat([w for _, w in inputs], 1)
        return {"y": x.to(dtype) @ w.to(dtype).t()}

    def _run_ours(self, method: str) -> Results:
        return {"y": matmul_reduce_scatter(self._x, self._w, group=self._group, method=method)}

    def _run_torch(self) -> Results:
        partial = self._x @ self._w.t()
        y = torch.empty_like(partial[self._rows])
        dist.reduce_scatter_tensor(y, partial)
        return {"y": y}

    def _run_functional(self) -> Results:
        partial = self._x @ self._w.t()
        y = functional.reduce_scatter_tensor(partial, "sum", 0, self._group)
        # It is waited for where it is first used.
        return {"y": functional.wait_tensor(y)}
