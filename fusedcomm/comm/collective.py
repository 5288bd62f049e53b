"""Sums of flat buffers over the ranks of a group: what the gradient buckets ask for, and torch's way to do it."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


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
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        return work
