"""A step's timeline over all ranks: for Perfetto (or chrome://tracing), and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from fusedcomm.comm.lost import naming_lost_ranks
from fusedcomm.comm.record import Event, Recording, recording
from fusedcomm.train.config import Config, ParallelConfig
from fusedcomm.train.data import open_data
from fusedcomm.train.layout import coordinates, describe_layout
from fusedcomm.train.loop import mesh_of
from fusedcomm.train.trainer import Trainer

_COLOURS = {"compute": "#4c9f70", "transfer": "#3f72af", "wait": "#d9534f", "stage": "#d8d8d8"}


@naming_lost_ranks("trace")
def trace(config: Config, *, steps: int, json_path: Path | None, plot_path: Path | None, device: torch.device) -> None:
    """Train `steps` steps and draw the last one; every rank calls it, rank 0 writes the files."""
    mesh = mesh_of(config, device)
    data = open_data(config)
    trainer = Trainer(config, mesh)
    with recording() as record:
        for step in range(steps):
            pieces = data.train.batch(step * config.train.global_batch, mesh.dp_rank).pieces(config.train.accumulation)
            dist.barrier()
            record.clear()
            trainer.gradients(step, pieces)
            trainer.update(step)
        events = gather_events(record)
    if mesh.rank == 0 and mesh.pp > 1:
        for rank, (idle, ideal) in enumerate(zip(trainer.idle, trainer.pipeline.ideal_idle)):
            print(f"pipeline rank {rank}: idle {idle:.0%} of forward and backward; by the schedule {ideal:.0%}")
    if events is None:
        return
    if json_path is not None:
        write_trace(json_path, events, config.parallel_config)
    if plot_path is not None:
        plot_timeline(plot_path, events, config.parallel_config, title=f"step {steps}: {describe_layout(config)}")


def gather_events(record: Recording) -> list[list[Event]] | None:
    """Every rank's events, on rank 0. Ranks of one machine share a clock; every rank calls it."""
    gathered: list[list[Event]] | None = None
    if dist.get_rank() == 0:
        gathered = [[] for _ in range(dist.get_world_size())]
    dist.gather_object(record.events, gathered)
    return gathered


def write_trace(path: Path, events: Sequence[Sequence[Event]], parallel: ParallelConfig) -> None:
    """The events as Chrome trace JSON: a process per rank, named by its place on the mesh, a track per thread."""
    origin_s = _origin(events)
    rows: list[dict[str, object]] = []
    for rank, own in enumerate(events):
        rows.append(
            {
                "ph": "M",
                "pid": rank,
                "name": "process_name",
                "args": {"name": f"rank {rank} ({coordinates(parallel, rank)})"},
            }
        )
        rows += [
            {
                "ph": "X",
                "pid": rank,
                "tid": event.thread,
                "cat": event.kind,
                "name": f"{event.kind}: {event.name}",
                "ts": (event.start_s - origin_s) * 1e6,
                "dur": (event.end_s - event.start_s) * 1e6,
                "args": {"bytes": event.num_bytes},
            }
            for event in own
        ]
    path.write_text(json.dumps({"traceEvents": rows}) + "\n")


def plot_timeline(path: Path, events: Sequence[Sequence[Event]], parallel: ParallelConfig, *, title: str) -> None:
    """Two lanes a rank, the computing thread's (computing and waiting) above what travels from it.

    Behind the former, a box for each forward, backward or weight gradients of a micro-batch on a pipeline stage.
    """
    from matplotlib import pyplot

    origin_s = _origin(events)
    figure, axes = pyplot.subplots(figsize=(11, 0.9 + 0.55 * len(events)), layout="constrained")
    for rank, own in enumerate(events):
        # Boxes first, since what happens in them ends earlier and would be hidden.
        for event in sorted(own, key=lambda event: event.kind != "stage"):
            lane = rank + (0.2 if event.kind == "transfer" else -0.2)
            span_ms = ((event.start_s - origin_s) * 1e3, (event.end_s - event.start_s) * 1e3)
            width = 0.5 if event.kind == "stage" else 0.0
            axes.broken_barh(
                [span_ms], (lane - 0.18, 0.36), facecolors=_COLOURS[event.kind], edgecolors="white", linewidth=width
            )
    axes.set_yticks(range(len(events)), [f"rank {rank}\n{coordinates(parallel, rank)}" for rank in range(len(events))])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10)
    names = {"compute": "multiplies", "wait": "stands still for a transfer", "transfer": "travels"}
    if any(event.kind == "stage" for own in events for event in own):
        names["stage"] = "a micro-batch on a stage"
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in names]
    figure.legend(handles, names.values(), loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _origin(events: Sequence[Sequence[Event]]) -> float:
    return min((event.start_s for own in events for event in own), default=0.0)
