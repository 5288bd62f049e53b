"""Sums of a gradient `[N, K]` over the ranks, by algorithm, and by levels with less on the wire across nodes.

Nothing is computed meanwhile, and M means nothing.

With `--nodes` ranks share a node's link to the others, which is 10 times slower than a rank's link inside. `--link`
must be a rate: there is no GEMM to derive one from.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.distributed as dist

from fusedcomm.bench.case import Case, Method, Results, Spec, normal, world_group
from fusedcomm.bench.errors import BenchError
from fusedcomm.comm.collective import AllReduce, Collective
from fusedcomm.comm.compress import Bf16, Codec, Int8
from fusedcomm.comm.hierarchical import Hierarchical, level_groups
from fusedcomm.comm.tree import Tree
from fusedcomm.tune.cost import Links, fastest_algorithm
from fusedcomm.tune.links import measure_links

# `torch` is the ring.
TORCH_METHOD = "torch"
METHODS = ("torch", "tree", "hierarchical", "auto", "bf16", "int8")
# Codecs, and what two encodings by one may lose of normal numbers.
_CODECS: dict[str, tuple[Codec, float]] = {"bf16": (Bf16(), 0.01), "int8": (Int8(), 0.02)}
EXTRA_METHODS = ()
_TIMEOUT_S = 600.0


def default_shape(world: int) -> tuple[int, int, int]:
    return 1, 1024, 4096


def check_spec(spec: Spec) -> None:
    """BenchError unless gradients are fp32, as the trainer's are."""
    if spec.dtype != torch.float32:
        raise BenchError(f"bench all_reduce: --dtype {spec.dtype_name}: gradients are summed in fp32; leave it out")


def make_case(spec: Spec, rank: int) -> Case:
    return _AllReduce(spec, rank)


class _AllReduce:
    def __init__(self, spec: Spec, rank: int) -> None:
        self._spec = spec
        self._own = self._gradient_of(rank)
        # Every node sends its part of the summands, and its part of the sum.
        self.min_bytes = 2 * (spec.nodes - 1) * self._own.nbytes // spec.nodes

    def _gradient_of(self, rank: int) -> torch.Tensor:
        return normal((self._spec.n, self._spec.k), 0, rank)

    def open(self, name: str) -> Method:
        if name == "compute":
            return Method(dict)
        if name == "auto":
            chosen = fastest_algorithm(self._own.nbytes, self._nodes, self._links)
            links = "; ".join(
                f"{where} {link.latency_s * 1e3:.2f} ms, {link.bytes_per_s * 8e-9:.2f} Gbit/s"
                for where, link in (("in a node", self._links.in_node), ("across nodes", self._links.across))
            )
            return self._summing(self._collective(chosen), note=f"{chosen}, by the links' cost: {links}")
        if name in _CODECS:
            codec, loss = _CODECS[name]
            return self._summing(Hierarchical(*self._levels, across_codec=codec), loss=loss)
        return self._summing(self._collective(name))

    def reference(self, dtype: torch.dtype) -> Results:
        return {"sum": torch.stack([self._gradient_of(rank).to(dtype) for rank in range(self._spec.world)]).sum(0)}

    @property
    def _nodes(self) -> list[int]:
        per_node = self._spec.world // self._spec.nodes
        return [rank // per_node for rank in range(self._spec.world)]

    @cached_property
    def _levels(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        return level_groups(world_group(), self._nodes, timeout_s=_TIMEOUT_S)

    @cached_property
    def _links(self) -> Links:
        return measure_links(world_group(), *self._levels, torch.device("cpu"))

    def _collective(self, name: str) -> Collective:
        if name == "tree":
            return Tree(world_group())
        if name == "hierarchical":
            return Hierarchical(*self._levels)
        return AllReduce(world_group())

    def _summing(self, collective: Collective, note: str = "", loss: float = 0.0) -> Method:
        total = torch.empty_like(self._own)

        def prepare() -> None:
            total.copy_(self._own)

        def run() -> Results:
            collective.start(total.view(-1), 0).wait()
            return {"sum": total}

        return Method(run, prepare, note, loss=loss)
