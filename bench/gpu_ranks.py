"""`torchrun --nproc-per-node N -m fusedcomm.bench.gpu_ranks`: the ops between GPUs, one a rank, beside torch's own.

Every method is checked against fp64, then timed in turns: ten runs back to back, without a barrier between them, which
would add its own skew; of each round the slowest rank counts. `async-tp` is torch's pair of fused ops on symmetric
memory. A method that cannot run here is reported with the reason.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from fusedcomm.bench.case import complaints, normal, world_group
from fusedcomm.bench.gpu_shapes import Shape, shapes
from fusedcomm.ops import all_gather_matmul, matmul_reduce_scatter

METHODS = ("torch", "async-tp", "serial", "chunked", "fused", "fused:c10d")
BUDGET_S = 120.0
# Those that tell most; more is timed on one GPU.
_ROWS = (4096, 8192)
_RUNS = 10
_WARM_UP_ROUNDS, _MIN_ROUNDS, _MAX_ROUNDS = 10, 3, 15


@dataclass(frozen=True)
class RankRow:
    """One method at one shape: medians of the slowest rank's time."""

    op: str
    model: str
    world: int
    dtype: str
    # M, N, K of the GEMM that one rank runs.
    shape: tuple[int, int, int]
    method: str
    median_us: float
    p25_us: float
    p75_us: float
    # That GEMM alone.
    gemm_us: float
    vs_serial: float
    checked: bool
    # Why it was not run.
    reason: str
    machine: str


class RankCase:
    """One op between the ranks of the default group."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self._group = world_group()
        self._shape, self._rank = shape, self._group.rank()
        size = shape.m // shape.world
        self._own = slice(self._rank * size, (self._rank + 1) * size)
        self._gathers = shape.op == "all_gather_matmul"
        inputs = [self._operands(rank, device, dtype) for rank in range(shape.world)]
        self._x, self._w = inputs[self._rank]
        if self._gathers:
            self._all_x, self._all_w = torch.cat([x for x, _ in inputs]), self._w
        else:
            # The sum over ranks is one product of what all hold.
            self._all_x = torch.cat([x[self._own] for x, _ in inputs], 1)
            self._all_w = torch.cat([w for _, w in inputs], 1)

    def _operands(self, rank: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = self._shape
        rows = shape.m // shape.world if self._gathers else shape.m
        x = normal((rows, shape.k), 0, rank, device=device)
        w = normal((shape.n, shape.k), 1, rank, scale=(shape.k * shape.world) ** -0.5, device=device)
        return x.to(dtype), w.to(dtype)

    def reference(self, dtype: torch.dtype) -> Tensor:
        """The op's result on this rank, by plain torch in `dtype`."""
        return self._all_x.to(dtype) @ self._all_w.to(dtype).t()

    def gemm(self) -> Tensor:
        """The GEMM of this rank, alone."""
        return (self._all_x if self._gathers else self._x) @ self._w.t()

    def run(self, method: str) -> Tensor:
        """The op by one of `METHODS`."""
        if method == "torch":
            return self._run_torch()
        if method == "async-tp":
            return self._run_async_tp()
        op = all_gather_matmul if self._gathers else matmul_reduce_scatter
        return op(self._x, self._w, group=self._group, method=method)

    def _run_torch(self) -> Tensor:
        if self._gathers:
            x_full = self._x.new_empty(self._shape.m, self._shape.k)
            dist.all_gather_into_tensor(x_full, self._x)
            return x_full @ self._w.t()
        y_partial = self._x @ self._w.t()
        y = torch.empty_like(y_partial[self._own])
        dist.reduce_scatter_tensor(y, y_partial)
        return y

    def _run_async_tp(self) -> Tensor:
        name = self._group.group_name
        if self._gathers:
            return torch.ops.symm_mem.fused_all_gather_matmul(self._x, [self._w.t()], 0, name)[1][0]
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(self._x, self._w.t(), "sum", 0, name)


