"""Pipelines: every schedule gives the gradients of one process, does every GEMM once, or is refused with numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_as_accurate, run_ranks
from pipeline_helpers import HIDDEN, LAYERS, MICRO_BATCHES, SEQUENCE, data, make_pipeline, mean_loss, one_process
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.comm.mesh import Mesh, build_mesh
from fusedcomm.errors import PeerError
from fusedcomm.parallel import (
    SCHEDULES,
    GradientBuckets,
    Optimizer,
    Pipeline,
    TiedWeights,
    tied_group,
)


class CountGemms(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.addmm.default, aten.addmm_.default, aten.bmm.default):
            self.counts["gemm"] += 1
        return func(*args, **(kwargs or {}))


def _run(rank: int, world: int, schedule: str, accumulation: int, options: dict[str, Any]) -> dict[str, Any]:
    pipeline = make_pipeline(schedule, dist.group.WORLD, **options)
    batches = [data(step) for step in range(accumulation)]
    before = pipeline.eval_step(**batches[0], loss_fn=mean_loss)
    with CountGemms() as gemms:
        loss = sum(pipeline.train_step(**batch, loss_fn=mean_loss).item() for batch in batches)
    # Evaluation in between leaves the gradients alone, and training has not changed the weights.
    after = pipeline.eval_step(**batches[0], loss_fn=lambda output, labels: mean_loss(output, labels) * torch.ones(2))
    return {
        "loss": loss,
        "gemms": gemms.counts["gemm"],
        "grads": {name: param.grad for name, param in pipeline.named_parameters()},
        "eval": None if before is None or after is None else [before, *after],
    }


def check_against_one_process(ranks: list[dict[str, Any]], accumulation: int) -> None:
    steps = range(accumulation)
    loss, exact = one_process(torch.float64, *steps)
    _, plain = one_process(torch.float32, *steps)
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(loss, rel=1e-6)
    evaluated = [value for rank in ranks if rank["eval"] is not None for value in rank["eval"]]
    assert len(evaluated) == 3
    assert [value.item() for value in evaluated] == pytest.approx([one_process(torch.float64, 0)[0]] * 3, rel=1e-6)
    names = [name for rank in ranks for name in rank["grads"]]
    assert sorted(names) == sorted(exact)
    for rank in ranks:
        for name, grad in rank["grads"].items():
            assert_as_accurate(grad, exact[name], plain[name], name=name)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_matches_one_process(schedule, accumulation):
    ranks = run_ranks(2, _run, schedule, accumulation, {})
    check_against_one_process(ranks, accumulation)
    # Forward, dx and dW of each layer and the head, in each micro-batch, once.
    assert sum(rank["gemms"] for rank in ranks) == 3 * (LAYERS + 1) * MICRO_BATCHES * accumulation


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble", "zbv"])
def test_schedule_matches_one_process_on_four_ranks(schedule):
    check_against_one_process(run_ranks(4, _run, schedule, 1, {}), 1)


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("zero_bubble", 1), ("zbv", 1), ("zbv", 2)],
)
def test_fewer_micro_batches_than_stages_match_one_process(schedule, micro_batches):
    check_against_one_process(run_ranks(2, _run, schedule, 1, {"micro_batches": micro_batches}), 1)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_single_rank_runs_a_plain_loop(schedule):
    check_against_one_process([_single(schedule)], 1)


def _single(schedule: str) -> dict[str, Any]:
    pipeline = make_pipeline(schedule, None)
    batch = data(0)
    loss = pipeline.train_step(**batch, loss_fn=mean_loss).item()
    value = pipeline.eval_step(**batch, loss_fn=mean_loss)
    grads = {name: param.grad for name, param in pipeline.named_parameters()}
    return {"loss": loss, "grads": grads, "eval": [value] * 3}


def _uneven_batches(rank: int, world: int, schedule: str) -> dict[str, Tensor]:
    pipeline = make_pipeline(schedule, dist.group.WORLD)
    # Micro-batches of 2, 2, 2, 1 and of 2, 1, 1, 1 samples, and in between an evaluation of 3, 3, 3, 3.
    for rows in (7, 12, 5):
        batch = {name: tensor[:rows] for name, tensor in data(rows, 12).items()}
        run = pipeline.eval_step if rows == 12 else pipeline.train_step
        run(**batch, loss_fn=mean_loss)
    return {name: param.grad for name, param in pipeline.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_batches_that_do_not_divide_match_one_process(schedule):
    grads = {}
    for dtype in (torch.float64, torch.float32):
        total: dict[str, Tensor] = {}
        for rows in (7, 5):
            _, found = one_process(dtype, rows, rows=12, used=rows)
            total = {name: grad + total.get(name, 0) for name, grad in found.items()}
        grads[dtype] = total
    seen = set()
    for rank in run_ranks(2, _uneven_batches, schedule):
        for name, grad in rank.items():
            assert_as_accurate(grad, grads[torch.float64][name], grads[torch.float32][name], name=name)
            seen.add(name)
    assert seen == set(grads[torch.float64])


def _uneven_split(rank: int, world: int) -> dict[str, Any]:
    options = {"split": [1, 7], "first_cost": 0.0}
    pipeline = make_pipeline("gpipe", dist.group.WORLD, **options)
    assert pipeline.layers_of_stage == [range(1), range(1, 8)]
    return _run(rank, world, "gpipe", 1, options)


def test_explicit_split_matches_one_process():
    check_against_one_process(run_ranks(2, _uneven_split), 1)


def _with_data_parallel(rank: int, world: int, schedule: str, accumulation: int) -> list[dict[str, Tensor]]:
    mesh = build_mesh(pp=2, dp=2, tp=1, timeout_s=30)
    pipeline = make_pipeline(schedule, mesh.pp_group, micro_batches=2)
    buckets = GradientBuckets(pipeline.named_parameters(), dp_group=mesh.dp_group, bucket_mb=0.0002)
    pipeline.accumulate_into(buckets.accumulate)
    steps = []
    for step in range(2):
        for part in range(accumulation):
            batch = data(step * accumulation + part)
            mine = {name: tensor.chunk(2)[mesh.dp_rank] for name, tensor in batch.items()}
            pipeline.train_step(**mine, loss_fn=mean_loss)
        # Learnt in the first step; from then on the last contribution launches each bucket.
        assert sum(bucket.launched for bucket in buckets._buckets) == (0 if step == 0 else len(buckets._buckets))
        buckets.finish()
        steps.append({name: param.grad.clone() for name, param in pipeline.named_parameters()})
        buckets.zero()
    assert len(buckets._buckets) > 2
    return steps


@pytest.mark.parametrize(("schedule", "accumulation"), [("1f1b", 1), ("zero_bubble", 1), ("zbv", 2)])
def test_schedule_with_data_parallel_matches_one_process(schedule, accumulation):
    """Split backwards leave torch's DDP without reduction (pytorch#144530); the ranks' data differ here."""
    ranks = run_ranks(4, _with_data_parallel, schedule, accumulation)
    for step in range(2):
        parts = range(step * accumulation, (step + 1) * accumulation)
        _, exact = one_process(torch.float64, *parts)
        _, plain = one_process(torch.float32, *parts)
        # tp is innermost, then dp: ranks 0 and 1 share a stage.
        for first, second in ((0, 1), (2, 3)):
            for name, grad in ranks[first][step].items():
                assert torch.equal(grad, ranks[second][step][name])
                assert_as_accurate(grad, exact[name], plain[name], name=name)
        assert {*ranks[0][step], *ranks[2][step]} == set(exact)


def _frozen_first_stage(rank: int, world: int, schedule: str, weight_gradients: str) -> dict[str, Tensor | None]:
    pipeline = make_pipeline(schedule, dist.group.WORLD, weight_gradients=weight_gradients)
    if pipeline.holds_first_stage:
        pipeline.stages[0].requires_grad_(False)
    pipeline.train_step(**data(0), loss_fn=mean_loss)
    return {name: param.grad for name, param in pipeline.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "weight_gradients"), [("1f1b", "by_schedule"), ("zbv", "by_schedule"), ("1f1b", "at_end")]
)
def test_a_stage_with_nothing_to_train_leaves_the_others_right(schedule, weight_gradients):
    _, exact = one_process(torch.float64, 0)
    _, plain = one_process(torch.float32, 0)
    frozen = set()
    for grads in run_ranks(2, _frozen_first_stage, schedule, weight_gradients):
        for name, grad in grads.items():
            if grad is None:
                frozen.add(name)
            else:
                assert_as_accurate(grad, exact[name], plain[name], name=name)
    assert "embedding.weight" in frozen
    assert "output.weight" not in frozen


def tied_pipeline(mesh: Mesh, schedule: str) -> tuple[Pipeline, TiedWeights, list[str]]:
    pipeline = make_pipeline(schedule, mesh.pp_group)
    named = dict(pipeline.named_parameters())
    group = tied_group(mesh, last_stage_rank=pipeline.rank_of_stage[-1], timeout_s=30)
    tied = TiedWeights(first=named.get("embedding.weight"), last=named.get("output.weight"), group=group)
    return pipeline, tied, ["output.weight"]


def _tied(rank: int, world: int, schedule: str) -> dict[str, Any]:
    mesh = build_mesh(pp=2, dp=1, tp=1, timeout_s=30)
    pipeline, tied, elsewhere = tied_pipeline(mesh, schedule)
    buckets = GradientBuckets(pipeline.named_parameters(), dp_group=mesh.dp_group)
    pipeline.accumulate_into(buckets.accumulate)
    named = dict(pipeline.named_parameters())
    optimizer = Optimizer(named.items(), mesh=mesh, clip_norm=0.1, counted_elsewhere=elsewhere)
    norms = []
    grads = {}
    for step in range(3):
        pipeline.train_step(**data(step), loss_fn=mean_loss)
        buckets.finish(set_grad=False)
        tied.sum_gradients()
        grads = grads or {name: param.main_grad.clone() for name, param in named.items()}
        norms.append(optimizer.step(step, lr=0.01).grad_norm)
        buckets.zero()
    return {"grads": grads, "weights": {name: p.detach() for name, p in named.items()}, "norms": norms}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_tied_embedding_over_stages_stays_one_weight(schedule):
    ranks = run_ranks(2, _tied, schedule)
    _, exact = one_process(torch.float64, 0)
    _, plain = one_process(torch.float32, 0)
    for grads in (exact, plain):
        grads["embedding.weight"] = grads["output.weight"] = grads["embedding.weight"] + grads["output.weight"]
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
        for name, grad in rank["grads"].items():
            assert_as_accurate(grad, exact[name], plain[name], name=name)
    norm = sum(grad.square().sum() for name, grad in exact.items() if name != "output.weight").sqrt().item()
    assert ranks[0]["norms"][0] == pytest.approx(norm, rel=1e-6)
    weights = {name: weight for rank in ranks for name, weight in rank["weights"].items()}
    assert torch.equal(weights["embedding.weight"], weights["output.weight"])


def _wrong_batch(rank: int, world: int, change: str, wrong_ranks: list[int]) -> None:
    options = {"hidden_like": torch.empty(1, SEQUENCE, HIDDEN + 1, device="meta")} if change == "hidden" else {}
    pipeline = make_pipeline("1f1b", dist.group.WORLD, **options)
    batch = data(0)
    if rank in wrong_ranks:
        if change == "rows":
            batch = {name: tensor[:3] for name, tensor in batch.items()}
        if change == "labels":
            batch["labels"] = batch["labels"][:7]
        if change == "columns":
            batch["inputs"] = batch["inputs"][:, :2]
        if change == "fewer":
            batch = {name: tensor[:6] for name, tensor in batch.items()}
    pipeline.train_step(**batch, loss_fn=mean_loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rows", "inputs have 3 samples, which cannot be cut into 4 micro-batches of at least one"),
        ("labels", "labels has 7 rows but inputs have 8"),
        ("columns", "inputs are [8, 2] torch.int64 but were announced as [any, 3] torch.int64"),
    ],
)
def test_wrong_batch_is_rejected_on_all_ranks_before_anything_is_sent(change, message):
    for error in run_ranks(2, _wrong_batch, change, [0, 1], return_exceptions=True):
        assert isinstance(error, ValueError)
        assert message in str(error)


def test_a_rank_hears_at_once_that_another_has_refused_its_batch():
    error, heard = run_ranks(2, _wrong_batch, "rows", [0], return_exceptions=True)
    assert isinstance(error, ValueError)
    assert isinstance(heard, PeerError)
    assert "inputs have 3 samples, which cannot be cut into 4 micro-batches" in str(heard)


def test_ranks_with_batches_of_different_size_hear_of_it():
    for error in run_ranks(2, _wrong_batch, "fewer", [1], return_exceptions=True):
        assert isinstance(error, PeerError)
        assert "samples 8 in 4" in str(error)
        assert "samples 6 in 4" in str(error)


def test_wrong_hidden_like_is_named():
    first, _ = run_ranks(2, _wrong_batch, "hidden", [], return_exceptions=True, fresh_timeout_s=2)
    assert isinstance(first, ValueError)
    assert "stage 0 returned [2, 3, 6] torch.float32 but what was announced for micro-batch 0 is [2, 3, 7]" in str(
        first
    )
