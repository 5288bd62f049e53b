"""Weight gradients put off: computed once, weight by weight; at the end of a pass right, and sent early."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from pipeline_helpers import LAYERS, MICRO_BATCHES, data, make_pipeline, mean_loss
from test_pipeline import CountGemms, check_against_one_process
from torch import Tensor

from fusedcomm.ops.wgrad import WeightGradient
from fusedcomm.parallel import SCHEDULES, GradientBuckets, WgradQueue
from fusedcomm.parallel.wgrad import PutOff


def put_off(queue: WgradQueue, weights: list[Tensor], uses: tuple[int, ...], micro_batch: int) -> PutOff:
    """A backward that comes to these weights in this order."""
    for weight in uses:
        queue.put(weights[weight], WeightGradient(torch.ones(1, 1), [torch.full((1, 1), float(micro_batch))]))
    return queue.take()


def test_wgrad_queue_computes_each_gradient_once_weight_by_weight():
    weights = [torch.zeros(1, 1) for _ in range(3)]
    added = []
    queue = WgradQueue(lambda weight, gradient: added.append((weight, int(gradient.compute()))))

    def order() -> list[tuple[int, int]]:
        found = [(next(i for i, w in enumerate(weights) if w is weight), index) for weight, index in added]
        added.clear()
        return found

    # Weight 2 is used twice.
    backwards = [put_off(queue, weights, (2, 2, 1, 0), index) for index in range(3)]
    assert (len(queue), added) == (0, [])
    queue.compute(backwards[:1])
    assert order() == [(0, 0), (1, 0), (2, 0), (2, 0)]
    queue.compute(backwards)
    assert order() == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 1), (2, 2), (2, 2)]
    queue.compute(backwards)
    assert order() == []


def test_wgrad_queue_frees_activations_as_soon_as_their_gemm_is_done():
    weights = [torch.zeros(1, 1) for _ in range(2)]
    counts = []
    queue = WgradQueue(lambda weight, gradient: counts.append(sum(held() is not None for held in gradients)))
    backwards = [put_off(queue, weights, (1, 0), index) for index in range(2)]
    gradients = [weakref.ref(gradient) for backward in backwards for _, gradient in backward]
    queue.compute(backwards)
    # The one that is being computed is among them.
    assert counts == [4, 3, 2, 1]
    assert all(held() is None for held in gradients)


def _both(rank: int, world: int, schedule: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for weight_gradients in ("by_schedule", "at_end"):
        pipeline = make_pipeline(schedule, dist.group.WORLD, weight_gradients=weight_gradients, **options)
        before = pipeline.eval_step(**data(0), loss_fn=mean_loss)
        with CountGemms() as gemms:
            loss = sum(pipeline.train_step(**data(step), loss_fn=mean_loss).item() for step in range(2))
        grads = {name: param.grad for name, param in pipeline.named_parameters()}
        evaluated = None if before is None else [before] * 3
        found.append({"loss": loss, "gemms": gemms.counts["gemm"], "grads": grads, "eval": evaluated})
    return found


@pytest.mark.parametrize(
    ("world", "schedule", "options"),
    [
        *((2, schedule, {}) for schedule in SCHEDULES),
        (4, "1f1b", {}),
        (4, "interleaved", {}),
        (2, "1f1b", {"micro_batches": 1}),
        (1, "1f1b", {}),
    ],
)
def test_weight_gradients_at_the_end_match_one_process_and_those_in_bubbles_to_the_bit(world, schedule, options):
    ranks = run_ranks(world, _both, schedule, options)
    for mode in (0, 1):
        check_against_one_process([rank[mode] for rank in ranks], 2)
    for by_schedule, at_end in ranks:
        assert by_schedule["loss"] == at_end["loss"]
        # A whole backward adds what it has computed by itself, which may round otherwise.
        if SCHEDULES[schedule].splits_backward:
            assert all(torch.equal(grad, by_schedule["grads"][name]) for name, grad in at_end["grads"].items())
    # Forward, dx and dW of each layer and the head, in each micro-batch of two passes, once.
    num_gemms = 3 * (LAYERS + 1) * options.get("micro_batches", MICRO_BATCHES) * 2
    assert [sum(rank[mode]["gemms"] for rank in ranks) for mode in (0, 1)] == [num_gemms] * 2


def _sums(rank: int, world: int) -> tuple[list[str], list[bool]]:
    """The order in which sums leave, and whether the first layer's had when a gradient of the last came in."""
    pipeline = make_pipeline("1f1b", None, weight_gradients="at_end")
    (stage,) = pipeline.stages.values()
    buckets = GradientBuckets(pipeline.named_parameters(), dp_group=dist.group.WORLD, bucket_mb=0.0002)
    early = []

    def slowly(weight: Tensor, gradient: WeightGradient) -> None:
        time.sleep(0.01)
        buckets.accumulate(weight, gradient)
        if weight is stage.get("output.weight"):
            early.append(buckets._slots[stage.get("layers.0.weight")].bucket.launched)

    pipeline.accumulate_into(slowly)
    for step in range(3):
        pipeline.train_step(**data(step), loss_fn=mean_loss)
        buckets.finish()
        buckets.zero()
    names = [buckets._buckets[piece.transfer].slots[0].name for piece in buckets._queue._order]
    return [name for name in dict.fromkeys(names) if name.endswith(".weight")], early


def test_sums_leave_layer_by_layer_while_later_weight_gradients_are_computed():
    order = ["embedding.weight", *(f"layers.{layer}.weight" for layer in range(LAYERS)), "output.weight"]
    for names, early in run_ranks(2, _sums):
        assert names == order
        # The first step counts.
        assert early == [False] * MICRO_BATCHES + [True] * 2 * MICRO_BATCHES
