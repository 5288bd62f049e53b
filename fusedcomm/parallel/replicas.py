"""Data parallelism that speaks seldom: replicas train on their own for some steps, and then agree on their weights.

Between two syncs every replica steps its own AdamW by its own gradients, clipped by its own norm; its moments stay its
own for good. A sync makes the weights those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedcomm.comm.collective import Collective, Pending
from fusedcomm.comm.compress import packed_layout
from fusedcomm.comm.record import span


@dataclass(frozen=True)
class Outer:
    """DiLoCo's optimizer across replicas: SGD with Nesterov momentum on what the replicas have moved by.

    `overlap`: the sum of a round travels during the next one.
    """

    lr: float = 0.7
    momentum: float = 0.9
    overlap: bool = False


class Replicas:
    """Makes the masters of all replicas equal every `sync_every` steps: `after_step` is called by all ranks.

    Without `outer` (local SGD; Stich 2019, arXiv 1805.09767) the new weights are the replicas' mean. With it (DiLoCo,
    arXiv 2311.08105), the mean of what they have moved by since the last sync is a gradient g for the weights x of that
    sync:

        m = momentum m + g;  x = x - lr (g + momentum m)

    With `outer.overlap` the sum of round k travels during round k + 1, and is applied to x at that one's end. Meanwhile
    a replica goes on from x and its own movement in the rounds that x does not have yet. In the last step, with nothing
    left to hide behind, all of it is applied at once.

    Per rank and sync one fp32 copy of the weights is summed by `collective`. What is kept: x and m, with overlap also
    the replica's weights at the start of the round, and the sum under way; each fp32, as large as the weights.

    Args:
        masters: fp32 weights by name, changed in place; equal on all replicas at the start.
        world: the number of replicas.
        after_change: called when the masters were changed.
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        collective: Collective,
        *,
        world: int,
        sync_every: int,
        outer: Outer | None,
        after_change: Callable[[], None],
    ) -> None:
        self._masters, self._collective, self._world = masters, collective, world
        self._sync_every, self._outer, self._after_change = sync_every, outer, after_change
        self._layout = packed_layout(masters, next(iter(masters.values())).device)
        self._moved = torch.zeros(self._layout.num_elements, dtype=torch.float32, device=self._layout.device)
        if outer is not None:
            self._anchor, self._momentum = torch.empty_like(self._moved), torch.zeros_like(self._moved)
            if outer.overlap:
                self._start = torch.empty_like(self._moved)
        self._pending: Pending | None = None
        # Whether a sum over the replicas waits to be applied; only with overlap also between two steps.
        self.holds_sum = False
        self.restart()

    @property
    def overlaps(self) -> bool:
        """Whether the replicas' weights differ also right after a sync."""
        return self._outer is not None and self._outer.overlap

    @torch.no_grad()
    def restart(self, *, holds_sum: bool = False) -> None:
        """Go on from what has been read into the masters, as they are within `shared_weights`, and into both states.

        `holds_sum` is as it was when they were saved.
        """
        self.holds_sum = holds_sum
        if self._outer is not None:
            self._pack(self._anchor)
        if holds_sum:
            self._unpack(self._start)
            self._after_change()
        elif self.overlaps:
            self._pack(self._start)

    @torch.no_grad()
    def after_step(self, done: int, *, is_last: bool) -> None:
        """Sync if it is time; `done` steps have been taken."""
        if done % self._sync_every:
            return
        if self._outer is None:
            self._average()
        elif self._outer.overlap:
            self._sync_later(self._outer)
            if is_last:
                self._apply(self._outer)
                self._start.copy_(self._anchor)
                self._unpack(self._anchor)
        else:
            self._pack(self._moved)
            torch.sub(self._anchor, self._moved, out=self._moved)
            self._begin()
            self._apply(self._outer)
            self._unpack(self._anchor)
        self._after_change()

    @contextmanager
    @torch.no_grad()
    def shared_weights(self) -> Iterator[None]:
        """Within the block, right after a sync, the masters are x: those that all replicas agree on."""
        if not self.holds_sum:
            yield
            return
        self._unpack(self._anchor)
        self._after_change()
        try:
            yield
        finally:
            self._unpack(self._start)
            self._after_change()

    def shared_state(self) -> dict[str, Tensor]:
        """Live tensors by `<name>.<what>`, the same on all replicas: `momentum`, and with overlap the `sum` under way.

        Waits for that. The weights x are the masters within `shared_weights`.
        """
        if self._outer is None:
            return {}
        self._land()
        buffers = {"momentum": self._momentum} | ({"sum": self._moved} if self._outer.overlap else {})
        return self._by_name(buffers)

    def own_state(self) -> dict[str, Tensor]:
        """The same of what is this replica's alone: with overlap, its weights at the `start` of the round."""
        return self._by_name({"start": self._start}) if self.overlaps else {}

    def _by_name(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            f"{name}.{what}": view
            for what, buffer in buffers.items()
            for name, view in self._layout.views(buffer).items()
        }

    def _average(self) -> None:
        self._pack(self._moved)
        self._begin()
        self._land()
        self._moved /= self._world
        self._unpack(self._moved)
        self.holds_sum = False

    def _sync_later(self, outer: Outer) -> None:
        moved = torch.empty_like(self._moved)
        self._pack(moved)
        torch.sub(self._start, moved, out=moved)
        if self.holds_sum:
            self._apply(outer)
        torch.sub(self._anchor, moved, out=self._start)
        self._unpack(self._start)
        self._moved = moved
        self._begin()

    def _begin(self) -> None:
        self._pending = self._collective.start(self._moved, 0)
        self.holds_sum = True

    def _land(self) -> None:
        if self._pending is not None:
            with span("wait", "replicas", self._moved.nbytes):
                self._pending.wait()
            self._pending = None

    def _apply(self, outer: Outer) -> None:
        """One step of the outer optimizer."""
        self._land()
        mean = self._moved.div_(self._world)
        self._momentum.mul_(outer.momentum).add_(mean)
        self._anchor.sub_(mean.add_(self._momentum, alpha=outer.momentum), alpha=outer.lr)
        self.holds_sum = False

    def _pack(self, flat: Tensor) -> None:
        for name, view in self._layout.views(flat).items():
            view.copy_(self._masters[name])

    def _unpack(self, flat: Tensor) -> None:
        for name, view in self._layout.views(flat).items():
            self._masters[name].copy_(view)


class Delayed:
    """Gradients that are applied one step late: their sum travels during the whole next step.

    The staleness rule: step t applies the sum of the gradients of step t - 1, which were taken at the weights before
    step t - 1 was applied; always one step, on every rank. The first step applies nothing.

    Two more fp32 copies of the gradients are kept.
    """

    def __init__(self, flat: Tensor, collective: Collective) -> None:
        self._flat, self._collective = flat, collective
        self._under_way, self._spare = torch.zeros_like(flat), torch.empty_like(flat)
        self._pending: Pending | None = None
        self.has_sum = False

    @torch.no_grad()
    def exchange(self) -> bool:
        """Send this step's gradients, and put the sum of the last step's in their place; False if there is none."""
        self.land()
        had_sum, self.has_sum = self.has_sum, True
        self._spare.copy_(self._flat)
        self._flat.copy_(self._under_way)
        self._under_way, self._spare = self._spare, self._under_way
        self._pending = self._collective.start(self._under_way, 0)
        return had_sum

    def land(self) -> Tensor:
        """The sum that the next step applies, laid out as the gradients, once it is there."""
        if self._pending is not None:
            with span("wait", "delayed gradients", self._flat.nbytes):
                self._pending.wait()
            self._pending = None
        return self._under_way
