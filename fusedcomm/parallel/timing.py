"""What ranks know together of a step's course, and the order and pieces in which its transfers leave."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fusedcomm.comm.plan import PIECES_UNDER_WAY, SHORT_S, Forecast, Pace, Piece, lateness, pace_of, plan
from fusedcomm.parallel.buckets import Bucket, Slot
from fusedcomm.parallel.shares import param_bytes

# While nothing has been measured.
_FIRST_BUCKET_MB = 4.0
# The ranks agree on rates and times after these steps, of which the first is slower than all others, and every so many.
_FIRST_PLANS = (1, 4)
_STEPS_BETWEEN_PLANS = 256
# Of what computing a gradient takes, it must shorten the step by so much for being computed out of turn.
_LEAST_GAIN = 0.25
# What is tried for that, together: each try plans the step's transfers anew.
_MAX_GROUPS = 16


@dataclass(frozen=True)
class Timing:
    """When a step's gradients are ready and first used, by slot, and what the link carries; the same on all ranks.

    Seconds since the first gradient was ready, and since the first parameter was used; `compute_s` is what those take
    that may be computed later.
    """

    ready_s: dict[Slot, float]
    compute_s: dict[Slot, float]
    forward_s: dict[Slot, float]
    bytes_per_s: float

    @property
    def gap_s(self) -> float:
        """The median time between two moments of readiness, of those that are no short gaps."""
        moments = sorted(self.ready_s.values())
        return statistics.median([b - a for a, b in pairwise(moments) if b - a >= SHORT_S] or [0.0])

    def with_last(self, last: Sequence[Slot]) -> Timing:
        """The same step if these gradients were computed after all others, in the order in which they are needed."""
        ready_s = {
            slot: moment - sum(self.compute_s[other] for other in last if self.ready_s[other] <= moment)
            for slot, moment in self.ready_s.items()
        }
        end_s = max(self.ready_s.values(), default=0.0)
        for slot in sorted(last, key=self.forward_s.__getitem__, reverse=True):
            ready_s[slot] = end_s
            end_s -= self.compute_s[slot]
        return replace(self, ready_s=ready_s)

    def first_use(self, bucket: Bucket) -> float:
        return min(self.forward_s[slot] for slot in bucket.slots)

    def forecasts(self, buckets: Sequence[Bucket], *, in_forward: bool) -> list[Forecast]:
        """What to expect of each bucket. Its sum is needed at the end of backward, or `in_forward` when it is used."""
        end_s = max(self.ready_s.values(), default=0.0)
        found = []
        for bucket in buckets:
            used_s = self.first_use(bucket) if in_forward else 0.0
            ready_s = max(self.ready_s[slot] for slot in bucket.slots)
            found.append(Forecast(ready_s, end_s + used_s, bucket.flat.nbytes))
        return found


class Planner:
    """The plans of one rank's steps; the same on all ranks of the group, which hear of nothing but what they agreed on.

    `bucket_mb` and `window_mb` as `GradientBuckets` has them.
    """

    def __init__(self, bucket_mb: float | None, window_mb: float | None) -> None:
        self._bucket_mb, self._window_mb = bucket_mb, window_mb
        self._timing: Timing | None = None
        # The same with what is computed out of turn.
        self._expected: Timing | None = None
        # The fastest that the link was seen: the first step's sums, which travel alone, show more of it than others.
        self._best_bytes_per_s = 0.0
        self._agreed_after = 0
        # Those made since the ranks agreed: planning takes time in which nothing is computed.
        self._plans: dict[tuple[Forecast, ...], list[Piece]] = {}

    @property
    def adapts_buckets(self) -> bool:
        return self._bucket_mb is None

    def is_due(self, num_steps: int) -> bool:
        """Whether it is time to `agree`, `num_steps` having been taken."""
        is_time = num_steps in _FIRST_PLANS or (num_steps > 0 and num_steps % _STEPS_BETWEEN_PLANS == 0)
        return is_time and self._agreed_after < num_steps

    def agree(self, num_steps: int, slots: Sequence[Slot], bytes_per_s: float, group: ProcessGroup) -> None:
        """Exchange what this rank has seen of the last step."""
        self._agreed_after = num_steps
        self._timing = self._expected = _agree_on_timing(slots, bytes_per_s, group)
        self._best_bytes_per_s = max(self._best_bytes_per_s, self._timing.bytes_per_s)
        self._plans.clear()

    def last_gradients(self, buckets: Sequence[Bucket]) -> list[Slot]:
        """Whose gradients to compute after all others, while the sums travel that the next forward needs first.

        One at a time those that shorten the waits predicted for that forward the most, as long as any does: neighbours
        in the order of use together, where there are many.
        """
        last: list[Slot] = []
        if self._timing is None:
            return last
        movable = [slot for slot, compute_s in self._timing.compute_s.items() if compute_s > 0.0]
        groups = _neighbours(sorted(movable, key=self._timing.forward_s.__getitem__))
        late_s = self._lateness(buckets, self._timing)
        while groups:
            timings = [self._timing.with_last([*last, *group]) for group in groups]
            lateness = [self._lateness(buckets, timing) for timing in timings]
            best = lateness.index(min(lateness))
            gain_s = late_s - lateness[best]
            if gain_s < _LEAST_GAIN * sum(self._timing.compute_s[slot] for slot in groups[best]):
                break
            late_s, self._expected = lateness[best], timings[best]
            last += groups.pop(best)
        # Those that were only tried.
        self._plans.clear()
        return last

    def _lateness(self, buckets: Sequence[Bucket], timing: Timing) -> float:
        forecasts = timing.forecasts(buckets, in_forward=True)
        return lateness(forecasts, self._plan(forecasts), bytes_per_s=self._best_bytes_per_s)

    def pace(self) -> Pace:
        piece_bytes = int((self._bucket_mb or _FIRST_BUCKET_MB) * 2**20)
        pace = Pace(piece_bytes, PIECES_UNDER_WAY * piece_bytes)
        if self._bucket_mb is None and self._timing is not None:
            pace = pace_of(self._timing.bytes_per_s, self._timing.gap_s)
        if self._window_mb is not None:
            pace = Pace(pace.piece_bytes, int(self._window_mb * 2**20))
        return pace

    def sums(self, buckets: Sequence[Bucket], *, counted: bool, in_forward: bool) -> list[Piece]:
        """The order of a step's sums, which are needed at the end of backward, or `in_forward` when they are used."""
        # A step that counts launches everything at its end, in the order of the buffer.
        if self._expected is None or not counted:
            return self._plan([Forecast(0.0, bucket.index, bucket.flat.nbytes) for bucket in buckets])
        return self._plan(self._expected.forecasts(buckets, in_forward=in_forward))

    def gathers(self, buckets: Sequence[Bucket]) -> list[Piece]:
        """The order in which parameters, all ready, are gathered for a forward."""
        forecasts = []
        for bucket in buckets:
            # In the first step all that is known is that the buffer is in the reverse order of use.
            used_s = -float(bucket.index) if self._timing is None else self._timing.first_use(bucket)
            forecasts.append(Forecast(0.0, used_s, param_bytes(bucket)))
        return self._plan(forecasts)

    def _plan(self, forecasts: Sequence[Forecast]) -> list[Piece]:
        key = tuple(forecasts)
        if key not in self._plans:
            rate = 1.0 if self._timing is None else self._timing.bytes_per_s
            self._plans[key] = plan(forecasts, bytes_per_s=rate, piece_bytes=self.pace().piece_bytes)
        return self._plans[key]


