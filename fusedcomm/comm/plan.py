"""In which order bulk transfers leave, and in pieces of which size: pure functions, the same on every rank.

A group's transfers must start in one order on all its ranks, or sums meet that do not belong together. So the order
is not decided while they become ready, but before: by playing the step through, with times on which the group agreed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

# A gap between two moments of readiness that is shorter is no computing that a launch could hide behind: about what
# posting a transfer costs the computing core.
SHORT_S = 0.5e-3
# Several short ones in a row together do not hold a transfer back for longer.
_MAX_DELAY_S = 2e-3

PIECES_UNDER_WAY = 3
_MIN_PIECE_BYTES = 256 * 1024
_MAX_PIECE_BYTES = 16 * 2**20
# A piece on the wire for less than this would cost more to post than it gains; one for longer would keep an urgent
# transfer waiting.
_MIN_PIECE_S = 5e-3
_MAX_PIECE_S = 40e-3


@dataclass(frozen=True)
class Forecast:
    """One transfer of a step: when it will be ready and its result be needed, on one clock, and its bytes."""

    ready_s: float
    needed_s: float
    num_bytes: int


@dataclass(frozen=True)
class Piece:
    """Bytes `start:stop` of a transfer, which leave when transfer `after` (often itself) is ready as well."""

    transfer: int
    start: int
    stop: int
    after: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Pace:
    """How much leaves at a time, and how much may be under way."""

    piece_bytes: int
    window_bytes: int


def pace_of(bytes_per_s: float, gap_s: float) -> Pace:
    """The pace for a link of `bytes_per_s` where something becomes ready about every `gap_s` of computing.

    A piece takes a fifth of that gap on the wire, since an order can only be kept as finely as pieces are cut, within
    5 to 40 ms and 256 KiB to 16 MiB. The window holds three: on a core that computes, the threads that carry pieces on
    come late, and two leave the wire idle for a tenth of the time.
    """
    piece_s = min(max(gap_s / 5, _MIN_PIECE_S), _MAX_PIECE_S)
    piece_bytes = min(max(int(bytes_per_s * piece_s), _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
    return Pace(piece_bytes, PIECES_UNDER_WAY * piece_bytes)


def plan(transfers: Sequence[Forecast], *, bytes_per_s: float, piece_bytes: int) -> list[Piece]:
    """The pieces of all transfers in the order in which they leave.

    List scheduling in simulated time: whenever the link is free, the next piece is of that transfer, among those that
    are ready, whose result is needed first. With one link that never idles while something is ready, no order by
    readiness (first come, first served) is ever later than needed by more than this one is. A transfer that becomes
    ready before a short gap in computing leaves after that gap, when something longer is computed (`released_with`).
    """
    after = released_with([transfer.ready_s for transfer in transfers])
    ready_s = [transfers[index].ready_s for index in after]
    arrivals = sorted(range(len(transfers)), key=lambda index: (ready_s[index], index), reverse=True)
    waiting: list[tuple[float, int, list[tuple[int, int]]]] = []
    order: list[Piece] = []
    now_s = 0.0
    while arrivals or waiting:
        if not waiting:
            now_s = max(now_s, ready_s[arrivals[-1]])
        while arrivals and ready_s[arrivals[-1]] <= now_s:
            index = arrivals.pop()
            pieces = _cut(transfers[index].num_bytes, piece_bytes)
            if pieces:
                heapq.heappush(waiting, (transfers[index].needed_s, index, pieces[::-1]))
        if waiting:
            _, index, pieces = waiting[0]
            start, stop = pieces.pop()
            order.append(Piece(index, start, stop, after[index]))
            now_s += (stop - start) / bytes_per_s
            if not pieces:
                heapq.heappop(waiting)
    return order


def lateness(transfers: Sequence[Forecast], order: Sequence[Piece], *, bytes_per_s: float) -> float:
    """How long those that need the results wait in all, if the pieces leave in this order one after the other."""
    now_s, late_s = 0.0, 0.0
    for piece in order:
        ready_s = max(transfers[piece.transfer].ready_s, transfers[piece.after].ready_s)
        now_s = max(now_s, ready_s) + piece.num_bytes / bytes_per_s
        # Who has waited needs what comes next later by as much.
        late_s = max(late_s, now_s - transfers[piece.transfer].needed_s)
    return late_s


def released_with(ready_s: Sequence[float]) -> list[int]:
    """For each transfer the one whose readiness lets it leave: itself, unless a short gap follows.

    Launching costs the computing core time. Right before a short piece of computing it would delay what comes after;
    so a transfer waits over gaps shorter than 0.5 ms, together not more than 2 ms, for the moment before a longer one.
    """
    order = sorted(range(len(ready_s)), key=lambda index: (ready_s[index], index))
    after = list(range(len(ready_s)))
    for this, following in zip(order[-2::-1], order[:0:-1]):
        last = after[following]
        is_short = ready_s[following] - ready_s[this] < SHORT_S
        if is_short and ready_s[last] - ready_s[this] <= _MAX_DELAY_S:
            after[this] = last
    return after


def _cut(num_bytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    """Pieces as equal as multiples of 64 bytes allow, none larger than `piece_bytes` rounded up to such a multiple."""
    count = -(-num_bytes // piece_bytes)
    if count == 0:
        return []
    size = -(-num_bytes // (count * 64)) * 64
    return [(start, min(start + size, num_bytes)) for start in range(0, num_bytes, size)]
