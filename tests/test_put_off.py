"""Weight gradients that are computed after all others: the same ones, in that order, of what lasts until then."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from op_cases import poison_staging
from test_overlap_forward import FORWARD, changed
from test_wgrad import PARTS, NoteProducts
from torch import Tensor, nn

from fusedcomm.ops.wgrad import WeightGradient, local_linear
from fusedcomm.parallel import GradientBuckets, main_grad_of
from fusedcomm.parallel.buckets import Bucket, Slot
from fusedcomm.parallel.timing import Planner
from fusedcomm.train.config import parse_config
from fusedcomm.train.data import open_data
from fusedcomm.train.loop import mesh_of
from fusedcomm.train.trainer import Trainer


def train_out_of_turn(rank: int, world: int, last: list[int], parts: int) -> tuple[list[str], list[Tensor]]:
    """What a step's last backward and `finish_later` do, and the sums, if weights `last` are computed last."""
    events: list[str] = []
    torch.manual_seed(0)
    net = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
    choose = mock.patch.object(Planner, "last_gradients", lambda self, buckets: [buckets[2 - i].slots[0] for i in last])
    with choose:
        buckets = GradientBuckets(
            net.named_parameters(), dp_group=dist.group.WORLD, layers=net, bucket_mb=1e-5, window_mb=1
        )

        def defer(weight: Tensor, gradient: WeightGradient) -> None:
            events.append(f"backward {[weight is layer.weight for layer in net].index(True)}")
            buckets.accumulate(weight, gradient)

        for _ in range(3):
            buckets.zero()
            for part in range(parts):
                events.clear()
                x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * rank + part))
                for layer in net:
                    # Its hook waits for the sum.
                    layer(x)
                    x = torch.tanh(local_linear(x, layer.weight, None, defer))
                x.sum().backward()
            events.append("end")
            with NoteProducts(events, [net[0].weight]):
                buckets.finish_later(lambda names: None)
        buckets.settle()
    return events, [main_grad_of(layer.weight) for layer in net]


@pytest.mark.parametrize("parts", [1, PARTS])
def test_gradients_computed_last_are_the_same_to_the_bit(parts):
    in_turn = run_ranks(2, train_out_of_turn, [], parts)
    out_of_turn = run_ranks(2, train_out_of_turn, [2, 1], parts)
    for (_, expected), (_, found) in zip(in_turn, out_of_turn):
        assert all(torch.equal(a, b) for a, b in zip(expected, found))
    backward = ["backward 2", "backward 1", "backward 0", "end"]
    assert [events for events, _ in in_turn] == [backward] * 2
    assert [events for events, _ in out_of_turn] == [[*backward, "dw", "dw"]] * 2


def train_in_a_pipeline(rank: int, world: int, raw: dict) -> list[float]:
    """Losses, where any gradient might be computed last, and free staging is NaN by then."""
    config = parse_config(raw)
    close = GradientBuckets._close

    def poison_and_close(buckets: GradientBuckets) -> None:
        poison_staging()
        close(buckets)

    def choose(planner: Planner, buckets: list[Bucket]) -> list[Slot]:
        return [slot for bucket in buckets for slot in bucket.slots]

    with (
        mock.patch.object(Planner, "last_gradients", choose),
        mock.patch.object(GradientBuckets, "_close", poison_and_close),
    ):
        trainer = Trainer(config, mesh_of(config, torch.device("cpu")))
        data, losses = open_data(config), []
        for step in range(4):
            losses.append(trainer.gradients(step, [data.train.batch(step, trainer.mesh.dp_rank)]))
            trainer.update(step)
        trainer.settle()
    return losses


def test_no_gradient_is_computed_from_what_a_pipeline_stage_received_before():
    raw = changed("parallel_config.pipeline_parallel", {"depth": 2, "micro_batches": 4}, FORWARD)
    for losses in run_ranks(4, train_in_a_pipeline, raw):
        assert all(map(math.isfinite, losses)), losses


def test_a_contribution_after_the_one_put_off_is_refused():
    run_ranks(2, _one_too_many)


def _one_too_many(rank: int, world: int) -> None:
    layer = nn.Linear(3, 2, bias=False)
    gradient = WeightGradient(torch.ones(1, 2), [torch.ones(1, 3)])
    with mock.patch.object(Planner, "last_gradients", lambda self, buckets: [buckets[0].slots[0]]):
        buckets = GradientBuckets(layer.named_parameters(), dp_group=dist.group.WORLD, layers=[layer])
        for _ in range(2):
            buckets.zero()
            buckets.accumulate(layer.weight, gradient)
            if buckets._counted:
                with pytest.raises(RuntimeError, match="contribution 2 to the gradient of weight came after"):
                    buckets.accumulate(layer.weight, gradient)
            buckets.finish_later(lambda names: None)
            buckets.settle()
