"""The benchmark between GPUs, on CPU ranks over gloo."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import run_ranks

from fusedcomm.bench import gpu_ranks
from fusedcomm.bench.gpu_ranks import RankRow, markdown, measure
from fusedcomm.bench.gpu_shapes import Shape

METHODS = ("torch", "serial", "chunked", "fused")


def measure_here(rank: int, world: int, op: str) -> list[RankRow]:
    clock = itertools.count()
    shape = Shape(op, "toy", 32, 24, 40, world)
    return measure(
        *(shape, torch.device("cpu"), torch.float32, "a CPU"),
        methods=METHODS,
        deadline_s=3.0 + rank,
        clock=lambda: float(next(clock)),
    )


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_ranks_check_and_time_every_method_alike(op):
    rows, others = run_ranks(2, measure_here, op)
    assert rows == others
    assert [row.method for row in rows] == list(METHODS)
    *able, fused = rows
    assert all(row.checked and row.median_us > 0 and not row.reason for row in able)
    assert next(row.vs_serial for row in able if row.method == "serial") == 1.0
    # It has no transport in these processes, which do not interpret kernels.
    assert "method='fused'" in fused.reason
    table = markdown(rows)
    assert f"| {op} | toy | 32, 24, 40 | fused | not run: {fused.reason} | - | - |" in table
    assert "WRONG" not in table


def measure_wrong(rank: int, world: int) -> list[RankRow]:
    def run(self: gpu_ranks.RankCase, method: str) -> torch.Tensor:
        # One rank's result is wrong: all must say so.
        return self.gemm() + rank

    gpu_ranks.RankCase.run, original = run, gpu_ranks.RankCase.run
    try:
        shape = Shape("all_gather_matmul", "toy", 32, 24, 40, world)
        return measure(*(shape, torch.device("cpu"), torch.float32, "a CPU"), methods=("serial",), deadline_s=0.0)
    finally:
        gpu_ranks.RankCase.run = original


def test_what_is_wrong_on_one_rank_is_wrong_on_all():
    for rows in run_ranks(2, measure_wrong):
        assert [(row.checked, row.reason) for row in rows] == [(False, "")]
        assert "WRONG" in markdown(rows)
