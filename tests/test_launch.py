"""Ranks start, find each other and all end: by themselves, by Ctrl-C, after a failure, and with their launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from launch_driver import raise_on_rank_1, report_sum, return_early_or_hang, wait_until_session_ended

from fusedcomm.train.launch import run_ranks
from fusedcomm.train.place import _gpu_of, find_place

_DRIVER = Path(__file__).with_name("launch_driver.py")
_ROOT = _DRIVER.parent.parent


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}


@contextmanager
def _driver(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a session of its own, as on a terminal; nothing of it outlives the block."""
    process = subprocess.Popen(
        [sys.executable, str(_DRIVER), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _read_ranks(process: subprocess.Popen[str], world: int) -> tuple[dict[int, int], int]:
    """The pids of all ranks once they work, and the port of their store."""
    assert process.stdout is not None
    pids, port = {}, 0
    for _ in range(world):
        _, rank, pid, port = process.stdout.readline().split()
        pids[int(rank)] = int(pid)
    return pids, int(port)


def _wait_until_gone(pids: dict[int, int], port: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while alive := [rank for rank, pid in pids.items() if _lives(pid)]:
        assert time.monotonic() < deadline, f"ranks {alive} still live"
        time.sleep(0.05)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the store's port is still open"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ranks_find_each_other_and_return_the_largest_code(tmp_path):
    # A file, since ranks write to the output that the fork server had when it began.
    assert run_ranks(report_sum, (tmp_path / "lines",), world=3, describe_rank=str) == 2
    assert sorted((tmp_path / "lines").read_text().splitlines()) == [f"rank {rank} of 3 sees 3" for rank in range(3)]


def test_raising_rank_is_named_first_with_its_traceback(capfd):
    assert run_ranks(raise_on_rank_1, (), world=3, describe_rank=lambda rank: f"place {rank}") == 1
    errors = capfd.readouterr().err
    lines = [line for line in errors.splitlines() if line.startswith("fusedcomm: rank")]
    assert lines[0] == "fusedcomm: rank 1 (place 1) raised ValueError: data: file x holds nothing"
    assert errors.count("Traceback") == 1
    assert "in raise_on_rank_1" in errors


def test_hanging_ranks_are_ended_after_a_failure(capfd):
    assert run_ranks(return_early_or_hang, (), world=2, describe_rank=str, grace_s=0.5) == 1
    errors = capfd.readouterr().err
    assert "fusedcomm: rank 1 (1) raised RuntimeError: rank 1 has had enough!!!" in errors
    assert "fusedcomm: ended the others: 0\n" in errors


def test_ctrl_c_ends_every_rank_even_a_deaf_one():
    with _driver("2") as process:
        pids, port = _read_ranks(process, 2)
        # A terminal sends it to every process of the group.
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGINT
        assert errors == "fusedcomm: SIGINT: all 2 ranks ended\n"
        _wait_until_gone(pids, port)


def test_ctrl_c_while_starting_ends_every_rank():
    with _driver("2") as process:
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode != 0
        wait_until_session_ended(process.pid)


def test_killed_rank_is_named_and_ends_the_others():
    with _driver("3") as process:
        pids, port = _read_ranks(process, 3)
        os.kill(pids[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        lines = [line for line in errors.splitlines() if line.startswith("fusedcomm: rank")]
        assert lines[0] == "fusedcomm: rank 1 (place 1) was ended by SIGKILL"
        assert len(lines) == 3, errors
        _wait_until_gone(pids, port)


def test_ranks_end_with_a_killed_launcher():
    with _driver("2") as process:
        pids, port = _read_ranks(process, 2)
        process.kill()
        _wait_until_gone(pids, port)


def test_torchrun_ranks_find_their_place():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(_DRIVER), "2"]
    result = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["rank 0 of 2 sees 1", "rank 1 of 2 sees 1"]


_TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "7",
}
_OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
_MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
_SRUN = {
    "SLURM_PROCID": "17",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_STEP_NODELIST": "gpu[003-004,010],login1",
    "SLURM_JOB_ID": "123456",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (_TORCHRUN, ("torchrun", 5, 8, 1, 4, "a", 7)),
        (_OPEN_MPI, ("Open MPI", 3, 4, 3, 4, "127.0.0.1", 29500)),
        (_MPICH, ("MPICH", 1, 2, 1, 2, "127.0.0.1", 29500)),
        (_SRUN, ("srun", 17, 20, 1, 4, "gpu003", 20000 + 123456 % 20000)),
        ({**_SRUN, "MASTER_ADDR": "b", "MASTER_PORT": "9"}, ("srun", 17, 20, 1, 4, "b", 9)),
        ({**_SRUN, "SLURM_STEP_NODELIST": "rack[2-3]n[07-08],x"}, ("srun", 17, 20, 1, 4, "rack2n07", 23456)),
        # torchrun started by srun: the inner launcher counts.
        ({**_SRUN, **_TORCHRUN}, ("torchrun", 5, 8, 1, 4, "a", 7)),
    ],
)
def test_find_place_understands_launchers(environ, expected):
    place = find_place(environ)
    assert place is not None
    fields = (place.launcher, place.rank, place.world, place.local_rank, place.local_world)
    assert (*fields, place.master_addr, place.master_port) == expected
    assert find_place(place.environment()).rank == place.rank


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, {**_SRUN, "SLURM_STEP_NUM_TASKS": "1"}]
)
def test_find_place_is_none_without_a_launcher(environ):
    assert find_place(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "torchrun has set RANK but not WORLD_SIZE, LOCAL_RANK"),
        ({**_OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8"}, "MASTER_ADDR is not set"),
    ],
)
def test_find_place_rejects_what_is_incomplete(environ, message):
    with pytest.raises(ValueError, match=message):
        find_place(environ)


def test_gpu_of_a_rank(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _gpu_of(3, 4) == 3
    with pytest.raises(ValueError, match="local rank 4 has no GPU, this machine shows 4"):
        _gpu_of(4, 4)
    # Slurm shows each rank one GPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert _gpu_of(3, 1) == 0
