"""Process groups made by their members alone."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    _get_default_group,
    _new_process_group_helper,
    _world,
)

# By the default group, whose store forgets nothing as long as it lives: how many groups of a name there were.
_made: weakref.WeakKeyDictionary[ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def new_subgroup(parent: ProcessGroup, ranks: Sequence[int], name: str, timeout: timedelta) -> ProcessGroup:
    """A group of `ranks` (of the default group; some of, or all, `parent`'s), with the parent's backend.

    Its members call it, and as often as the other ranks of `parent`, each for its own subgroup of that `name`.
    `dist.new_group(use_local_synchronization=True)` does the same, but names the group after the number of groups
    that the process holds, and hangs for ever where members hold different numbers (torch 2.13).
    """
    default = _get_default_group()
    mine = f"{parent.group_name}/{name}/{'_'.join(map(str, ranks))}"
    made = _made.setdefault(default, Counter())
    made[mine] += 1
    group, _ = _new_process_group_helper(
        len(ranks),
        ranks.index(default.rank()),
        list(ranks),
        Backend(dist.get_backend(parent)),
        _world.pg_map[default][1],
        GroupName(f"{mine}/{made[mine]}"),
        timeout=timeout,
        group_desc=name,
    )
    assert isinstance(group, ProcessGroup), "this rank is a member"
    _world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group
