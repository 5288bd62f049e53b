"""Schedules as tables: complete, without a circle, with the bubble and the memory that they are known for."""

from __future__ import annotations

import itertools

import pytest
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _simulate_comms_compute,
    _validate_schedule,
)

from fusedcomm.parallel.schedule import SCHEDULES, stage_to_rank, stages_on_each_rank
from fusedcomm.parallel.table import Action, WeightGradients, build_table, forward_only, simulate

GRID = [
    (schedule, pp, micro_batches, per_rank)
    for schedule, pp, micro_batches, per_rank in itertools.product(SCHEDULES, (1, 2, 3, 4), (1, 2, 3, 5, 8), (1, 2, 3))
    if per_rank == SCHEDULES[schedule].stages_per_rank or SCHEDULES[schedule].flexible
]


def tables(weight_gradients: WeightGradients = "by_schedule"):
    for schedule, pp, micro_batches, per_rank in GRID:
        try:
            stages_on_each_rank(
                schedule, pp=pp, micro_batches=micro_batches, num_layers=pp * per_rank, stages_per_rank=per_rank
            )
        except ValueError:
            continue
        per_rank = 1 if pp == 1 else per_rank
        table = build_table(
            schedule,
            pp=pp,
            micro_batches=micro_batches,
            stages_per_rank=per_rank,
            weight_gradients=weight_gradients,
        )
        yield (schedule, pp, micro_batches, per_rank), table


def torchs(table):
    return {
        rank: [_Action(action.stage, _ComputationType(action.kind), action.micro_batch) for action in actions]
        for rank, actions in enumerate(table)
    }


@pytest.mark.parametrize("weight_gradients", ["by_schedule", "at_end"])
def test_every_table_is_complete_and_passes_torchs_own_checks(weight_gradients):
    count = 0
    for (schedule, pp, micro_batches, per_rank), table in tables(weight_gradients):
        owners = stage_to_rank(schedule, pp=pp, stages_per_rank=per_rank)
        theirs = torchs(table)
        _simulate_comms_compute(theirs, owners.__getitem__, len(owners))
        compute = {rank: [action for action in actions if action.is_compute_op] for rank, actions in theirs.items()}
        assert _validate_schedule(compute, pp, len(owners), micro_batches) == dict(enumerate(owners))
        everything = [action for actions in table for action in actions]
        assert len(set(everything)) == len(everything)
        borders = sum(first != second for first, second in itertools.pairwise(owners))
        for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
            assert sum(action.kind == kind for action in everything) == borders * micro_batches
        count += 1
    assert count > 60


@pytest.mark.parametrize(
    ("schedule", "per_rank", "idle", "peak", "idle_at_end"),
    [
        ("gpipe", 1, 3 / 11, [8, 8, 8, 8], 1 / 5),
        ("1f1b", 1, 3 / 11, [4, 3, 2, 1], 1 / 5),
        ("interleaved", 2, 3 / 19, [11, 9, 7, 5], 1 / 9),
        ("zero_bubble", 1, 1 / 9, [4, 4, 4, 4], 1 / 5),
        ("zero_bubble", 2, 1 / 17, [8, 8, 8, 8], 1 / 9),
        ("zbv", 2, 1 / 17, [8, 8, 8, 8], 1 / 9),
        ("dualpipev", 2, 1 / 17, [9, 9, 9, 9], 1 / 9),
    ],
)
def test_bubble_and_memory_are_what_the_papers_say(schedule, per_rank, idle, peak, idle_at_end):
    """(p - 1) / (m + p - 1) for GPipe and 1F1B, a p-th of the forwards' memory for 1F1B, and so on; p = 4, m = 8.

    With weight gradients at the end 2 (p - 1) / (3 m + 2 (p - 1)), and the memory of all micro-batches.
    """
    found = simulate(build_table(schedule, pp=4, micro_batches=8, stages_per_rank=per_rank))
    assert found.idle == pytest.approx([idle] * 4)
    assert found.peak_live == peak
    at_end = build_table(schedule, pp=4, micro_batches=8, stages_per_rank=per_rank, weight_gradients="at_end")
    assert simulate(at_end).idle == pytest.approx([idle_at_end] * 4)
    assert simulate(at_end).peak_live == [8 * per_rank] * 4


def test_weight_gradients_at_the_end_follow_the_next_forward():
    for (_, _, micro_batches, _), table in tables("at_end"):
        for actions in table:
            stages = sorted({action.stage for action in actions})
            in_order = [(stage, index) for stage in stages for index in range(micro_batches)]
            before, end = actions[: -len(in_order)], actions[-len(in_order) :]
            assert end == [Action("W", *place) for place in in_order]
            assert sorted(action[1:] for action in before if action.kind == "I") == in_order
            assert not any(action.kind in "BW" for action in before)


def test_one_forward_one_backward_holds_a_micro_batch_per_later_stage():
    for pp, micro_batches in itertools.product((1, 2, 3, 5), (1, 2, 4, 9)):
        found = simulate(build_table("1f1b", pp=pp, micro_batches=micro_batches, stages_per_rank=1))
        assert found.peak_live == [min(pp - rank, micro_batches) for rank in range(pp)]


def test_the_forward_part_runs_by_itself():
    for (schedule, pp, micro_batches, per_rank), table in tables():
        owners = stage_to_rank(schedule, pp=pp, stages_per_rank=per_rank)
        parts = [forward_only(actions) for actions in table]
        assert all(sum(action.kind == "F" for action in part) == per_rank * micro_batches for part in parts)
        _simulate_comms_compute(torchs(parts), owners.__getitem__, len(owners))


def move(actions, action, after):
    actions.remove(action)
    actions.insert(actions.index(after) + 1, action)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table[1].remove(Action("RECV_F", 1, 0)), "rank 0: .*SEND_F.*rank 1: .*F"),
        (
            lambda table: table[0].insert(0, table[0].pop(table[0].index(Action("B", 0, 0)))),
            "cannot go on; rank 0: .*B",
        ),
        (lambda table: table[1].remove(Action("B", 1, 1)), "cannot go on"),
        (lambda table: table[0].remove(Action("B", 0, 1)), r"without the backward of every forward on ranks \[0\]"),
        # Rank 0 cannot send before rank 1 has sent, and the other way round.
        (
            lambda table: move(table[1], Action("RECV_F", 1, 1), Action("SEND_B", 1, 0)),
            "rank 0: .*SEND_F.*rank 1: .*SEND_B",
        ),
    ],
)
def test_a_broken_table_is_refused(change, message):
    table = build_table("1f1b", pp=2, micro_batches=2, stages_per_rank=1)
    change(table)
    with pytest.raises(ValueError, match=message):
        simulate(table)
