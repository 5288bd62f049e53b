"""The machines that a plan is for: how many ranks on how many nodes, what they compute, hold and send."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fusedcomm.train.config import Count
from fusedcomm.train.sections import ConfigError, Section, parse, read_keys
from fusedcomm.tune.cost import Link, Links

_Positive = Annotated[float, Field(gt=0)]


class LinkConfig(Section):
    """What one direction of a link carries, and what a message costs before its first byte."""

    gbyte_per_s: _Positive
    latency_us: _Positive

    def link(self) -> Link:
        return Link(self.latency_us * 1e-6, self.gbyte_per_s * 1e9)


class Cluster(Section):
    """Alike nodes of alike GPUs (or CPU ranks).

    `tflops_per_gpu` is what the layers of a model reach in `train.precision` without any communication, and not what
    a data sheet says; `overhead_us` what a layer's forward and backward take in addition, however few its tokens.
    `in_node` is each GPU's link to the others of its node; `across_nodes` a node's, which its GPUs share.
    """

    node_count: Count
    gpu_per_node: Count
    # GiB.
    memory_per_gpu: _Positive
    # Of its memory: the optimizer's update reads and writes it.
    memory_gbyte_per_s: _Positive
    tflops_per_gpu: _Positive
    overhead_us: Annotated[float, Field(ge=0)] = 0.0
    in_node: LinkConfig | None = None
    across_nodes: LinkConfig | None = None

    @property
    def world(self) -> int:
        return self.node_count * self.gpu_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.gpu_per_node

    def links_of(self, ranks: Sequence[int]) -> Links:
        """What is left to each of these ranks, and to their node, where all ranks of the mesh send at the same time.

        Groups that lie side by side on a node share its link.
        """
        on_first_node = sum(self.node_of(rank) == self.node_of(ranks[0]) for rank in ranks)
        across = _link(self.across_nodes)
        shared = Link(across.latency_s, across.bytes_per_s * on_first_node / self.gpu_per_node)
        return Links(_link(self.in_node), shared)


def _link(config: LinkConfig | None) -> Link:
    # Nothing passes it.
    return Link(0.0, float("inf")) if config is None else config.link()


def load_cluster(path: Path) -> Cluster:
    """A cluster's YAML file; ConfigError with a line for each mistake."""
    cluster = parse(Cluster, read_keys(path, Cluster))
    lines = []
    if cluster.gpu_per_node > 1 and cluster.in_node is None:
        lines.append(f"in_node: missing; the {cluster.gpu_per_node} GPUs of a node send through it")
    if cluster.node_count > 1 and cluster.across_nodes is None:
        lines.append(f"across_nodes: missing; {cluster.node_count} nodes send through it")
    if lines:
        raise ConfigError(lines)
    return cluster
