"""A run one of whose ranks is killed: all others end in time, and say which, in whatever mode gradients travel."""

from __future__ import annotations

import contextlib
import io
import os
import time

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from test_overlap_forward import changed

from fusedcomm.comm.channel import channel_of
from fusedcomm.comm.lost import naming_lost_ranks
from fusedcomm.errors import PeerError
from fusedcomm.train.config import parse_config
from fusedcomm.train.loop import train
from fusedcomm.train.trainer import Trainer

TIMEOUT_S = 10.0
MODES = {
    "replicate": {},
    "backward+forward": {"overlap": "backward+forward"},
    "int8": {"compression": "int8"},
    "hierarchical": {"algorithm": "hierarchical"},
    "tree": {"algorithm": "tree"},
    "zero1": {"mode": "zero1"},
    "fsdp": {"mode": "fsdp", "bucket_mb": None},
    "delayed": {"sync": "delayed"},
    "local_sgd": {"sync": "local_sgd", "sync_every": 3},
    "diloco": {"sync": "diloco", "sync_every": 3},
    "overlapped diloco": {"sync": "diloco", "sync_every": 1, "outer_overlap": True},
}
# Where the killed rank is in its third step. Replicas that train apart exchange nothing but numbers in the first.
MOMENTS = [(name, "gradients") for name in MODES] + [(name, "update") for name in MODES if "sync_every" in MODES[name]]


def _train_until_killed(rank: int, world: int, raw: dict, moment: str) -> None:
    if rank == 1:
        unharmed = getattr(Trainer, moment)

        def killed(self: Trainer, step: int, *args: object) -> object:
            if step == 2:
                os._exit(9)
            return unharmed(self, step, *args)

        setattr(Trainer, moment, killed)
    with contextlib.redirect_stdout(io.StringIO()):
        train(parse_config(raw), resume=None, device=torch.device("cpu"))


@pytest.mark.parametrize(("mode", "moment"), MOMENTS)
def test_a_killed_rank_ends_the_others_with_its_name(tmp_path, mode, moment):
    raw = changed("train.timeout_s", TIMEOUT_S, changed("train.output_dir", str(tmp_path)))
    raw = changed("parallel_config.data_parallel.size", 3, changed("train.global_batch", 6, raw))
    raw["parallel_config"]["data_parallel"] |= MODES[mode]
    first, _, last = run_ranks(
        3, _train_until_killed, raw, moment, fresh_timeout_s=30, return_exceptions=True, timeout_s=60
    )
    for error in (first, last):
        assert isinstance(error, PeerError), error
        assert error.rank == 1, error
        assert "rank 1 of the group" in str(error)


@naming_lost_ranks("sum")
def _sum_with(rank: int, world: int, other: str) -> None:
    dist.barrier()
    if rank == 1:
        if other == "late":
            time.sleep(5)
        os._exit(9)
    dist.all_reduce(torch.ones(8))


def test_a_rank_that_is_late_is_not_taken_for_one_that_is_gone():
    first, _, last = run_ranks(3, _sum_with, "killed", fresh_timeout_s=2, return_exceptions=True)
    assert [error.rank for error in (first, last)] == [1, 1]
    # On time-out whoever is first closes its connections; that is no rank's end, and no rank is named for it.
    for error in run_ranks(3, _sum_with, "late", fresh_timeout_s=2, return_exceptions=True)[::2]:
        assert "rank 1" not in str(error)


@naming_lost_ranks("sum")
def _wait_for_one_that_lives(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 1:
        os._exit(9)
    if rank == 0:
        time.sleep(5)
        return
    group = dist.group.WORLD
    channel_of(group).wait_for(group.recv([torch.empty(1)], 0, 7), "sum", 0, 0, "did not deliver its part")


def test_who_waited_for_a_rank_that_is_gone_is_not_taken_for_it():
    error = run_ranks(3, _wait_for_one_that_lives, fresh_timeout_s=2, return_exceptions=True)[2]
    assert isinstance(error, PeerError)
    assert error.rank == 1
    # What was noticed first is said as well.
    assert "rank 1 of the group is gone" in str(error)
    assert "rank 0 of the group did not deliver its part" in str(error)
