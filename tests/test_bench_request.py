"""What `fusedcomm bench` refuses before anything starts, and how it counts."""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import pytest
import torch

from fusedcomm.bench import harness, shaped_network
from fusedcomm.bench.case import complaints
from fusedcomm.bench.errors import BenchError
from fusedcomm.bench.report import Row, read_json, write_table
from fusedcomm.bench.request import Request
from fusedcomm.bench.shaped_network import ShapedNetwork

_ROOT = Path(__file__).parent.parent


@pytest.fixture
def nothing_starts(monkeypatch):
    def start(*arguments):
        raise AssertionError("something was started")

    monkeypatch.setattr(harness, "Ranks", start)
    monkeypatch.setattr(harness, "ShapedNetwork", start)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": "matmul"}, "OP 'matmul' is unknown"),
        ({"link": "0"}, "a link of 0 Gbit/s carries nothing"),
        ({"link": "-1"}, "a link of -1 Gbit/s carries nothing"),
        ({"link": "fast"}, "--link 'fast' is unknown"),
        ({"world": 1}, "at least 2 ranks"),
        ({"world": 100_000}, "too many ranks for the"),
        ({"dtype_name": "fp8"}, "--dtype 'fp8' is unknown"),
        ({"shape": "3,4"}, "give three numbers above 0"),
        ({"shape": "4,4,0"}, "give three numbers above 0"),
        ({"shape": "5,4,4"}, "M=5 does not divide by 2"),
        ({"methods": "serial,dtensor"}, "--methods 'dtensor' is unknown for all_gather_matmul"),
        ({"nodes": 3, "world": 4}, "--nodes 3: must be at least 2 and divide --world 4"),
        ({"nodes": 1}, "--nodes 1: must be at least 2"),
        ({"op": "all_reduce", "dtype_name": "bf16"}, "gradients are summed in fp32"),
        ({"layout": "1x1x2"}, "--layout goes with train_step"),
        ({"op": "train_step", "layout": "2x2"}, "give pipeline x data x tensor, such as 2x2x1"),
        ({"op": "train_step", "layout": "2x2x1"}, "makes 4 ranks, --world is 2"),
        ({"rounds": 2}, "quartiles need at least 3"),
        ({"json_path": Path("/no/such/folder/x.json")}, "there is no folder /no/such/folder"),
        ({"plot_path": Path("x.jpgg")}, ".jpgg is no kind of picture"),
    ],
)
def test_mistakes_are_one_line(options, words, nothing_starts, capsys):
    given = {"op": "all_gather_matmul", "world": 2, "link": "balanced", "dtype_name": "fp32"}
    assert harness.run(Request(**(given | options))) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("fusedcomm: ")
    assert words in errors
    assert errors.count("\n") == 1


def test_a_plot_without_matplotlib_is_refused_at_once(nothing_starts, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    request = Request("mlp", 2, "loopback", "fp32", plot_path=tmp_path / "plot.png")
    assert harness.run(request) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_a_world_that_does_not_fit_into_memory_is_refused(nothing_starts, capsys, monkeypatch):
    monkeypatch.setattr("fusedcomm.bench.ranks.available_bytes", lambda: 100 * 2**20)
    assert harness.run(Request("mlp", 2, "loopback", "fp32")) == 2
    assert "0.6 GiB before any tensor, but 0.1 GiB are free" in capsys.readouterr().err


def test_without_tc_the_package_is_named(capsys, monkeypatch):
    monkeypatch.setattr(shaped_network.shutil, "which", lambda name, path: None if name == "tc" else f"/sbin/{name}")
    assert harness.run(Request("mlp", 2, "1", "fp32")) == 2
    errors = capsys.readouterr().err
    assert "`tc` is not installed; install the package iproute2" in errors
    assert "--link loopback" in errors
    assert errors.count("\n") == 1


def test_without_root_loopback_is_offered():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            ShapedNetwork(2, 1.0)
            os.write(writer, b"no error")
        except BenchError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    words = os.read(reader, 10_000).decode()
    os.close(reader)
    os.close(writer)
    if "is not installed" in words:
        pytest.skip(words)
    assert "needs root" in words
    assert "--link loopback" in words
    assert "\n" not in words


def test_a_wrong_result_is_found():
    exact = {"y": torch.randn(100, dtype=torch.float64), "dx": torch.ones(3, dtype=torch.float64)}
    plain = {name: tensor.float() for name, tensor in exact.items()}
    assert complaints(plain, exact, plain) == []
    assert complaints({"y": plain["y"] + 1e-5, "dx": plain["dx"]}, exact, plain)[0].startswith("y misses fp64 by")
    assert complaints({"y": plain["y"] * torch.nan, "dx": plain["dx"]}, exact, plain)[0].startswith("y misses fp64 by")
    assert complaints({"y": plain["y"][:99], "dx": plain["dx"]}, exact, plain) == ["y has shape [99], not [100]"]
    assert complaints({"y": plain["y"]}, exact, plain) == ["no dx"]


class _Clock:
    """Runs that take the given times, in turn."""

    def __init__(self, times_s: list[float]) -> None:
        self.times_s = times_s
        self.order: list[str] = []

    def time(self, name: str, repeats: int) -> tuple[float, int]:
        self.order.append(name)
        return self.times_s[len(self.order) % len(self.times_s)], 0


def test_rounds_are_added_until_the_quartiles_are_close():
    quiet, restless = _Clock([1.0, 1.01]), _Clock([1.0, 1.0, 2.0, 2.0, 3.0])
    assert len(harness._time_all(quiet, ["a", "b", "c"], 4)["a"].seconds) == 4
    assert len(harness._time_all(restless, ["a", "b", "c"], 4)["a"].seconds) == 12
    # After two rounds to warm up, each method comes first in its turn.
    assert quiet.order[6:15] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_ratios_are_medians_within_rounds():
    laps = {"serial": harness._Laps([2.0, 4.0, 8.0], []), "chunked": harness._Laps([1.0, 2.0, 2.0], [])}
    assert harness._speed_up(laps, "serial", "chunked") == statistics.median([2.0, 2.0, 4.0])
    assert harness._speed_up(laps, "torch", "chunked") is None


def test_rows_are_as_documented():
    promised = "op world dtype shape link_gbps method num_chunks median_s p25_s p75_s gemm_s wire_s of_ideal vs_serial"
    assert list(Row.__dataclass_fields__)[:17] == [*promised.split(), "vs_torch", "wire_bytes", "checked"]


def test_a_narrow_terminal_costs_no_digit(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    rows = [row for row in read_json(_ROOT / "bench/results/cpu-shaped.json") if row.op == "gradients"]
    write_table(rows)
    output = capsys.readouterr().out
    assert "…" not in output
    for row in rows:
        assert f"{row.p25_s * 1e3:.2f}-{row.p75_s * 1e3:.2f}" in output
