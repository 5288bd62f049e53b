"""The command `fusedcomm kernels`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fusedcomm.cli import app
from fusedcomm.kernels import report
from fusedcomm.kernels.row import Row

FINE = Row("gemm", "128x128x64 w8 s3", "sm_80", "bf16", 168, 0, 65536, 64, 36, fits=True, reason="")
LACKING = Row("gemm", "-", "sm_80", "fp8e4nv", 0, 0, 0, 0, 0, fits=False, reason="fp8e4nv is not supported on sm_80")


def test_kernels_compiles_everything_for_a_target(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    # It has no say in the processes that compile.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = CliRunner().invoke(app, ["kernels", "--target", "gfx942", "--json", str(tmp_path / "rows.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert list(rows[0]) == [
        *("kernel", "config", "target", "dtype", "registers", "spill_bytes", "shared_bytes"),
        *("tensor_core_ops", "async_loads", "fits", "reason"),
    ]
    assert {row["target"] for row in rows} == {"gfx942"}
    assert all(row["fits"] or row["dtype"] == "fp8e4nv" for row in rows)
    others = ("reduce", "await_rows", "paced_copy")
    products = [row for row in rows if row["dtype"] != "fp8e4nv" and row["kernel"] not in others]
    assert all(row["tensor_core_ops"] > 0 for row in products)
    assert f"{len(rows) - 6} of {len(rows)} run, 0 should and do not" in result.output
    assert "fp8e4nv is not supported" in result.output


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([FINE, LACKING], 0),
        ([FINE, replace(FINE, fits=False, spill_bytes=8, reason="gemm spills 8 bytes a thread")], 1),
    ],
)
def test_kernels_fails_where_something_should_fit_and_does_not(rows, code, monkeypatch):
    monkeypatch.setattr(report, "compile_all", lambda target: iter(rows))
    assert CliRunner().invoke(app, ["kernels", "--target", "sm_80"]).exit_code == code


def test_an_unknown_target_is_refused_in_one_line():
    result = CliRunner().invoke(app, ["kernels", "--target", "sm_70"])
    assert result.exit_code == 2
    assert result.stderr == "kernels: target 'sm_70' is unknown; use one of sm_80, sm_90, sm_100, gfx942\n"


def test_a_file_that_cannot_be_written_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "compile_all", lambda target: iter([FINE]))
    result = CliRunner().invoke(app, ["kernels", "--target", "sm_80", "--json", str(tmp_path)])
    assert result.exit_code == 2
    assert "cannot be written (Is a directory)" in result.stderr
