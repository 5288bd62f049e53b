"""One shape of the GPU benchmark: its methods checked, then timed in turns.

Every method is a CUDA graph of several runs, one after the other, on buffers that rotate through more than the L2
cache holds; the graphs take turns, in an order that rotates from round to round, and are timed by CUDA events.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusedcomm.bench.case import complaints
from fusedcomm.bench.errors import BenchError
from fusedcomm.bench.gpu_case import ALONE, LINKED, PARTS, Case, Plan, Signals, make_case
from fusedcomm.bench.gpu_device import Device, Work
from fusedcomm.bench.gpu_link import ImitatedLink
from fusedcomm.bench.gpu_report import GpuRow
from fusedcomm.bench.gpu_shapes import Shape
from fusedcomm.comm.places import COPY_SMS
from fusedcomm.tune.wave import Link, TiledGemm, best_pieces, efficiency, gather_s, scatter_s, slowest_s

# Time of the wire over that of the GEMM.
LINKS = (0.5, 1.0, 2.0)
# A graph runs for so long, unless one run takes longer.
_GRAPH_S = 1e-3
_MAX_RUNS = 10
# A copy's start and its flag: 335, 560 and 695 GB/s for 4, 16 and 64 MB of a link of 740 (QuACK's measurements).
CHUNK_S = 6e-6
_WARM_UP_ROUNDS = 2
_MIN_ROUNDS, _MAX_ROUNDS = 3, 15
MAKESPANS = {"all_gather_matmul": gather_s, "matmul_reduce_scatter": scatter_s}

# Seconds of each round, by method and link.
Laps = dict[tuple[str, float | None], list[float]]


@dataclass(frozen=True)
class Measured:
    """What was timed at one shape, and what came of the checks."""

    shape: Shape
    plan: Plan
    laps: Laps
    wrong: tuple[str, ...]


def measure(
    device: Device, shape: Shape, dtype: torch.dtype, clock: Callable[[], float], deadline_s: float
) -> Measured:
    """Checks and times all methods at one shape; rounds are added until `deadline_s` on the clock."""
    whole, left = (device.grid(dtype, shape.m, shape.n, sms) for sms in (0, COPY_SMS))
    plan = Plan(whole, left, pieces=1)
    roof_s = _roof_s(device, shape, plan, dtype)
    plan = replace(plan, pieces=best_pieces(MAKESPANS[shape.op], _tiled(shape, plan, roof_s), Link(roof_s, CHUNK_S)))
    signals = Signals(device, shape, plan.pieces)
    cases = [make_case(device, shape, plan, signals, dtype)]
    links = {factor: ImitatedLink(cases[0].wire_bytes / (factor * roof_s) / 1e9) for factor in LINKS}
    wrong = tuple(_check(cases[0], links[1.0], dtype))
    num_runs = max(1, min(_MAX_RUNS, math.ceil(_GRAPH_S / roof_s)))
    num_sets = min(num_runs, math.ceil(device.rotate_bytes / cases[0].num_bytes))
    cases += [make_case(device, shape, plan, signals, dtype) for _ in range(num_sets - 1)]
    works = _works(cases, links, num_runs)
    graphs = {key: device.capture(work) for key, work in works.items()}
    laps = _time_all(device, graphs, num_runs, clock, deadline_s)
    if (timeout := signals.timeout()) is not None:
        raise BenchError(f"{shape}: a wait for {timeout} was in vain")
    return Measured(shape, plan, laps, wrong)


def _roof_s(device: Device, shape: Shape, plan: Plan, dtype: torch.dtype) -> float:
    """Seconds of the plain GEMM."""
    case = make_case(device, shape, plan, Signals(device, shape, 1), dtype)
    graph = device.capture(_repeated([case.alone()["roof"]], 3))
    return min(device.time_s(graph) for _ in range(3)) / 3


def _tiled(shape: Shape, plan: Plan, gemm_s: float) -> TiledGemm:
    return TiledGemm(shape.sizes, shape.n, plan.left.config, plan.left.num_programs, gemm_s)


def _check(case: Case, link: ImitatedLink, dtype: torch.dtype) -> list[str]:
    """What is wrong with which method's result."""
    exact, plain = case.reference(torch.float64), case.reference(dtype)
    runs: dict[str, Work] = {name: run for name, run in case.alone().items() if name not in PARTS}
    runs |= {name: _bound(run, link) for name, run in case.linked().items() if name not in PARTS}
    wrong: list[str] = []
    for name, run in runs.items():
        case.poison()
        run()
        results = case.results(name)
        wrong += [f"{name}: {line}" for line in complaints(results, {key: exact[key] for key in results}, plain)]
    return wrong


