"""Groups that their members make alone."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from helpers import run_ranks

from fusedcomm.comm.collective import bulk_group
from fusedcomm.comm.subgroup import new_subgroup


def _sums(rank: int, world: int) -> list[float]:
    # Rank 0 holds one group more than the others, as after any new_group() that leaves some ranks out.
    dist.new_group([0])
    found, names = [], []
    for closes in (False, True, False):
        pair = [0, 1] if rank < 2 else [2, 3]
        group = new_subgroup(dist.group.WORLD, pair, "pair", timedelta(seconds=30))
        value = torch.tensor(float(rank))
        dist.all_reduce(value, group=group)
        assert dist.get_process_group_ranks(group) == pair
        found.append(value.item())
        names.append(group.group_name)
        if closes:
            dist.destroy_process_group(group)
    # Who comes first would find under an old name where its peers were to be met then.
    assert len(set(names)) == len(names), names
    return found


def test_members_that_hold_different_numbers_of_groups_find_each_other():
    assert run_ranks(4, _sums) == [[1.0] * 3, [1.0] * 3, [5.0] * 3, [5.0] * 3]


class User:
    pass


def _groups_of_users(rank: int, world: int) -> list[bool]:
    cpu = torch.device("cpu")
    users = {name: User() for name in "abcd"}
    made = {name: bulk_group(dist.group.WORLD, cpu, users[name]) for name in "ab"}
    # The first one is still used on one of the ranks.
    del users["b"]
    if rank == 0:
        del users["a"]
    made |= {name: bulk_group(dist.group.WORLD, cpu, users[name]) for name in "cd"}
    return [made["a"] is made["b"], made["c"] is made["b"], made["d"] in (made["a"], made["b"])]


def test_a_bulk_group_has_one_user_at_a_time_on_all_ranks():
    assert run_ranks(2, _groups_of_users, fresh_timeout_s=20) == [[False, True, False]] * 2
