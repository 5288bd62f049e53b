"""`fusedcomm bench OP`: methods checked, then timed side by side.

The protocol, which holds still on a machine of two cores: the GEMM is measured in the run and the link's rate derived
from it; all methods live in one set of processes and take turns, in an order that rotates from round to round; two
rounds warm up; of each round the slowest rank counts; medians and quartiles are over rounds, ratios are medians of
ratios within a round. Ranks start together, at a time that the parent names.
"""

from __future__ import annotations

import math
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from fusedcomm.bench.case import Case, Method, Spec, complaints
from fusedcomm.bench.errors import BenchError
from fusedcomm.bench.ranks import RankError, Ranks, RankState, Seat, cores, cores_of, loopback_name, sleep_until
from fusedcomm.bench.report import Row, write_json, write_plot, write_table
from fusedcomm.bench.request import Plan, Request, op_module, plan_of
from fusedcomm.bench.shaped_network import INTERFACE, ShapedNetwork
from fusedcomm.comm.record import last_path
from fusedcomm.train.outputs import output_problems

# Until the rate is known.
_FAST_GBPS = 100.0
_OURS = ("serial", "chunked", "auto")
_NUM_WARM_UPS = 2
# Rounds are added, up to so many times as asked for and until they have taken so long together, while the quartiles are
# not this close to the median.
_MAX_ROUNDS_FACTOR = 3
_MAX_ROUNDS_S = 90.0
_QUIET = 0.05
# Shorter runs are repeated back to back until they take so long together.
_MIN_RUN_S = 0.02
_MAX_REPEATS = 200
# From the parent's word to the start: all ranks have read it by then.
_LEAD_S = 2e-3


