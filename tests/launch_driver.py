"""Tasks for ranks; and, run as a program, a launcher whose ranks print their pids and work until somebody ends them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fusedcomm.train.launch import run_ranks
from fusedcomm.train.place import find_place, init_distributed, leave_distributed


def report_sum(path: Path) -> int:
    """A sum over all ranks that is right, appended to the file, and this rank's number as its exit code."""
    init_distributed(60.0)
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.ones(1) * rank
    dist.all_reduce(total)
    # One write, so that lines of several ranks never mix.
    with path.open("a") as file:
        file.write(f"rank {rank} of {world} sees {total.item():.0f}\n")
    return rank


def raise_on_rank_1() -> None:
    init_distributed(60.0)
    if dist.get_rank() == 1:
        raise ValueError("data: file x holds\nnothing")
    dist.barrier()


def return_early_or_hang() -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 has had enough" + "!" * 200_000)
    time.sleep(600)


def work_until_ended() -> None:
    """Collectives for ever, on rank 0 without an ear for SIGTERM."""
    init_distributed(60.0)
    if dist.get_rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    os.write(1, f"pid {dist.get_rank()} {os.getpid()} {os.environ['MASTER_PORT']}\n".encode())
    while True:
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.01)


def wait_until_session_ended(leader: int, seconds: float = 10.0) -> None:
    """Return when no process of the leader's session and group lives; the fork server ends a moment after the rest."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline, f"processes of session {leader} still live"
        time.sleep(0.05)


def main() -> int:
    world = int(sys.argv[1])
    place = find_place(os.environ)
    if place is None:
        return run_ranks(work_until_ended, (), world=world, describe_rank=lambda rank: f"place {rank}", grace_s=3.0)
    assert place.world == world
    os.environ.update(place.environment())
    report_sum(Path("/dev/stdout"))
    leave_distributed()
    return 0


if __name__ == "__main__":
    sys.exit(main())
