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

from fusedcomm.comm.mesh import build_mesh
from fusedcomm.ops.wgrad import WeightGradient
from fusedcomm.parallel import SCHEDULES, GradientBuckets, WgradQueue
from fusedcomm.parallel.wgrad import PutOff


def put_off(queue: WgradQueue, weights: list[Tensor], uses: tuple[int, ...], micro_batch: int) -> PutOff:
    """A backward that comes to these weights in this order."""
    for weight in uses:
        queue(weights[weight], WeightGradient(torch.ones(1, 1), [torch.full((1, 1), float(micro_batch))]))
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


def test_wgrad_queue_computes_what_is_put_off_together_with_one_more_backward():
    weights = [torch.zeros(1, 1) for _ in range(3)]
    added = []
    queue = WgradQueue(lambda weight, gradient: added.append((weight, int(gradient.compute()))))
    earlier = [put_off(queue, weights, (2, 1, 0), index) for index in range(2)]
    with queue.computing_with(earlier):
        # Weight 2 is used twice, weight 0 not at all.
        assert put_off(queue, weights, (2, 2, 1), 2) == []
    assert len(queue) == 0
    places = [next(i for i, w in enumerate(weights) if w is weight) for weight, _ in added]
    assert places == [2, 2, 2, 2, 1, 1, 1, 0, 0]
    assert [index for _, index in added] == [0, 1, 2, 2, 0, 1, 2, 0, 1]
    assert put_off(queue, weights, (0,), 3) != []


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


def _sums(rank: int, world: int) -> tuple[list[str], list[tuple[str, int]]]:
    """Weights in the order in which their sums leave, and each with how many had left when its last gradient came."""
    mesh = build_mesh(pp=world // 2, dp=2, tp=1, timeout_s=30)
    pipeline = make_pipeline("1f1b", mesh.pp_group, weight_gradients="at_end")
    named = dict(pipeline.named_parameters())
    names = {param: name for name, param in named.items()}
    buckets = GradientBuckets(named.items(), dp_group=mesh.dp_group, bucket_mb=0.0002)
    launched: dict[str, int] = {}

    def slowly(weight: Tensor, gradient: WeightGradient) -> None:
        time.sleep(0.01)
        buckets.accumulate(weight, gradient)
        launched[names[weight]] = sum(slot.bucket.launched for slot in buckets.slots if slot.name.endswith("weight"))

    pipeline.accumulate_into(slowly)
    for step in range(3):
        pipeline.train_step(**data(step), loss_fn=mean_loss)
        buckets.finish()
        buckets.zero()
    left = [buckets._buckets[piece.transfer].slots[0].name for piece in buckets._transfers._queue._order]
    return [name for name in dict.fromkeys(left) if name.endswith("weight")], list(launched.items())


def test_sums_leave_layer_by_layer_while_other_weight_gradients_are_computed():
    first = [f"layers.{layer}.weight" for layer in (3, 2, 1, 0)]
    last = [*(f"layers.{layer}.weight" for layer in (4, 5, 6, 7)), "output.weight"]
    # Ranks 0 and 1 share the first stage, whose weights are complete as its last backward comes to them.
    for order, (left, launched) in zip([first, first, last, last], run_ranks(4, _sums)):
        # The embedding's is ready together with the first layer's.
        assert [name for name in left if name != "embedding.weight"] == order
        assert launched == [(name, index + 1) for index, name in enumerate(order)]


def test_the_last_backward_of_a_single_stage_computes_all_weight_gradients():
    pipeline = make_pipeline("1f1b", None, weight_gradients="at_end")
    (stage,) = pipeline.stages.values()
    order = []

    def accumulate(weight: Tensor, gradient: WeightGradient) -> None:
        order.append(next(name for name, param in stage.named_parameters() if param is weight))

    pipeline.accumulate_into(accumulate)
    pipeline.train_step(**data(0), loss_fn=mean_loss)
    layers = [f"layers.{layer}.weight" for layer in range(LAYERS)]
    assert order == [name for name in ["output.weight", *layers[::-1]] for _ in range(MICRO_BATCHES)]
