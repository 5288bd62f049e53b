"""The order of bulk transfers: complete, feasible, by need, and the same whatever really happens."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fusedcomm.comm.plan import SHORT_S, Forecast, Pace, Piece, lateness, pace_of, plan, released_with

RATE = 1e6
# The machine may be busy.
untimed = settings(deadline=None)
forecasts = st.lists(
    st.builds(
        Forecast,
        ready_s=st.integers(0, 300).map(lambda ms: ms / 1e3),
        needed_s=st.integers(0, 900).map(lambda ms: ms / 1e3),
        num_bytes=st.integers(0, 2000).map(lambda words: words * 64),
    ),
    max_size=12,
)
piece_sizes = st.integers(1, 3000).map(lambda words: words * 64)


def finishes(order: list[Piece], transfers: list[Forecast]) -> dict[int, float]:
    """When each transfer is over on one link that runs the pieces in this order, none before it is ready."""
    now_s, over = 0.0, {}
    for piece in order:
        ready_s = max(transfers[piece.transfer].ready_s, transfers[piece.after].ready_s)
        now_s = max(now_s, ready_s) + piece.num_bytes / RATE
        over[piece.transfer] = now_s
    return over


def worst_lateness(order: list[Piece], transfers: list[Forecast]) -> float:
    return max((over - transfers[index].needed_s for index, over in finishes(order, transfers).items()), default=0.0)


@untimed
@given(forecasts, piece_sizes)
def test_plan_cuts_every_transfer_into_bounded_pieces_once(transfers, piece_bytes):
    order = plan(transfers, bytes_per_s=RATE, piece_bytes=piece_bytes)
    for index, transfer in enumerate(transfers):
        pieces = [piece for piece in order if piece.transfer == index]
        ends = [0, *(piece.stop for piece in pieces)]
        assert [piece.start for piece in pieces] == ends[:-1]
        assert ends[-1] == transfer.num_bytes
    assert all(0 < piece.num_bytes <= piece_bytes and piece.start % 64 == 0 for piece in order)


@untimed
@given(forecasts, piece_sizes)
def test_plan_takes_what_is_needed_first_of_what_is_ready(transfers, piece_bytes):
    order = plan(transfers, bytes_per_s=RATE, piece_bytes=piece_bytes)
    now_s = 0.0
    for place, piece in enumerate(order):
        ready_s = transfers[piece.after].ready_s
        assert ready_s >= transfers[piece.transfer].ready_s
        now_s = max(now_s, ready_s)
        for other in order[place:]:
            if transfers[other.after].ready_s <= now_s:
                assert transfers[piece.transfer].needed_s <= transfers[other.transfer].needed_s
        now_s += piece.num_bytes / RATE


@untimed
@given(forecasts, piece_sizes)
def test_plan_is_no_later_than_first_come_first_served(transfers, piece_bytes):
    order = plan(transfers, bytes_per_s=RATE, piece_bytes=piece_bytes)
    by_readiness = sorted(order, key=lambda piece: (transfers[piece.after].ready_s, piece.transfer, piece.start))
    assert worst_lateness(order, transfers) <= worst_lateness(by_readiness, transfers) + 1e-9


@untimed
@given(st.lists(st.integers(0, 400).map(lambda steps: steps * 1e-4), min_size=1, max_size=20))
def test_release_waits_over_short_gaps_only(ready_s):
    for index, last in enumerate(released_with(ready_s)):
        assert 0 <= ready_s[last] - ready_s[index] <= 2e-3
        between = sorted(moment for moment in ready_s if ready_s[index] <= moment <= ready_s[last])
        assert all(later - earlier < SHORT_S for earlier, later in pairwise(between))


def test_release_joins_what_a_norm_leaves_between_two_gemms():
    # A bucket is full right before the backward of a norm (0.1 ms), after which a GEMM follows.
    assert released_with([0.0, 0.0100, 0.0101, 0.0200]) == [0, 2, 2, 3]


def test_plan_lets_the_first_layer_overtake():
    # Backward readies layers 3, 2, 1, 0; the next forward needs 0 first.
    layers = [Forecast(ready_s=0.1 * step, needed_s=1 - 0.1 * step, num_bytes=192_000) for step in range(4)]
    order = plan(layers, bytes_per_s=RATE, piece_bytes=96_000)
    assert [piece.transfer for piece in order] == [0, 0, 1, 2, 3, 3, 2, 1]


def test_pace_follows_rate_and_computing_within_bounds():
    assert pace_of(1e8, 0.08) == Pace(1_600_000, 4_800_000)
    assert pace_of(1e8, 10.0) == Pace(4_000_000, 12_000_000)
    assert pace_of(1e4, 0.08).piece_bytes == 256 * 1024
    assert pace_of(1e12, 0.08).piece_bytes == 16 * 2**20


@untimed
@given(forecasts, piece_sizes)
def test_lateness_is_what_the_last_result_is_late_by(transfers, piece_bytes):
    order = plan(transfers, bytes_per_s=RATE, piece_bytes=piece_bytes)
    assert lateness(transfers, order, bytes_per_s=RATE) == max(0.0, worst_lateness(order, transfers))
