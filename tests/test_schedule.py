"""Stages, their layers and their ranks: the best split, torch's placement, and refusals with numbers."""

from __future__ import annotations

import itertools
import random

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from fusedcomm.parallel import split_layers, stage_to_rank, stages_on_each_rank


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("2f2b", {}, "schedule '2f2b' is unknown; choose one of gpipe, 1f1b"),
        ("dualpipev", {"micro_batches": 7}, "micro_batches=7 for 8 stages; raise micro_batches to 8"),
        ("interleaved", {"micro_batches": 9}, "micro_batches=9 into 2 equal rounds for pp=4; use 8 or 12"),
        ("zero_bubble", {"micro_batches": 9}, "micro_batches=9 into 2 equal rounds for pp=4; use 8 or 12"),
        ("gpipe", {"micro_batches": 0}, "micro_batches is 0"),
        ("gpipe", {"num_layers": 3}, "3 layers cannot fill 4 stages"),
        ("zbv", {"num_layers": 7}, r"7 layers cannot fill 8 stages \(pp=4 ranks x 2 of zbv\)"),
        ("zbv", {"stages_per_rank": 3}, "stages_per_rank is 3 but zbv runs exactly 2 per rank"),
        ("interleaved", {"stages_per_rank": 0}, "stages_per_rank is 0 but interleaved runs 1 or more"),
    ],
)
def test_schedule_rejects_what_it_cannot_run(schedule, options, message):
    with pytest.raises(ValueError, match=message):
        stages_on_each_rank(schedule, **{"pp": 4, "micro_batches": 8, "num_layers": 8} | options)


@pytest.mark.parametrize(("pp", "per_rank"), [(2, 2), (4, 2), (3, 3)])
def test_stages_lie_where_torch_puts_them(pp, per_rank):
    for schedule, style in (("interleaved", "loop"), ("zbv", "v")):
        torchs = generate_stage_to_rank_mapping(pp, pp * per_rank, style)
        assert stage_to_rank(schedule, pp=pp, stages_per_rank=per_rank) == [torchs[s] for s in range(pp * per_rank)]


def test_split_is_the_best_of_all():
    generator = random.Random(0)
    for _ in range(100):
        num_layers = generator.randint(1, 7)
        num_stages = generator.randint(1, num_layers)
        costs = [generator.choice([1.0, 1.0, 2.5, 0.3]) for _ in range(num_layers)]
        outer = {"first_cost": generator.choice([0.0, 0.4]), "last_cost": generator.choice([0.0, 2.0])}

        def stage_costs(split: list[range], costs=costs, outer=outer) -> list[float]:
            sums = [sum(costs[layer] for layer in layers) for layers in split]
            sums[0] += outer["first_cost"]
            sums[-1] += outer["last_cost"]
            return sums

        def score(split: list[range], stage_costs=stage_costs) -> tuple[float, float]:
            sums = stage_costs(split)
            return round(max(sums), 9), round(sum(s * s for s in sums), 9)

        cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
        every = [list(map(range, (0, *cut), (*cut, num_layers))) for cut in cuts]
        best = split_layers(costs, num_stages, **outer)
        assert best in every
        assert score(best) == min(map(score, every))


def test_split_counts_embedding_and_head():
    assert split_layers([1.0] * 8, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert [len(r) for r in split_layers([1.0] * 8, 4, last_cost=1.5)] == [2, 2, 3, 1]
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        split_layers([1.0] * 2, 3)
    with pytest.raises(ValueError, match=r"split \[3, 4\] gives 7 layers to 2 stages; it must give 8 layers to 2"):
        split_layers([1.0] * 8, 2, sizes=[3, 4])
