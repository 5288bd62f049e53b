"""All-gather-matmul forward: `x [M/W, K]` gathered, times `w [N, K]`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from fusedcomm.bench.case import Case, Method, Results, Spec, check_divides, normal, world_group
from fusedcomm.ops import all_gather, all_gather_matmul

METHODS = ("torch", "serial", "chunked", "auto")
# What torch.compile and async-TP start from.
TORCH_METHOD = "torch"
EXTRA_METHODS = ("functional",)


def default_shape(world: int) -> tuple[int, int, int]:
    return 4096, 4096, 1024


def check_spec(spec: Spec) -> None:
    check_divides(spec, "M", spec.m, spec.world)


def make_case(spec: Spec, rank: int) -> Case:
    return _AllGatherMatmul(spec, rank)


class _AllGatherMatmul:
    def __init__(self, spec: Spec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._group = world_group()
        self._x = self._x_of(rank).to(spec.dtype)
        self._w = normal((spec.n, spec.k), 1, rank, scale=spec.k**-0.5).to(spec.dtype)
        self._x_full = self._x.repeat(spec.world, 1)
        self.min_bytes = (spec.world - 1) * self._x.nbytes

    def _x_of(self, rank: int) -> Tensor:
        return normal((self._spec.m // self._spec.world, self._spec.k), 0, rank)

    def open(self, name: str) -> Method:
        runs = {
            "compute": lambda: {"y": self._x_full @ self._w.t()},
            "transfer": lambda: {"x": all_gather(self._x, group=self._group)},
            "torch": self._run_torch,
            "functional": self._run_functional,
        }
        return Method(runs.get(name) or (lambda: self._run_ours(name)))

    def reference(self, dtype: torch.dtype) -> Results:
        x = torch.cat([self._x_of(rank) for rank in range(self._spec.world)]).to(self._spec.dtype)
        return {"y": x.to(dtype) @ self._w.to(dtype).t()}

    def _run_ours(self, method: str) -> Results:
        return {"y": all_gather_matmul(self._x, self._w, group=self._group, method=method)}

    def _run_torch(self) -> Results:
        x_full = torch.empty_like(self._x_full)
        dist.all_gather_into_tensor(x_full, self._x)
        return {"y": x_full @ self._w.t()}

    def _run_functional(self) -> Results:
        x_full = functional.all_gather_tensor(self._x, 0, self._group)
        return {"y": x_full @ self._w.t()}