def measure(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    machine: str,
    *,
    methods: Sequence[str] = METHODS,
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[RankRow]:
    """Checks and times the methods at one shape; every rank calls it and gets the same rows."""
    case = RankCase(shape, device, dtype)
    checks = {method: _check(case, method, dtype) for method in methods}
    able = [method for method in methods if checks[method] in ("", "wrong")]
    runs: dict[str, Callable[[], object]] = {"gemm": case.gemm}
    runs |= {method: lambda method=method: case.run(method) for method in able}
    laps: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(-_WARM_UP_ROUNDS // _RUNS, _MAX_ROUNDS):
        # Rank 0's clock decides for all.
        if turn >= _MIN_ROUNDS and _agree(clock() >= deadline_s, device):
            break
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            seconds = _slowest(_time_s(runs[name], device), device)
            if turn >= 0:
                laps[name].append(seconds)
    return [_row(shape, method, laps, checks[method], dtype, machine) for method in methods]


def _check(case: RankCase, method: str, dtype: torch.dtype) -> str:
    """Nothing if the result is right on all ranks, `wrong`, or why the method cannot run here."""
    reason = ""
    try:
        results = {"y": case.run(method)}
        lines = complaints(results, {"y": case.reference(torch.float64)}, {"y": case.reference(dtype)})
        reason = "wrong" if lines else ""
    # What torch raises where it has no symmetric memory, and our ops where a method has no transport.
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] or type(error).__name__
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), "")


def _time_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run of several in a row."""
    if device.type == "cpu":
        begin_s = time.perf_counter()
        for _ in range(_RUNS):
            run()
        return (time.perf_counter() - begin_s) / _RUNS
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The first run hides how long the host takes to start the others.
    run()
    begin.record()
    for _ in range(_RUNS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _RUNS


def _slowest(seconds: float, device: torch.device) -> float:
    word = torch.tensor([seconds], device=device)
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return word.item()


def _agree(over: bool, device: torch.device) -> bool:
    word = torch.tensor([int(over)], device=device)
    dist.broadcast(word, 0)
    return bool(word.item())


def _row(
    shape: Shape, method: str, laps: dict[str, list[float]], check: str, dtype: torch.dtype, machine: str
) -> RankRow:
    own_s = laps.get(method, [])
    low_s, median_s, high_s = statistics.quantiles(own_s, n=4, method="inclusive") if own_s else (0.0, 0.0, 0.0)
    ratios = [serial / own for serial, own in zip(laps.get("serial", []), own_s)]
    return RankRow(
        op=shape.op,
        model=shape.model,
        world=shape.world,
        dtype=str(dtype).removeprefix("torch."),
        shape=(shape.m, shape.n, shape.k),
        method=method,
        median_us=median_s * 1e6,
        p25_us=low_s * 1e6,
        p75_us=high_s * 1e6,
        gemm_us=statistics.median(laps["gemm"]) * 1e6,
        vs_serial=statistics.median(ratios) if ratios else 0.0,
        checked=not check,
        reason="" if check == "wrong" else check,
        machine=machine,
    )


def markdown(rows: Sequence[RankRow]) -> str:
    """A table of all rows."""
    lines = [
        "| op | model | M, N, K | method | us | GEMM us | vs serial |",
        "| --- | --- | --: | --- | --: | --: | --: |",
    ]
    for row in rows:
        cells = [row.op, row.model, ", ".join(map(str, row.shape)), row.method]
        if row.reason:
            cells += [f"not run: {row.reason}", "-", "-"]
        else:
            time_us = f"{row.median_us:.0f}" + ("" if row.checked else " WRONG")
            cells += [time_us, f"{row.gemm_us:.0f}", f"{row.vs_serial:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    machines = ", ".join(sorted({row.machine for row in rows}))
    return "\n".join([*lines, "", f"Measured on {machines}."]) + "\n"


def main() -> int:
    """One rank of the command; returns its exit code."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    world = dist.get_world_size()
    symmetric_memory.enable_symm_mem_for_group(world_group().group_name)
    machine = f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    todo = [Shape(shape.op, shape.model, shape.m, shape.n, shape.k, world) for shape in shapes() if shape.m in _ROWS]
    end_s = time.monotonic() + BUDGET_S
    rows: list[RankRow] = []
    for index, shape in enumerate(todo):
        now_s = time.monotonic()
        rows += measure(
            shape, device, torch.bfloat16, machine, deadline_s=now_s + (end_s - now_s) / (len(todo) - index)
        )
    if dist.get_rank() == 0:
        stem = Path("bench/results", f"{'-'.join(torch.cuda.get_device_name().lower().split())}-x{world}")
        stem.parent.mkdir(parents=True, exist_ok=True)
        objects = ",\n".join(json.dumps(asdict(row)) for row in rows)
        stem.with_suffix(".json").write_text(f"[\n{objects}\n]\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(markdown(rows), encoding="utf-8")
        print(markdown(rows), flush=True)
    wrong = [row for row in rows if not row.checked and not row.reason]
    if wrong:
        print(f"WRONG: {', '.join(f'{row.method} of {row.op} {row.shape}' for row in wrong)}", file=sys.stderr)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
