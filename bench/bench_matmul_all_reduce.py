"""Matmul-all-reduce forward: `x [M, K] @ w.T [K, N]` summed over the ranks, all rows on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from fusedcomm.bench.case import Case, Method, Results, Spec, check_divides, normal, world_group
from fusedcomm.ops import all_gather, matmul_all_reduce, reduce_scatter

METHODS = ("torch", "serial", "chunked", "auto")
# What torch.compile and async-TP start from.
TORCH_METHOD = "torch"
EXTRA_METHODS = ("functional",)


def default_shape(world: int) -> tuple[int, int, int]:
    return 4096, 1024, 4096


def check_spec(spec: Spec) -> None:
    check_divides(spec, "M", spec.m, spec.world)


def make_case(spec: Spec, rank: int) -> Case:
    return _MatmulAllReduce(spec, rank)


class _MatmulAllReduce:
    def __init__(self, spec: Spec, rank: int) -> None:
        self._spec = spec
        self._group = world_group()
        self._x, self._w = self._inputs_of(rank)
        self._partial = self._x @ self._w.t()
        # Once to the owner of the rows, and once from there to everybody.
        self.min_bytes = 2 * (self._partial.nbytes - self._partial.nbytes // spec.world)

    def _inputs_of(self, rank: int) -> tuple[Tensor, Tensor]:
        spec = self._spec
        x = normal((spec.m, spec.k), 0, rank)
        w = normal((spec.n, spec.k), 1, rank, scale=(spec.k * spec.world) ** -0.5)
        return x.to(spec.dtype), w.to(spec.dtype)

    def open(self, name: str) -> Method:
        runs = {
            "compute": lambda: {"y": self._x @ self._w.t()},
            "transfer": self._transfer,
            "torch": self._run_torch,
            "functional": self._run_functional,
        }
        return Method(runs.get(name) or (lambda: self._run_ours(name)))

    def reference(self, dtype: torch.dtype) -> Results:
        inputs = [self._inputs_of(rank) for rank in range(self._spec.world)]
        x, w = (torch.cat(parts, 1) for parts in zip(*inputs))
        return {"y": x.to(dtype) @ w.to(dtype).t()}

    def _transfer(self) -> Results:
        own_rows = reduce_scatter(self._partial, group=self._group)
        return {"y": all_gather(own_rows, group=self._group)}

    def _run_ours(self, method: str) -> Results:
        return {"y": matmul_all_reduce(self._x, self._w, group=self._group, method=method)}

    def _run_torch(self) -> Results:
        y = self._x @ self._w.t()
        dist.all_reduce(y)
        return {"y": y}

    def _run_functional(self) -> Results:
        y = functional.all_reduce(self._x @ self._w.t(), "sum", self._group)
        # It is waited for where it is first used.
        return {"y": functional.wait_tensor(y)}
