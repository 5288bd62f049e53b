"""Which weight gradients are computed after all others: those whose time hides sums that are needed first."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from fusedcomm.comm.plan import SHORT_S
from fusedcomm.parallel import timing
from fusedcomm.parallel.buckets import Bucket, Slot, allocate_gradients, cut_into_buckets
from fusedcomm.parallel.timing import Planner, Timing, _ready_in_turn

NUM_LAYERS = 8
# A GEMM; forward, dx and dW take one each.
GEMM_S = 20 * SHORT_S


def step(bytes_per_s: float) -> tuple[Planner, list[Bucket], list[Slot]]:
    """A planner that knows a step of layers one like the other, without a gradient of the first one's input."""
    named = [(f"{layer}", nn.Parameter(torch.zeros(64, 1024))) for layer in range(NUM_LAYERS)]
    flat, slots = allocate_gradients(named[::-1])
    buckets = cut_into_buckets(flat, slots, 1)
    # Backward comes to the last layer first.
    planner = Planner(bucket_mb=0.03, window_mb=None)
    planner._timing = planner._expected = Timing(
        ready_s={slot: 2 * GEMM_S * place for place, slot in enumerate(slots)},
        compute_s=dict.fromkeys(slots, GEMM_S),
        forward_s={slot: GEMM_S * (NUM_LAYERS - 1 - place) for place, slot in enumerate(slots)},
        bytes_per_s=bytes_per_s,
    )
    planner._best_bytes_per_s = bytes_per_s
    return planner, buckets, slots


def balanced_rate(slots: list[Slot]) -> float:
    """All sums take as long as all GEMMs."""
    return sum(slot.padded * 4 for slot in slots) / (3 * NUM_LAYERS * GEMM_S)


@pytest.mark.parametrize(
    ("times_balanced", "expected"), [(0.5, []), (1.0, []), (1.1, [7]), (1.2, [6, 4]), (1.5, [2, 4]), (1e4, [])]
)
def test_gradients_are_put_off_where_the_next_forward_would_wait(times_balanced, expected):
    planner, buckets, _ = step(times_balanced * balanced_rate(step(1.0)[2]))
    before_s = planner._lateness(buckets, planner._timing)
    last = planner.last_gradients(buckets)
    # The first choice helps most.
    assert [int(slot.name) for slot in last] == expected
    if expected:
        assert planner._lateness(buckets, planner._expected) <= before_s - len(expected) * GEMM_S / 4


def test_neighbours_are_put_off_together_where_many_could_be():
    planner, buckets, _ = step(1.2 * balanced_rate(step(1.0)[2]))
    with mock.patch.object(timing, "_MAX_GROUPS", NUM_LAYERS // 2):
        last = planner.last_gradients(buckets)
    layers = [int(slot.name) for slot in last]
    assert layers
    assert layers[1::2] == [layer + 1 for layer in layers[::2]]


def test_nothing_is_put_off_that_autograd_computes():
    planner, buckets, slots = step(1.15 * balanced_rate(step(1.0)[2]))
    planner._timing.compute_s.update(dict.fromkeys(slots, 0.0))
    assert planner.last_gradients(buckets) == []


def test_with_last_moves_others_ahead_and_keeps_the_end():
    planner, _, slots = step(1.0)
    moved = planner._timing.with_last(slots[:2]).ready_s
    # In GEMMs: the first two at the end, the one that is needed first before the other.
    expected = [14, 13, *(2 * place - 2 for place in range(2, NUM_LAYERS))]
    assert [moved[slot] / GEMM_S for slot in slots] == pytest.approx(expected)


def test_times_of_a_step_in_which_some_were_put_off_are_those_without():
    _, _, slots = step(1.0)
    for place, slot in enumerate(slots):
        slot.compute_s, slot.was_last = GEMM_S, place < 2
        # Put off: when backward came to it.
        slot.ready_s = 2 * GEMM_S * place - GEMM_S * min(place + 1, 2)
    assert _ready_in_turn(slots) == pytest.approx([2 * GEMM_S * place for place in range(NUM_LAYERS)])