def _bound(run: Callable[[ImitatedLink], object], link: ImitatedLink) -> Work:
    return lambda: run(link)


def _repeated(runs: Sequence[Work], times: int) -> Work:
    """`times` runs, on each set of buffers in turn."""

    def work() -> None:
        for index in range(times):
            runs[index % len(runs)]()

    return work


def _works(
    cases: Sequence[Case], links: Mapping[float, ImitatedLink], num_runs: int
) -> dict[tuple[str, float | None], Work]:
    works: dict[tuple[str, float | None], Work] = {}
    for name in cases[0].alone():
        works[name, None] = _repeated([case.alone()[name] for case in cases], num_runs)
    for factor, link in links.items():
        for name in LINKED:
            works[name, factor] = _repeated([_bound(case.linked()[name], link) for case in cases], num_runs)
    return works


def _time_all(
    device: Device,
    graphs: Mapping[tuple[str, float | None], Work],
    num_runs: int,
    clock: Callable[[], float],
    deadline_s: float,
) -> Laps:
    names = list(graphs)
    laps: Laps = {name: [] for name in names}
    for turn in range(-_WARM_UP_ROUNDS, _MAX_ROUNDS):
        if turn >= _MIN_ROUNDS and clock() >= deadline_s:
            break
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            seconds = device.time_s(graphs[name]) / num_runs
            if turn >= 0:
                laps[name].append(seconds)
    return laps


def rows_of(measured: Measured, dtype_name: str, machine: str) -> list[GpuRow]:
    """The rows of one shape."""
    rows = [_row(measured, name, None, dtype_name, machine) for name in ALONE]
    for factor in LINKS:
        rows += [_row(measured, name, factor, dtype_name, machine) for name in LINKED if name not in PARTS]
    return rows


def _row(measured: Measured, name: str, factor: float | None, dtype_name: str, machine: str) -> GpuRow:
    shape, plan, laps = measured.shape, measured.plan, measured.laps
    own_s = laps[name, factor]
    low_s, _, high_s = statistics.quantiles(own_s, n=4, method="inclusive")
    wire_s = None if factor is None else laps["transfer", factor]
    serial_s = None if factor is None else laps["serial", factor]
    return GpuRow(
        op=shape.op,
        model=shape.model,
        world=shape.world,
        dtype=dtype_name,
        shape=(shape.m, shape.n, shape.k),
        config=str((plan.left if name in ("compute", "fused") else plan.whole).config),
        link=factor,
        method=name,
        pieces=plan.pieces if name in ("hook", "compute", "fused") else 1,
        median_us=statistics.median(own_s) * 1e6,
        p25_us=low_s * 1e6,
        p75_us=high_s * 1e6,
        vs_cublas=_median_ratio(laps["cublas", None], own_s) if name == "roof" else None,
        overhead=_median_ratio(own_s, laps["roof", None]) - 1 if name == "hook" else None,
        wire_us=None if wire_s is None else statistics.median(wire_s) * 1e6,
        vs_serial=None if serial_s is None else _median_ratio(serial_s, own_s),
        efficiency=_efficiency(laps, name, factor),
        bound=_bound_of(measured, factor) if name == "fused" and factor is not None else None,
        rounds=len(own_s),
        checked=not any(line.startswith(f"{name}:") for line in measured.wrong),
        machine=machine,
    )


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below))


def _efficiency(laps: Laps, name: str, factor: float | None) -> float | None:
    """Hidden communication, against the method's own time without any: what `serial` takes besides its transfers."""
    if name not in ("chunked", "fused"):
        return None
    rounds = zip(laps[name, factor], laps["transfer", factor], laps["serial", factor], laps["compute", None])
    return statistics.median(
        efficiency(own_s, compute_s if name == "fused" else serial_s - wire_s, wire_s)
        for own_s, wire_s, serial_s, compute_s in rounds
    )


def _bound_of(measured: Measured, factor: float) -> float:
    compute_s = statistics.median(measured.laps["compute", None])
    wire_s = statistics.median(measured.laps["transfer", factor])
    # Added up is what has arrived: no schedule of tiles can hide that.
    sum_s = statistics.median(measured.laps.get(("sum", None), [0.0]))
    gemm = _tiled(measured.shape, measured.plan, compute_s - sum_s)
    total_s = slowest_s(MAKESPANS[measured.shape.op], gemm, Link(wire_s), measured.plan.pieces) + sum_s
    return efficiency(total_s, compute_s, wire_s)
