"""How the gradients are summed: the algorithm, what travels, and the state that this leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.comm.collective import AllReduce, Collective, Pending
from fusedcomm.comm.compress import Bf16, Codec, Int8, Layout, Residual, TopK
from fusedcomm.comm.hierarchical import Hierarchical, level_groups, node_of_each_rank
from fusedcomm.comm.low_rank import LowRank
from fusedcomm.comm.tree import Tree
from fusedcomm.tune.cost import Links, fastest_algorithm
from fusedcomm.tune.links import measure_links

Algorithm = Literal["auto", "ring", "tree", "hierarchical"]
Compression = Literal["none", "bf16", "int8", "powersgd", "topk"]


@dataclass(frozen=True)
class SumSpec:
    """What a user chooses; the keys of `parallel_config.data_parallel` of the same names."""

    algorithm: Algorithm = "auto"
    ranks_per_node: int | None = None
    compression: Compression = "none"
    compression_in_node: Literal["none", "bf16", "int8"] = "none"
    powersgd_rank: int = 4
    topk_fraction: float = 0.01


class Sums:
    """`Collective` over `group` as `spec` says; every rank of the group makes it at the same point.

    With a compression sums go by levels if there are several nodes with several ranks of the group each, and equally
    many, or if `algorithm` asks for it: compressed across nodes, and in the node as `compression_in_node` says.
    Elsewhere, as on a single node, owners sum directly, all of it compressed. `powersgd` sums its products as
    `algorithm` says.

    `layout` is that of the buffer whose pieces will be summed.

    Errors: ValueError if `algorithm: hierarchical` meets nodes of different size.
    """

    def __init__(
        self,
        spec: SumSpec,
        group: ProcessGroup,
        layout: Layout,
        *,
        timeout_s: float,
    ) -> None:
        self._spec, self._group, self._timeout_s = spec, group, timeout_s
        self._nodes = node_of_each_rank(group, spec.ranks_per_node)
        codecs: dict[str, Codec] = {"bf16": Bf16(), "int8": Int8(), "topk": TopK(spec.topk_fraction)}
        across, in_node = codecs.get(spec.compression), codecs.get(spec.compression_in_node)
        self._low_rank: LowRank | None = None
        self.residual: Residual | None = None
        if spec.compression not in ("none", "bf16") or spec.compression_in_node == "int8":
            self.residual = Residual(layout)
        whole = None if self.residual is None else self.residual.whole
        if across is not None or in_node is not None:
            levels = self._compressed_levels(has_across=across is not None)
            self._collective: Collective = Hierarchical(
                *levels, in_node_codec=in_node, across_codec=across, residual=whole
            )
            return
        self._collective = self._uncompressed(layout.device)
        if spec.compression == "powersgd" and whole is not None:
            self._low_rank = LowRank(self._collective, rank=spec.powersgd_rank, places=layout.places, residual=whole)
            self._collective = self._low_rank

    def start(self, flat: Tensor, offset: int) -> Pending:
        return self._collective.start(flat, offset)

    def residual_state(self) -> dict[str, Tensor]:
        """Live tensors by `<name>.residual`; each rank has its own."""
        residual = {} if self.residual is None else self.residual.state_dict()
        return {f"{name}.residual": tensor for name, tensor in residual.items()}

    @property
    def low_rank(self) -> LowRank | None:
        """What holds the directions of `powersgd`."""
        return self._low_rank

    def _uncompressed(self, device: torch.device) -> Collective:
        if self._spec.algorithm == "tree":
            return Tree(self._group)
        if self._spec.algorithm == "hierarchical":
            return Hierarchical(*self._levels())
        if self._spec.algorithm == "ring":
            return AllReduce(self._group)
        return self._by_cost(device)

    def _by_cost(self, device: torch.device) -> Collective:
        if not self._has_equal_nodes():
            return AllReduce(self._group)
        levels = self._levels()
        links = measure_links(self._group, *levels, device)
        choices = {"ring": AllReduce(self._group), "tree": Tree(self._group), "hierarchical": Hierarchical(*levels)}
        return _ByCost(choices, self._nodes, links)

    def _levels(self) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        return level_groups(self._group, self._nodes, timeout_s=self._timeout_s)

    def _compressed_levels(self, *, has_across: bool) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        num_nodes = max(self._nodes) + 1
        if num_nodes == 1:
            # What is compressed across nodes alone would not be at all.
            return (None, self._group) if has_across else (self._group, None)
        several = len(self._nodes) > num_nodes and self._has_equal_nodes()
        return self._levels() if several or self._spec.algorithm == "hierarchical" else (None, self._group)

    def _has_equal_nodes(self) -> bool:
        return len({self._nodes.count(node) for node in self._nodes}) == 1


class _ByCost:
    """Each piece by the algorithm that the cost model expects to be the fastest for its size."""

    def __init__(self, choices: dict[str, Collective], nodes: Sequence[int], links: Links) -> None:
        self._choices, self._nodes, self._links = choices, nodes, links

    def start(self, flat: Tensor, offset: int) -> Pending:
        return self._choices[fastest_algorithm(flat.nbytes, self._nodes, self._links)].start(flat, offset)
