"""What the ranks of a run would find: by facts that are made up, and on real ranks."""

from __future__ import annotations

import os

import pytest
import torch
from helpers import run_ranks

from fusedcomm.train.doctor import compare, examine

RANK = {
    "python": "3.12.1",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "fusedcomm": "0.1.0",
    "nccl": "2.27.3",
    "device": "NVIDIA H200",
    "host": "node1",
    "cores": 16,
    "threads": 8,
    "environment": {},
}
CPU = RANK | {"device": "cpu", "nccl": "none"}


def found(*facts: dict) -> list[str]:
    """All but the first line, which says what is alike."""
    first, *others = compare(facts)
    assert first.level == "ok"
    return [f"{finding.level}: {finding.text}" for finding in others]


def test_ranks_that_are_alike_are_fine():
    (line,) = compare([RANK, RANK | {"host": "node2"}])
    assert line.text.startswith("2 ranks, hosts: node1, node2; all have python 3.12.1, torch 2.13.0, triton 3.7.1")


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            [RANK, RANK, RANK | {"torch": "2.12.0"}, RANK],
            "wrong: torch differs: 2.13.0 on rank 0-1, 3; 2.12.0 on rank 2; make them alike",
        ),
        (
            [RANK, RANK | {"device": "NVIDIA A100"}],
            "slow: device differs: NVIDIA H200 on rank 0; NVIDIA A100 on rank 1; propose_sizes gives them shares by "
            "speed",
        ),
        (
            [RANK, RANK, RANK | {"host": "node2"}],
            "note: hosts hold different numbers of ranks (2 on node1, 1 on node2): sums by levels cannot run",
        ),
        (
            [CPU, CPU, CPU],
            "slow: node1: 3 ranks compute with 24 threads on 16 cores; start fewer ranks, or set OMP_NUM_THREADS lower",
        ),
        (
            [RANK | {"environment": {"NCCL_ALGO": "Ring"}}, RANK],
            "note: NCCL_ALGO differs: Ring on rank 0; not set on rank 1",
        ),
    ],
)
def test_what_differs_is_said_with_its_ranks(facts, line):
    assert found(*facts) == [line]


def test_a_rank_without_gpu_among_others_is_wrong():
    lines = found(RANK, RANK | {"device": "cpu"})
    assert lines == ["wrong: device differs: NVIDIA H200 on rank 0; cpu on rank 1; make them alike"]


def _examine(rank: int, world: int) -> tuple[int, str]:
    from contextlib import redirect_stdout
    from io import StringIO

    if rank == 1:
        os.environ["NCCL_ALGO"] = "Tree"
    out = StringIO()
    with redirect_stdout(out):
        code = examine(timeout_s=30.0, device=torch.device("cpu"))
    os.environ.pop("NCCL_ALGO", None)
    return code, out.getvalue()


def test_real_ranks_are_examined_and_the_first_says_so():
    (code, text), *others = run_ranks(3, _examine)
    assert [code for code, _ in others] == [code, code] == [0, 0]
    assert not any(said for _, said in others)
    lines = text.splitlines()
    assert lines[0].startswith("ok     3 ranks, hosts: ")
    assert any(line == "note   NCCL_ALGO differs: not set on rank 0, 2; Tree on rank 1" for line in lines)
    assert any(line.startswith("ok     in a node, each rank sends ") for line in lines)
    assert lines[-1].startswith("note   method fused cannot run: ")
