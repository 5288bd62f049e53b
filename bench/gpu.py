"""`python -m fusedcomm.bench.gpu`: the ops between the GPUs at hand, and the kernels on one, one rank's view of eight.

Prints what a perfect tile schedule allows, proves that copies advance beside a kernel that spins, checks and times
every shape within its share of the time, and writes bench/results/<gpu>.json and .md. The exit code is 1 where a result
is wrong, 2 where there is no GPU or it cannot be measured.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fusedcomm.bench import gpu_ranks
from fusedcomm.bench.errors import BenchError
from fusedcomm.bench.gpu_device import Device, Gpu
from fusedcomm.bench.gpu_link import prove_progress
from fusedcomm.bench.gpu_measure import LINKS, MAKESPANS, measure, rows_of
from fusedcomm.bench.gpu_report import GpuRow, markdown, verdicts, write_json
from fusedcomm.bench.gpu_shapes import Shape, shapes
from fusedcomm.comm.places import COPY_SMS
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.tune.wave import PIECES, Link, TiledGemm, efficiency, slowest_s

BUDGET_S = 270.0
RESULTS = Path("bench/results")
# Where there is no GPU to ask: an H100's or H200's.
_NUM_SMS = 132


@dataclass(frozen=True)
class Outcome:
    """What was measured, what was found wrong, and what there was no time for."""

    rows: list[GpuRow] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_out: list[Shape] = field(default_factory=list)


def run(
    device: Device,
    todo: Sequence[Shape],
    outcome: Outcome,
    *,
    dtype: torch.dtype = torch.bfloat16,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measures the shapes in their order, each within an equal share of the time that is left, into `outcome`."""
    for as_graph in (False, True):
        prove_progress(device, device.configs(dtype.itemsize)[0], as_graph=as_graph)
    dtype_name = str(dtype).removeprefix("torch.")
    machine = f"{device.name}, {device.num_sms} SMs, torch {torch.__version__}"
    end_s = clock() + budget_s
    for index, shape in enumerate(todo):
        now_s = clock()
        if now_s >= end_s:
            outcome.left_out.append(shape)
            continue
        deadline_s = now_s + (end_s - now_s) / (len(todo) - index)
        try:
            measured = measure(device, shape, dtype, clock=clock, deadline_s=deadline_s)
        except BenchError as error:
            outcome.wrong.append(str(error))
            continue
        rows = rows_of(measured, dtype_name, machine)
        outcome.rows.extend(rows)
        outcome.wrong.extend(f"{shape}: {line}" for line in measured.wrong)
        print(_line(shape, rows), flush=True)


def bounds(todo: Sequence[Shape], num_sms: int) -> str:
    """What a perfect tile schedule hides of the communication, as Markdown: by chunks of a shard and by link."""
    columns = [(link, pieces) for link in LINKS for pieces in PIECES]
    lines = [
        f"| op | model | M, N, K | waves | {' | '.join(f'{link:g}x, {pieces}' for link, pieces in columns)} |",
        f"| --- | --- | --: | --: {'| --: ' * len(columns)}|",
    ]
    for shape in todo:
        gemm = TiledGemm(shape.sizes, shape.n, GemmConfig(), num_sms, 1.0)
        hidden = [
            efficiency(slowest_s(MAKESPANS[shape.op], gemm, Link(link), pieces), 1.0, link) for link, pieces in columns
        ]
        cells = (shape.op, shape.model, f"{shape.m}, {shape.n}, {shape.k}", str(gemm.num_waves))
        lines.append(f"| {' | '.join([*cells, *(f'{share:.2f}' for share in hidden)])} |")
    return "\n".join(lines)


def write(outcome: Outcome, folder: Path, name: str) -> Path:
    """Writes the rows; returns the path of the table."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "-".join(name.lower().split())
    write_json(folder / f"{stem}.json", outcome.rows)
    table = folder / f"{stem}.md"
    table.write_text(markdown(outcome.rows), encoding="utf-8")
    return table


def _line(shape: Shape, rows: Sequence[GpuRow]) -> str:
    """What came of one shape."""
    times = ", ".join(f"{row.method} {row.median_us:.0f} us" for row in rows if row.link is None)
    links = [
        f"{row.link:g}x: hidden {row.efficiency:.2f} of {row.bound:.2f}, x{row.vs_serial:.2f}"
        for row in rows
        if row.method == "fused"
    ]
    return f"{shape}: {times}; {'; '.join(links)}"


def main() -> int:
    """The command; returns its exit code."""
    todo = list(shapes())
    if not torch.cuda.is_available():
        print(f"What a perfect tile schedule hides on {_NUM_SMS} SMs, by wire / GEMM and chunks of a shard:\n")
        print(bounds(todo, _NUM_SMS))
        print("gpu: there is no CUDA GPU here: nothing was measured", file=sys.stderr)
        return 2
    try:
        device = Gpu()
    except ValueError as error:
        print(f"gpu: {torch.cuda.get_device_name()} cannot be measured: {error}", file=sys.stderr)
        return 2
    num_gpus = torch.cuda.device_count()
    code = _run_ranks(num_gpus) if num_gpus > 1 else 0
    print(f"What a perfect tile schedule hides on {device.num_sms} SMs, by wire / GEMM and chunks of a shard:\n")
    print(bounds(todo, device.num_sms), flush=True)
    print(
        f"\nOne rank of eight on {device.name}; peers are imitated by copies on {COPY_SMS} SMs that the GEMM leaves. "
        "NCCL: not run, it refuses two ranks on one GPU.",
        flush=True,
    )
    outcome = Outcome()
    try:
        run(device, todo, outcome, budget_s=BUDGET_S - (gpu_ranks.BUDGET_S if num_gpus > 1 else 0.0))
    except BenchError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    finally:
        # What is measured stays, whatever comes after it.
        if outcome.rows:
            print(f"written: {write(outcome, RESULTS, device.name)}")
    for shape in outcome.left_out:
        print(f"left out, no time: {shape}")
    print("\n".join(verdicts(outcome.rows)))
    for line in outcome.wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if outcome.wrong else code


def _run_ranks(num_gpus: int) -> int:
    """The ops between all GPUs, one process on each; returns the exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}"]
    return subprocess.call([*launcher, "-m", "fusedcomm.bench.gpu_ranks"])


if __name__ == "__main__":
    raise SystemExit(main())
