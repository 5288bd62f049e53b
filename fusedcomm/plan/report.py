"""What a search has found, as a table for the console and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fusedcomm.plan.cluster import Cluster
from fusedcomm.plan.search import Candidate, Found


def describe_cluster(cluster: Cluster) -> str:
    """One line for the console."""
    text = (
        f"{cluster.node_count} x {cluster.gpu_per_node} ranks, each {cluster.tflops_per_gpu:.3g} TFLOP/s and "
        f"{cluster.memory_per_gpu:.3g} GiB"
    )
    for name, link in (("in the node", cluster.in_node), ("across nodes", cluster.across_nodes)):
        if link is not None:
            text += f"; {name} {link.gbyte_per_s:.3g} GB/s after {link.latency_us:.3g} us"
    return text


def describe_search(found: Found, cluster: Cluster) -> str:
    """How many there were; where none fits, what would."""
    text = f"{found.num_seen} layouts looked at"
    if found.num_too_large:
        text += f", of which {found.num_too_large} need more memory than {cluster.memory_per_gpu:.3g} GiB leave"
    if not found.best:
        text += (
            f"; the smallest needs {found.least_gib:.3g} GiB on a rank: use more ranks, "
            "train.activation_checkpointing, or fewer samples a step"
        )
    return text


def table_of(candidates: Sequence[Candidate], measured_s: Sequence[float]) -> Table:
    """A row each, with what was measured of the first ones."""
    table = Table("pp x dp x tp", "micro-batches", "schedule", "data parallel", "recompute")
    for name in ("step ms", *(["measured"] if measured_s else []), "idle", "tensor ms", "data ms", "GiB"):
        table.add_column(name, justify="right")
    for index, candidate in enumerate(candidates):
        parallel, prediction = candidate.config.parallel_config, candidate.prediction
        pipeline, data = parallel.pipeline_parallel, parallel.data_parallel
        times = [f"{prediction.step_s * 1e3:.4g}"]
        if measured_s:
            times.append(f"{measured_s[index] * 1e3:.4g}" if index < len(measured_s) else "-")
        table.add_row(
            f"{pipeline.depth} x {data.size} x {parallel.tensor_parallel.size}",
            str(pipeline.micro_batches),
            _words(pipeline.depth, pipeline.schedule, pipeline.weight_gradients, "by_schedule"),
            _words(data.size, data.mode, data.overlap, "backward", data.algorithm, "ring"),
            candidate.config.train.activation_checkpointing.others,
            *times,
            f"{prediction.idle:.0%}",
            f"{prediction.tensor_s * 1e3:.3g}",
            f"{prediction.data_s * 1e3:.3g}",
            f"{prediction.memory_gib:.3g}",
        )
    return table


def write_json(path: Path, cluster: Cluster, candidates: Sequence[Candidate], measured_s: Sequence[float]) -> None:
    """The cluster, and every candidate's `parallel_config`, recomputation, prediction and measured time (or null)."""
    rows = [
        {
            "parallel_config": candidate.config.parallel_config.model_dump(mode="json"),
            "activation_checkpointing": candidate.config.train.activation_checkpointing.model_dump(mode="json"),
            "predicted": vars(candidate.prediction),
            "measured_step_s": measured_s[index] if index < len(measured_s) else None,
        }
        for index, candidate in enumerate(candidates)
    ]
    path.write_text(json.dumps({"cluster": cluster.model_dump(), "layouts": rows}, indent=1) + "\n", encoding="utf-8")


def _words(size: int, first: str, *choices: str) -> str:
    """What an axis of the mesh does: the first word, and of pairs of a value and the usual one, what is not usual."""
    if size == 1:
        return "-"
    return ", ".join([first, *(value for value, usual in zip(choices[::2], choices[1::2]) if value != usual)])
