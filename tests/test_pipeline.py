"""Pipelines: every schedule gives the gradients of one process, does every GEMM once, or is refused with numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_as_accurate, run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.comm.mesh import Mesh, build_mesh
from fusedcomm.ops.wgrad import DeferWgrad, local_linear
from fusedcomm.parallel import (
    SCHEDULES,
    GradientBuckets,
    Optimizer,
    Pipeline,
    TiedWeights,
    WgradQueue,
    tied_group,
)

VOCAB, HIDDEN, SEQUENCE, LAYERS = 11, 6, 3, 8
ROWS, MICRO_BATCHES = 8, 4


class Stage(nn.Module):
    """Embedding, residual layers, head; an element of the output depends on its row's sample id and step."""

    def __init__(self, layers: range, *, first: bool, last: bool, defer_wgrad: DeferWgrad | None) -> None:
        super().__init__()
        self.defer_wgrad = defer_wgrad
        weights = {f"layers.{layer}.weight": (HIDDEN, HIDDEN) for layer in layers}
        weights |= {f"layers.{layer}.scale": (HIDDEN,) for layer in layers}
        weights |= {"embedding.weight": (VOCAB, HIDDEN)} if first else {}
        weights |= {"output.weight": (VOCAB, HIDDEN)} if last else {}
        self.layers, self.first, self.last = layers, first, last
        self.weights = nn.ParameterDict()
        for name, shape in weights.items():
            # The value depends on the name alone; the tied copy has its twin's.
            generator = torch.Generator().manual_seed(sum(map(ord, name.replace("output", "embedding"))))
            self.weights[name.replace(".", "/")] = nn.Parameter(torch.randn(shape, generator=generator) * 0.3)

    def get(self, name: str) -> nn.Parameter:
        return self.weights[name.replace(".", "/")]

    def named_parameters(self, *args: Any, **kwargs: Any):
        for name, param in self.weights.items():
            yield name.replace("/", "."), param

    def forward(self, x: Tensor, sample_ids: Tensor | None = None, step: Tensor | None = None) -> Tensor:
        if self.first:
            x = F.embedding(x, self.get("embedding.weight"))
        for layer in self.layers:
            noise = 0 if sample_ids is None else torch.sin(sample_ids + step + layer)[:, None, None]
            wide = local_linear(
                x * self.get(f"layers.{layer}.scale"), self.get(f"layers.{layer}.weight"), None, self.defer_wgrad
            )
            x = x + torch.tanh(wide + noise)
        return local_linear(x, self.get("output.weight"), None, self.defer_wgrad) if self.last else x


def data(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "inputs": torch.randint(VOCAB, (rows, SEQUENCE), generator=generator),
        "labels": torch.randint(VOCAB, (rows, SEQUENCE), generator=generator),
        "sample_ids": torch.arange(rows) + rows * step,
        "step": torch.full((rows,), step),
    }


def mean_loss(output: Tensor, labels: Tensor, num_tokens: int = ROWS * SEQUENCE) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens


