"""The whole GPU benchmark on toy shapes in the interpreter, with a made-up clock."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from host_device import Host

from fusedcomm.bench import gpu, gpu_case, gpu_link, gpu_measure
from fusedcomm.bench.errors import BenchError
from fusedcomm.bench.gpu_case import LINKED, Plan, Signals, make_case
from fusedcomm.bench.gpu_link import ImitatedLink, prove_progress
from fusedcomm.bench.gpu_report import GpuRow, markdown, verdicts
from fusedcomm.bench.gpu_shapes import ROWS, Shape, shapes
from fusedcomm.kernels.config import GemmConfig, architecture
from fusedcomm.kernels.flags import Timeout
from fusedcomm.kernels.grid import Grid

CONFIG = GemmConfig(16, 64, 64, group_m=2)
TOYS = [
    Shape("all_gather_matmul", "toy", 64, 48, 40, world=4),
    Shape("matmul_reduce_scatter", "toy", 72, 40, 24, world=4),
]
LINK = ImitatedLink(100.0)


@pytest.fixture(autouse=True, scope="module")
def _two_runs_in_a_graph():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_measure, "_GRAPH_S", 2e-5)
        yield


def measured(todo, **options) -> gpu.Outcome:
    outcome = gpu.Outcome()
    gpu.run(Host(), todo, outcome, dtype=torch.float16, **options)
    return outcome


@pytest.fixture(scope="module")
def outcome() -> gpu.Outcome:
    ticks = itertools.count()
    return measured(TOYS, budget_s=1000.0, clock=lambda: float(next(ticks)))


def test_the_whole_benchmark_checks_and_times_every_method(outcome):
    assert outcome.wrong == []
    assert outcome.left_out == []
    per_shape = len(gpu_case.ALONE) + len(gpu_measure.LINKS) * (len(LINKED) - 1)
    assert len(outcome.rows) == len(TOYS) * per_shape
    assert all(row.checked and row.rounds >= 3 for row in outcome.rows)
    # Where all runs take equally long, and `serial` nothing but its transfers.
    for row in outcome.rows:
        assert row.p25_us == row.median_us == row.p75_us > 0
        assert row.vs_cublas == (1.0 if row.method == "roof" else None)
        assert row.overhead == (0.0 if row.method == "hook" else None)
        assert (row.vs_serial is None) == (row.link is None)
        assert row.efficiency == {"fused": 1.0, "chunked": 0.0}.get(row.method)
        assert (row.bound is not None) == (row.method == "fused")


def test_the_benchmark_writes_rows_and_tables(outcome, tmp_path):
    table = gpu.write(outcome, tmp_path / "results", "NVIDIA H200")
    assert table.name == "nvidia-h200.md"
    rows = json.loads(table.with_suffix(".json").read_text())
    assert [GpuRow(**{**row, "shape": tuple(row["shape"])}) for row in rows] == outcome.rows
    text = table.read_text()
    for toy in TOYS:
        assert f"| {toy.op} | toy | {toy.m}, {toy.n}, {toy.k} |" in text
    assert "Measured on Triton's interpreter, 19 SMs" in text
    # Where adding up takes as long as all of `compute`, nothing of a reduce-scatter can hide.
    assert "overlap efficiency >= 0.95 of the bound: 3 of 3 shapes" in text


def test_what_there_is_no_time_for_is_named():
    outcome = measured(TOYS, budget_s=100.0, clock=itertools.count(0, 99).__next__)
    assert [row.op for row in outcome.rows[:1]] == ["all_gather_matmul"]
    assert outcome.left_out == TOYS[1:]


def test_a_wrong_result_is_reported_and_so_is_a_wait_in_vain(monkeypatch):
    def wrong(x, w, y, **_):
        y.zero_()

    monkeypatch.setattr(gpu_case, "gemm", wrong)
    monkeypatch.setattr(gpu_measure, "LINKS", (1.0,))
    outcome = measured(TOYS[:1], budget_s=0.1)
    assert [line.split(" misses")[0] for line in outcome.wrong] == [f"{TOYS[0]}: roof: y"]
    assert [row.method for row in outcome.rows if not row.checked] == ["roof"]
    assert "WRONG" in markdown(outcome.rows)
    missing = Timeout("all_gather_matmul", rank=1, chunk=2, epoch=3)
    monkeypatch.setattr(Signals, "timeout", lambda self: missing)
    assert measured(TOYS[:1], budget_s=0.1).wrong == [f"{TOYS[0]}: a wait for {missing} was in vain"]


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.op)
@pytest.mark.parametrize("pieces", [1, 3])
def test_every_linked_method_gives_the_op_whatever_the_epoch(toy, pieces):
    device = Host()
    signals = Signals(device, toy, pieces)
    case = make_case(device, toy, Plan(Grid(CONFIG, 3), Grid(CONFIG, 2), pieces), signals, torch.float32)
    exact = case.reference(torch.float64)
    # Calls enough for the epoch to wrap around.
    for _ in range(3):
        for name in ("serial", "chunked", "fused"):
            case.poison()
            case.linked()[name](LINK)
            (result,) = case.results(name).values()
            assert torch.allclose(result.double(), exact["y"], atol=1e-5)
    assert int(signals.chunks.epoch) < 0
    assert signals.timeout() is None


def test_fused_waits_for_what_did_not_come(monkeypatch):
    device, toy = Host(), TOYS[0]
    signals = Signals(device, toy, 1)
    case = make_case(device, toy, Plan(Grid(CONFIG, 3), Grid(CONFIG, 2), 1), signals, torch.float32)
    monkeypatch.setattr(gpu_case, "TIMEOUT_US", 3)
    # The next rank's rows never arrive: their flag stays behind.
    monkeypatch.setattr(Signals, "peers_chunks", lambda self: iter([(3, slice(48, 64)), (0, slice(0, 16))]))
    case.linked()["fused"](LINK)
    missing = signals.timeout()
    assert missing == Timeout("all_gather_matmul", rank=1, chunk=1, epoch=signals.chunks.epoch.item())


def test_progress_is_not_taken_for_granted(monkeypatch):
    prove_progress(Host(), CONFIG, as_graph=True)
    monkeypatch.setattr(gpu_link, "TIMEOUT_US", 3)
    monkeypatch.setattr(ImitatedLink, "copy", lambda self, source, target: None)
    with pytest.raises(BenchError, match=r"no copy advances .* 16 SMs .*launched one by one"):
        prove_progress(Host(), CONFIG, as_graph=False)


def row(**changes) -> GpuRow:
    values = {
        "op": "all_gather_matmul",
        "model": "m",
        "world": 8,
        "dtype": "bfloat16",
        "shape": (2048, 1, 1),
        "config": "c",
        "link": None,
        "method": "roof",
        "pieces": 1,
        "median_us": 1.0,
        "p25_us": 1.0,
        "p75_us": 1.0,
        **dict.fromkeys(("vs_cublas", "overhead", "wire_us", "vs_serial", "efficiency", "bound")),
        "rounds": 3,
        "checked": True,
        "machine": "GPU",
    }
    return GpuRow(**(values | changes))


def test_verdicts_hold_the_rows_to_the_targets():
    rows = [
        row(vs_cublas=0.96),
        row(vs_cublas=0.9),
        # Too few rows to be asked of.
        row(vs_cublas=0.5, shape=(1024, 1, 1)),
        row(method="hook", overhead=0.02),
        row(method="hook", overhead=0.03, op="matmul_reduce_scatter"),
        row(method="hook", overhead=0.031, op="matmul_reduce_scatter"),
        row(method="fused", link=1.0, efficiency=0.85, bound=0.88, vs_serial=1.5),
        row(method="fused", link=2.0, efficiency=0.4, bound=0.5, vs_serial=0.9),
        # One wave: nothing can hide.
        row(method="fused", link=2.0, efficiency=-0.1, bound=-1e-17, vs_serial=1.0),
    ]
    assert [line.split(" (")[0] for line in verdicts(rows)] == [
        "GEMM >= 0.95 of cuBLAS from 2048 rows: 1 of 2 shapes",
        "the wait hook costs <= 2%: 1 of 1 shapes",
        "the publish hook costs <= 3%: 1 of 2 shapes",
        "overlap efficiency >= 0.95 of the bound: 1 of 2 shapes",
        "fused is never slower than serial: 2 of 3 shapes",
    ]
    assert verdicts([]) == []


def test_the_shapes_are_those_of_known_models():
    found = list(shapes())
    assert {shape.m for shape in found} == set(ROWS)
    assert {(shape.n, shape.k) for shape in found if shape.model == "Llama-3 70B"} == {(3584, 8192), (8192, 3584)}
    assert all(shape.m % shape.world == 0 for shape in found)
    assert replace(found[0], m=16, n=2, k=3).flops == 192


def test_the_command_without_a_gpu_prints_the_bounds_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "shapes", lambda: iter(list(shapes())[:2]))
    assert gpu.main() == 2
    out, error = capsys.readouterr()
    assert "| all_gather_matmul | Llama-3 8B | 4096, 1792, 4096 | 2 |" in out
    assert "there is no CUDA GPU here: nothing was measured" in error


def test_the_command_on_a_gpu_that_kernels_do_not_know_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "RTX")
    monkeypatch.setattr(gpu, "Gpu", partial(architecture, "sm_120"))
    assert gpu.main() == 2
    assert "gpu: RTX cannot be measured: kernels: target 'sm_120' is unknown" in capsys.readouterr().err