def run(request: Request) -> int:
    """Run the benchmark, print its table and write its files; returns the exit code.

    1: a method's result is wrong, or a rank failed. 2: the request makes no sense, or this machine does not allow it:
    one line on stderr says why. 130, 143: ended by Ctrl-C or SIGTERM. However it ends, no rank and no namespace is
    left.
    """
    try:
        for problem in output_problems(json_path=request.json_path, plot_path=request.plot_path):
            raise BenchError(problem)
        with _exiting_on_sigterm():
            rows = measure(request)
        write_table(rows)
        if request.json_path is not None:
            _write(request.json_path, "--json", lambda path: write_json(path, rows))
        if request.plot_path is not None:
            _write(request.plot_path, "--plot", lambda path: write_plot(path, rows))
    except BenchError as error:
        print(f"fusedcomm: {error}", file=sys.stderr)
        return 1 if isinstance(error, RankError) else 2
    except KeyboardInterrupt:
        print("fusedcomm: SIGINT: all ranks ended", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0 if all(row.checked for row in rows) else 1


def measure(request: Request) -> list[Row]:
    """Time every method; one row each. Prints what it does on the way."""
    plan = plan_of(request)
    spec, gbps = plan.spec, plan.link.gbps
    with ExitStack() as stack:
        network = None
        if plan.link.is_shaped:
            network = stack.enter_context(ShapedNetwork(spec.nodes, gbps or _FAST_GBPS, spec.world // spec.nodes))
        ranks = stack.enter_context(Ranks(_seats(spec, network)))
        clock = _Clock(ranks, network)
        min_bytes = max(ranks.run(_make_case, spec))
        clock.open("compute")
        if plan.link.factor is not None and network is not None:
            gbps = plan.link.factor * min_bytes * 8 / 1e9 / _compute_time_s(clock)
            if gbps > _FAST_GBPS:
                raise BenchError(f"--link {request.link}: {spec.op} computes next to nothing; give a rate in Gbit/s")
            network.set_rate(gbps)
        where = "" if spec.nodes == spec.world else f" on {spec.nodes} nodes"
        _say(
            f"{spec.op}: {spec.world} ranks{where}, {spec.dtype_name}, M,N,K = {spec.m},{spec.n},{spec.k}; "
            f"{_words(gbps)}"
        )
        clock.open("transfer")
        verdicts = {name: clock.open_and_check(name) for name in plan.methods}
        laps = _time_all(clock, ["compute", "transfer", *plan.methods], plan.rounds)
        return _rows(plan, gbps, min_bytes, laps, verdicts)


@dataclass
class _Laps:
    """One method's rounds: seconds of the slowest rank, and bytes of the node that sent most, per run."""

    seconds: list[float]
    num_bytes: list[int]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def is_quiet(self) -> bool:
        low, high = self.quartiles_s
        return high <= self.median_s * (1 + _QUIET) and low >= self.median_s * (1 - _QUIET)


@dataclass(frozen=True)
class _Verdict:
    wrong: list[str]
    num_chunks: int
    note: str


class _Clock:
    """Times methods on all ranks, and counts what they send."""

    def __init__(self, ranks: Ranks, network: ShapedNetwork | None) -> None:
        self._ranks, self._network = ranks, network
        self._repeatable: dict[str, bool] = {}

    def open(self, name: str) -> None:
        self._repeatable[name] = all(self._ranks.run(_open, name))

    def open_and_check(self, name: str) -> _Verdict:
        self.open(name)
        verdicts: list[_Verdict] = self._ranks.run(_check, name)
        wrong = [f"rank {rank}: {line}" for rank, verdict in enumerate(verdicts) for line in verdict.wrong]
        return _Verdict(wrong, verdicts[0].num_chunks, verdicts[0].note)

    def time(self, name: str, repeats: int) -> tuple[float, int]:
        """Seconds and bytes of one run, out of `repeats` back to back where the method allows that."""
        if not self._repeatable[name]:
            repeats = 1
        self._ranks.run(_prepare, name)
        before = self._network.sent_bytes() if self._network else [0]
        seconds = self._ranks.run(_time, name, repeats, time.perf_counter() + _LEAD_S)
        after = self._network.sent_bytes() if self._network else [0]
        self._ranks.run(_finish, name)
        num_bytes = max(end - start for start, end in zip(before, after))
        return max(seconds) / repeats, num_bytes // repeats


def _compute_time_s(clock: _Clock) -> float:
    times_s = [clock.time("compute", 1)[0] for _ in range(_NUM_WARM_UPS + 5)]
    return statistics.median(times_s[_NUM_WARM_UPS:])


def _time_all(clock: _Clock, names: Sequence[str], min_rounds: int) -> dict[str, _Laps]:
    repeats: dict[str, int] = {}
    for _ in range(_NUM_WARM_UPS):
        for name in names:
            repeats[name] = min(_MAX_REPEATS, max(1, math.ceil(_MIN_RUN_S / clock.time(name, 1)[0])))
    laps = {name: _Laps([], []) for name in names}
    end_s = time.perf_counter() + _MAX_ROUNDS_S
    for turn in range(_MAX_ROUNDS_FACTOR * min_rounds):
        if turn >= min_rounds and (time.perf_counter() > end_s or all(lap.is_quiet for lap in laps.values())):
            break
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            seconds, num_bytes = clock.time(name, repeats[name])
            laps[name].seconds.append(seconds)
            laps[name].num_bytes.append(num_bytes)
    return laps


def _rows(
    plan: Plan,
    gbps: float | None,
    min_bytes: int,
    laps: dict[str, _Laps],
    verdicts: dict[str, _Verdict],
) -> list[Row]:
    spec, gemm_s, transfer_s = plan.spec, laps["compute"].median_s, laps["transfer"].median_s
    # Without a rate, the wire is what the transfers alone take.
    wire_s = transfer_s if gbps is None else min_bytes * 8 / (gbps * 1e9)
    _comment(laps, plan, gbps, gemm_s, wire_s)
    rows: list[Row] = []
    for name, verdict in verdicts.items():
        lap = laps[name]
        for line in verdict.wrong:
            _say(f"WRONG: {name}: {line}")
        low, high = lap.quartiles_s
        rows.append(
            Row(
                op=spec.op,
                world=spec.world,
                dtype=spec.dtype_name,
                shape=(spec.m, spec.n, spec.k),
                link_gbps=gbps,
                method=name,
                num_chunks=verdict.num_chunks,
                median_s=lap.median_s,
                p25_s=low,
                p75_s=high,
                gemm_s=gemm_s,
                wire_s=wire_s,
                of_ideal=max(gemm_s, wire_s) / lap.median_s,
                vs_serial=_speed_up(laps, "serial", name),
                vs_torch=_speed_up(laps, op_module(spec.op).TORCH_METHOD, name),
                wire_bytes=None if gbps is None else round(statistics.median(lap.num_bytes)),
                checked=not verdict.wrong,
                note=verdict.note,
                transfer_s=transfer_s,
                rounds=len(lap.seconds),
                machine=_machine(),
                nodes=None if spec.nodes == spec.world else spec.nodes,
                layout=None if spec.layout is None else "x".join(map(str, spec.layout)),
            )
        )
    return rows


def _speed_up(laps: dict[str, _Laps], baseline: str, name: str) -> float | None:
    if baseline not in laps:
        return None
    return statistics.median(base / own for base, own in zip(laps[baseline].seconds, laps[name].seconds))


def _comment(laps: dict[str, _Laps], plan: Plan, gbps: float | None, gemm_s: float, wire_s: float) -> None:
    """What makes this run doubtful."""
    restless = [name for name, lap in laps.items() if not lap.is_quiet]
    if restless:
        num_rounds = len(next(iter(laps.values())).seconds)
        _say(
            f"note: after {num_rounds} rounds the quartiles of {', '.join(restless)} are not within {_QUIET:.0%} of "
            "the median; the machine is busy, or --rounds too few"
        )
    if plan.link.factor is not None and abs(gemm_s / (wire_s * plan.link.factor) - 1) > _QUIET:
        _say(
            f"note: the rate was derived from a GEMM of {wire_s * plan.link.factor * 1e3:.1f} ms, which took "
            f"{gemm_s * 1e3:.1f} ms later on; the machine is busy"
        )
    if "serial" in laps and gbps is not None:
        serial_s = laps["serial"].median_s
        if abs(serial_s / (gemm_s + wire_s) - 1) > _QUIET:
            _say(
                f"note: serial took {serial_s * 1e3:.1f} ms, GEMM and wire {(gemm_s + wire_s) * 1e3:.1f} ms; where the "
                "two differ, the run was disturbed, or more travels or is computed than there must be"
            )


def _make_case(state: RankState, spec: Spec) -> int:
    case = op_module(spec.op).make_case(spec, state.rank)
    state.kept = {"spec": spec, "case": case}
    return case.min_bytes


def _open(state: RankState, name: str) -> bool:
    """Whether it may run several times in a row."""
    method = cast(Case, state.kept["case"]).open(name)
    state.kept[f"method {name}"] = method
    return method.prepare is None


def _check(state: RankState, name: str) -> _Verdict:
    case, spec = cast(Case, state.kept["case"]), cast(Spec, state.kept["spec"])
    if "exact" not in state.kept:
        state.kept["exact"], state.kept["plain"] = case.reference(torch.float64), case.reference(spec.dtype)
    _prepare(state, name)
    method = _method(state, name)
    results = method.run()
    _finish(state, name)
    wrong = complaints(results, state.kept["exact"], state.kept["plain"], method.loss)
    path = last_path() if name in _OURS else None
    if path is None:
        return _Verdict(wrong, 1, method.note)
    taken = f"{path.method}: {path.reason}" if name == "auto" else ""
    return _Verdict(wrong, path.num_chunks, "; ".join(filter(None, [method.note, taken])))


def _prepare(state: RankState, name: str) -> None:
    prepare = _method(state, name).prepare
    if prepare is not None:
        prepare()


def _finish(state: RankState, name: str) -> None:
    finish = _method(state, name).finish
    if finish is not None:
        finish()


def _time(state: RankState, name: str, repeats: int, start_s: float) -> float:
    method = _method(state, name)
    sleep_until(start_s)
    begin_s = time.perf_counter()
    for _ in range(repeats):
        method.run()
    return time.perf_counter() - begin_s


def _method(state: RankState, name: str) -> Method:
    return state.kept[f"method {name}"]


def _seats(spec: Spec, network: ShapedNetwork | None) -> list[Seat]:
    seats = cores_of(spec.world)
    if network is None:
        return [Seat(core, loopback_name(), None) for core in seats]
    per_node = spec.world // spec.nodes
    return [Seat(core, INTERFACE, network.namespace(rank // per_node)) for rank, core in enumerate(seats)]


def _words(gbps: float | None) -> str:
    return "loopback, not shaped" if gbps is None else f"links of {gbps:.4g} Gbit/s"


def _machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model}, {len(cores())} cores, {platform.system()} {platform.release()}, torch {torch.__version__}"


def _say(line: str) -> None:
    print(line, flush=True)


def _write(path: Path, option: str, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise BenchError(f"{option} {path}: cannot be written ({error.strerror}); choose another file") from None


@contextmanager
def _exiting_on_sigterm() -> Iterator[None]:
    """SIGTERM leaves through `finally`, as Ctrl-C does."""

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
