"""Run as a program: ranks that print their pids and then do what the first argument says, for tests that kill some."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from fusedcomm.train.launch import run_ranks
from fusedcomm.train.place import find_place, init_distributed, leave_distributed


def report_sum(_what: str) -> int:
    """A sum over all ranks that is right, and this rank's number as its exit code."""
    init_distributed(60.0)
    total = torch.ones(1) * dist.get_rank()
    dist.all_reduce(total)
    assert total.item() == sum(range(dist.get_world_size()))
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} sees {total.item():.0f}", flush=True)
    return dist.get_rank()


def work_until_ended(what: str) -> None:
    """Collectives for ever; with `stubborn`, deaf to requests to end."""
    init_distributed(60.0)
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    # One write, so that lines of several ranks never mix.
    os.write(1, f"pid {dist.get_rank()} {os.getpid()} {os.environ['MASTER_PORT']}\n".encode())
    while True:
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.01)


def raise_on_rank_1(_what: str) -> None:
    init_distributed(60.0)
    if dist.get_rank() == 1:
        raise ValueError("data: file x holds\nnothing")
    dist.barrier()


def main() -> int:
    what, world = sys.argv[1], int(sys.argv[2])
    if what == "placed":
        place = find_place(os.environ)
        assert place is not None
        assert place.world == world
        os.environ.update(place.environment())
        report_sum(what)
        leave_distributed()
        return 0
    task = {"sum": report_sum, "raise": raise_on_rank_1}.get(what, work_until_ended)
    return run_ranks(task, (what,), world=world, describe_rank=lambda rank: f"place {rank}", grace_s=3.0)


if __name__ == "__main__":
    sys.exit(main())
