"""Sums of flat buffers over the ranks of a group: what the gradient buckets ask for, and torch's way to do it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout

from fusedcomm.comm.channel import calm_gloo, channel_of, has_gloo
from fusedcomm.comm.subgroup import new_subgroup


class Pending(Protocol):
    """A transfer that has been started."""

    def wait(self) -> object:
        """Return when it is over (on a GPU: when the current stream will find it so)."""


class Collective(Protocol):
    """A way to sum over a group. Every rank of the group starts the same ones in the same order, from any thread."""

    def start(self, flat: Tensor, offset: int) -> Pending:
        """Begin to replace `flat` [n], contiguous, by its sum over the group; does not block.

        `offset` is the element of the whole buffer at which this piece begins: the same part of the gradients has the
        same `offset` and length in every step, unless `GradientBuckets` plans anew. Buffers may be touched again after
        `wait()`, which is called once, in the order of the starts, and may do the rest of the work.
        """
        ...


class AllReduce:
    """torch's `all_reduce`."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def start(self, flat: Tensor, offset: int) -> Pending:
        # Past the wrapper of `dist.all_reduce`, whose Python runs beside a GEMM that has the cache to itself: 0.3 ms.
        return self._group.allreduce([flat])


# By group, those made so far in their order, each with who uses it.
_bulk_groups: weakref.WeakKeyDictionary[ProcessGroup, list[tuple[ProcessGroup, weakref.ref[object]]]] = (
    weakref.WeakKeyDictionary()
)


def bulk_group(group: ProcessGroup, device: torch.device, user: object) -> ProcessGroup:
    """A further group of the same ranks, whose transfers a thread may start, for as long as `user` lives.

    Collectives of one group meet in the order in which they are started. So those that a queue starts must share a
    group neither with those that computing starts in between nor with another queue's. All ranks call it together, and
    get one whose user is gone on every rank, or else a new one.
    """
    made = _bulk_groups.setdefault(group, [])
    free = {number for number, (_, last_user) in enumerate(made) if last_user() is None}
    for theirs in channel_of(group).share_all("bulk_group", " ".join(map(str, free))):
        free &= set(map(int, theirs.split()))
    number, timeout = min(free, default=len(made)), group._get_backend(device).options._timeout
    if number < len(made):
        found, _ = made.pop(number)
        _set_pg_timeout(timeout, found)
    else:
        found = new_subgroup(group, dist.get_process_group_ranks(group), "bulk", timeout)
        if sys.platform == "linux" and has_gloo(found):
            calm_gloo()
    made.insert(number, (found, weakref.ref(user)))
    return found


def limit_waits(groups: Iterable[ProcessGroup], timeout_s: float) -> None:
    """From now on each wait on these groups, and on their bulk groups, ends after `timeout_s`."""
    for group in groups:
        for limited in (group, *(bulk for bulk, _ in _bulk_groups.get(group, ()))):
            _set_pg_timeout(timedelta(seconds=timeout_s), limited)
