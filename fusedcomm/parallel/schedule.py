"""Which stage holds which layers, which rank which stage, and what each schedule demands; no process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)


@dataclass(frozen=True)
class ScheduleKind:
    """What sets one schedule apart from the others.

    Attributes:
        torchs: torch's class, whose table is taken; None where the table is made here.
        stages_per_rank: the default, and where not `flexible` the only possibility.
        placement: `loop` deals the stages round and round the ranks, `v` there and back: rank 0 has the last
        one.
        splits_backward: weight gradients run later than input gradients, in what would be bubbles.
    """

    torchs: type[PipelineScheduleMulti] | None = None
    stages_per_rank: int = 1
    flexible: bool = False
    placement: str = "loop"
    splits_backward: bool = False


SCHEDULES = {
    "gpipe": ScheduleKind(),
    "1f1b": ScheduleKind(),
    "interleaved": ScheduleKind(ScheduleInterleaved1F1B, stages_per_rank=2, flexible=True),
    "zero_bubble": ScheduleKind(ScheduleInterleavedZeroBubble, flexible=True, splits_backward=True),
    "zbv": ScheduleKind(ScheduleZBVZeroBubble, stages_per_rank=2, placement="v", splits_backward=True),
    "dualpipev": ScheduleKind(ScheduleDualPipeV, stages_per_rank=2, placement="v", splits_backward=True),
}


def stages_on_each_rank(
    schedule: str, *, pp: int, micro_batches: int, num_layers: int, stages_per_rank: int | None = None
) -> int:
    """Stages that each of `pp` ranks runs under `schedule`; 1 without a pipeline.

    Raises:
        ValueError: the schedule is unknown, or cannot run such stages, micro-batches or layers.
    """
    kind = SCHEDULES.get(schedule)
    if kind is None:
        raise ValueError(f"pipeline: schedule {schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    if micro_batches < 1:
        raise ValueError(f"pipeline: micro_batches is {micro_batches}; at least 1 is needed")
    per_rank = kind.stages_per_rank if stages_per_rank is None else stages_per_rank
    if per_rank < 1 or (not kind.flexible and per_rank != kind.stages_per_rank):
        rule = "1 or more stages" if kind.flexible else f"exactly {kind.stages_per_rank}"
        raise ValueError(f"pipeline: stages_per_rank is {per_rank} but {schedule} runs {rule} per rank")
    if pp == 1:
        return 1
    num_stages = pp * per_rank
    if num_layers < num_stages:
        raise ValueError(
            f"pipeline: {num_layers} layers cannot fill {num_stages} stages (pp={pp} ranks x {per_rank} of "
            f"{schedule}); each stage needs a layer: use more layers, fewer ranks or fewer stages per rank"
        )
    if schedule == "dualpipev" and micro_batches < num_stages:
        raise ValueError(
            f"pipeline: dualpipev needs a micro-batch per stage but has micro_batches={micro_batches} for {num_stages} "
            f"stages; raise micro_batches to {num_stages} or more, or use zbv"
        )
    rounds = max(1, micro_batches // pp)
    if schedule in ("interleaved", "zero_bubble") and micro_batches % rounds:
        multiple = micro_batches // pp * pp
        raise ValueError(
            f"pipeline: {schedule} cannot deal micro_batches={micro_batches} into {rounds} equal rounds for pp={pp}; "
            f"use {multiple} or {multiple + pp}"
        )
    return per_rank


def stage_to_rank(schedule: str, *, pp: int, stages_per_rank: int) -> list[int]:
    """The pipeline rank of every stage."""
    there = list(range(pp))
    back = there[::-1] if SCHEDULES[schedule].placement == "v" else there
    return [rank for leg in range(stages_per_rank) for rank in (back if leg % 2 else there)]


def split_layers(
    layer_costs: Sequence[float],
    num_stages: int,
    *,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
    sizes: Sequence[int] | None = None,
) -> list[range]:
    """Consecutive layers for every stage, at least one each; the costliest stage is as cheap as can be.

    `first_cost` and `last_cost` are the embedding's and the output head's, in the unit of `layer_costs`. Of
    equally good splits the one with the smallest sum of squares is taken. `sizes` fixes the layers per stage.

    Raises:
        ValueError: fewer layers than stages, or `sizes` that do not fit them.
    """
    num_layers = len(layer_costs)
    if num_layers < num_stages:
        raise ValueError(
            f"pipeline: {num_layers} layers cannot fill {num_stages} stages; "
            "each stage needs a layer: use more layers or fewer stages"
        )
    if sizes is not None:
        if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(
                f"pipeline: the split {list(sizes)} gives {sum(sizes)} layers to {len(sizes)} stages; "
                f"it must give {num_layers} layers to {num_stages} stages, at least one to each"
            )
        ends = list(accumulate(sizes))
        return [range(end - size, end) for end, size in zip(ends, sizes)]
    prefix = [0.0, *accumulate(layer_costs)]

    def cost(start: int, end: int) -> float:
        outer = (first_cost if start == 0 else 0.0) + (last_cost if end == num_layers else 0.0)
        return prefix[end] - prefix[start] + outer

    limit, _ = _best_split(num_layers, num_stages, lambda score, start, end: max(score, cost(start, end)))
    # A hair above the smallest maximum, lest rounding in the prefix sums forbid the very split that has it.
    limit *= 1 + 1e-9

    def squares(score: float, start: int, end: int) -> float:
        return score + cost(start, end) ** 2 if cost(start, end) <= limit else math.inf

    return _best_split(num_layers, num_stages, squares)[1]


def _best_split(
    num_layers: int, num_stages: int, extend: Callable[[float, int, int], float]
) -> tuple[float, list[range]]:
    """The split with the lowest score, built up stage by stage: `extend(score so far, start, end)`."""
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}
    for stage in range(num_stages):
        following: dict[int, tuple[float, list[range]]] = {}
        # The stages still to come need a layer each.
        for end in range(stage + 1, num_layers - (num_stages - stage) + 2):
            options = [(extend(score, start, end), start) for start, (score, _) in best.items() if start < end]
            score, start = min(options)
            following[end] = (score, [*best[start][1], range(start, end)])
        best = following
    return best[num_layers]