def _agree_on_timing(slots: Sequence[Slot], bytes_per_s: float, group: ProcessGroup) -> Timing:
    """The slowest rank's times and the fastest rank's rate: one that waited for a late peer has seen less of the link.

    What is not known (no gradient, no hook on the forward) counts as 0.
    """
    device = slots[0].grad.device
    numbers = [
        _since_first(_ready_in_turn(slots)),
        [slot.compute_s for slot in slots],
        _since_first([slot.forward_s for slot in slots]),
    ]
    agreed = torch.tensor([*chain(*numbers), bytes_per_s], dtype=torch.float64, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
    *agreed_numbers, bytes_per_s = agreed.tolist()
    ready_s, compute_s, forward_s = (
        dict(zip(slots, agreed_numbers[start : start + len(slots)])) for start in range(0, 3 * len(slots), len(slots))
    )
    return Timing(ready_s, compute_s, forward_s, bytes_per_s)


def _ready_in_turn(slots: Sequence[Slot]) -> list[float | None]:
    """When each gradient would have been ready, had none been computed after all others."""
    ready_s = {slot: slot.ready_s for slot in slots}
    late_s = 0.0
    for slot in sorted((slot for slot in slots if slot.ready_s is not None), key=lambda slot: slot.ready_s or 0.0):
        assert slot.ready_s is not None
        if slot.was_last:
            late_s += slot.compute_s
        ready_s[slot] = slot.ready_s + late_s
    return list(ready_s.values())


def _since_first(moments_s: Sequence[float | None]) -> list[float]:
    first_s = min((moment for moment in moments_s if moment is not None), default=0.0)
    return [0.0 if moment is None else moment - first_s for moment in moments_s]


def _neighbours(slots: Sequence[Slot]) -> list[list[Slot]]:
    """The slots in at most `_MAX_GROUPS` groups of as many."""
    size = -(-len(slots) // _MAX_GROUPS)
    return [list(slots[start : start + size]) for start in range(0, len(slots), max(1, size))]