def make_pipeline(schedule: str, group: dist.ProcessGroup | None, **options: Any) -> Pipeline:
    given = {
        "layer_costs": [1.0] * LAYERS,
        "micro_batches": MICRO_BATCHES,
        "input_like": torch.empty(ROWS // MICRO_BATCHES, SEQUENCE, dtype=torch.int64, device="meta"),
        "hidden_like": torch.empty(ROWS // MICRO_BATCHES, SEQUENCE, HIDDEN, device="meta"),
        "schedule": schedule,
    }
    return Pipeline(Stage, group=group, **given | options)


def one_process(dtype: torch.dtype, *steps: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients summed over these steps, in one process without micro-batches."""
    model = Stage(range(LAYERS), first=True, last=True, defer_wgrad=None).to(dtype)
    total = 0.0
    for step in steps:
        batch = data(step)
        labels = batch.pop("labels")
        loss = mean_loss(model(batch.pop("inputs"), **batch), labels)
        loss.backward()
        total += loss.item()
    return total, {name: param.grad for name, param in model.named_parameters()}


class CountGemms(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
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
    ("schedule", "micro_batches"), [("gpipe", 1), ("interleaved", 1), ("zero_bubble", 1), ("zbv", 1), ("zbv", 2)]
)
def test_fewer_micro_batches_than_stages_match_one_process(schedule, micro_batches):
    rows = ROWS // micro_batches
    options = {
        "micro_batches": micro_batches,
        "input_like": torch.empty(rows, SEQUENCE, dtype=torch.int64, device="meta"),
        "hidden_like": torch.empty(rows, SEQUENCE, HIDDEN, device="meta"),
    }
    check_against_one_process(run_ranks(2, _run, schedule, 1, options), 1)


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
        assert buckets._num_launched == (0 if step == 0 else len(buckets._buckets))
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


def _frozen_first_stage(rank: int, world: int, schedule: str) -> dict[str, Tensor | None]:
    pipeline = make_pipeline(schedule, dist.group.WORLD)
    if pipeline.holds_first_stage:
        pipeline.stages[0].requires_grad_(False)
    pipeline.train_step(**data(0), loss_fn=mean_loss)
    return {name: param.grad for name, param in pipeline.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_stage_with_nothing_to_train_leaves_the_others_right(schedule):
    _, exact = one_process(torch.float64, 0)
    _, plain = one_process(torch.float32, 0)
    frozen = set()
    for grads in run_ranks(2, _frozen_first_stage, schedule):
        for name, grad in grads.items():
            if grad is None:
                frozen.add(name)
            else:
                assert_as_accurate(grad, exact[name], plain[name], name=name)
    assert "embedding.weight" in frozen
    assert "output.weight" not in frozen


def test_wgrad_queue_computes_each_gradient_once_and_late():
    added, computed = [], []
    queue = WgradQueue(lambda weight, grad: added.append((weight, grad)))
    weights = [torch.zeros(1) for _ in range(3)]

    def put(index: int) -> None:
        queue.put(weights[index], lambda: computed.append(index) or torch.full((1,), float(index)))

    put(0)
    put(1)
    first = queue.take()
    put(2)
    second = queue.take()
    assert (len(queue), computed) == (0, [])
    second()
    assert computed == [2]
    first()
    first()
    assert computed == [2, 0, 1]
    assert [(weight is weights[int(grad)], int(grad)) for weight, grad in added] == [(True, 2), (True, 0), (True, 1)]


def tied_pipeline(mesh: Mesh, schedule: str) -> tuple[Pipeline, TiedWeights, list[str]]:
    pipeline = make_pipeline(schedule, mesh.pp_group)
    named = dict(pipeline.named_parameters())
    group = tied_group(mesh, last_stage_rank=pipeline.rank_of_stage[-1], timeout_s=30)
    tied = TiedWeights(first=named.get("embedding.weight"), last=named.get("output.weight"), group=group)
    tied.copy_weights()
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


def _wrong_batch(rank: int, world: int, change: str) -> None:
    options = {"hidden_like": torch.empty(2, SEQUENCE, HIDDEN + 1, device="meta")} if change == "hidden" else {}
    pipeline = make_pipeline("1f1b", dist.group.WORLD, **options)
    batch = data(0)
    if change == "rows":
        batch = {name: tensor[:7] for name, tensor in batch.items()}
    if change == "columns":
        batch["inputs"] = batch["inputs"][:, :2]
    pipeline.train_step(**batch, loss_fn=mean_loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rows", "inputs has 7 rows but 4 micro-batches of 2 make 8"),
        ("columns", "inputs are [8, 2] torch.int64 but a micro-batch was announced as [2, 3]"),
    ],
)
def test_wrong_batch_is_rejected_on_all_ranks_before_anything_is_sent(change, message):
    for error in run_ranks(2, _wrong_batch, change, timeout_s=20, return_exceptions=True):
        assert isinstance(error, ValueError)
        assert message in str(error)


def test_wrong_hidden_like_is_named():
    first, _ = run_ranks(2, _wrong_batch, "hidden", return_exceptions=True, fresh_timeout_s=5)
    assert isinstance(first, ValueError)
    assert "a stage returned [2, 3, 6] torch.float32 but hidden_like is [2, 3, 7]" in str(first)
