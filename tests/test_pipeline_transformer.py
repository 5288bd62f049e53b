"""Pipeline stages of the real model, with tensor parallelism inside, against one process."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_as_accurate, run_ranks
from torch import Tensor, nn

from fusedcomm.comm.mesh import build_mesh
from fusedcomm.comm.record import recording
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.nn import TensorParallel, Transformer, TransformerConfig, vocab_parallel_cross_entropy
from fusedcomm.nn.config import layer_flops
from fusedcomm.nn.layout import layout_of
from fusedcomm.ops.wgrad import DeferWgrad
from fusedcomm.parallel import GradientBuckets, Optimizer, Pipeline, TiedWeights, tied_group
from fusedcomm.parallel.table import WeightGradients

ROWS, MICRO_BATCHES, SEQUENCE = 4, 2, 7
LLAMA = TransformerConfig.llama(
    vocab_size=12, hidden=16, layers=4, heads=4, kv_heads=2, ffn_hidden=24, seq_len=SEQUENCE
)
GPT2 = TransformerConfig.gpt2(vocab_size=12, hidden=16, layers=4, heads=4, seq_len=SEQUENCE, dropout=0.1)
CONFIGS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "gpt2_recomputed": replace(GPT2, checkpointing="full"),
}


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "inputs": torch.randint(12, (ROWS, SEQUENCE), generator=generator),
        "labels": torch.randint(12, (ROWS, SEQUENCE), generator=generator),
        "sample_ids": torch.arange(ROWS) + 100,
        "step": torch.full((ROWS,), 3),
    }


def mean_loss(logits: Tensor, labels: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    losses = vocab_parallel_cross_entropy(logits, labels.t(), group=group)
    return losses.sum() / (ROWS * SEQUENCE)


def _one_process(rank: int, world: int, name: str, dtype: torch.dtype) -> dict[str, Any]:
    group = dist.group.WORLD
    model = Transformer(CONFIGS[name], tp=TensorParallel(group), dtype=dtype)
    batch = data()
    labels = batch.pop("labels")
    loss = mean_loss(model(batch.pop("inputs"), **batch), labels, group=group)
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    norm = sum(grad.double().square().sum() for grad in grads.values()).sqrt()
    if CONFIGS[name].tied_embeddings:
        grads["output.weight"] = grads["embedding.weight"]
    return {"loss": loss.item(), "grads": grads, "norm": norm.item()}


def _on_the_mesh(
    rank: int,
    world: int,
    name: str,
    schedule: str,
    micro_batches: int = MICRO_BATCHES,
    weight_gradients: WeightGradients = "by_schedule",
) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _step_on_the_mesh(name, schedule, micro_batches, weight_gradients)


def _step_on_the_mesh(
    name: str, schedule: str, micro_batches: int, weight_gradients: WeightGradients
) -> dict[str, Any]:
    mesh = build_mesh(pp=2, dp=1, tp=2, timeout_s=30)
    config = CONFIGS[name]

    def build_stage(layers: range, *, first: bool, last: bool, defer_wgrad: DeferWgrad | None) -> nn.Module:
        tp = TensorParallel(mesh.tp_group, defer_wgrad=defer_wgrad)
        return Transformer(config, tp=tp, layers=layers, first=first, last=last)

    flops = layer_flops(config)
    rows = chunk_sizes(SEQUENCE, mesh.tp)[mesh.tp_rank]
    pipeline = Pipeline(
        build_stage,
        layer_costs=[flops.layer] * config.layers,
        first_cost=flops.embedding,
        last_cost=flops.head,
        group=mesh.pp_group,
        micro_batches=micro_batches,
        input_like=torch.empty(1, SEQUENCE, dtype=torch.int64, device="meta"),
        hidden_like=torch.empty(rows, 1, config.hidden, device="meta"),
        batch_dim=1,
        schedule=schedule,
        weight_gradients=weight_gradients,
    )
    named = dict(pipeline.named_parameters())
    tied = None
    if config.tied_embeddings:
        group = tied_group(mesh, last_stage_rank=pipeline.rank_of_stage[-1], timeout_s=30)
        tied = TiedWeights(first=named.get("embedding.weight"), last=named.get("output.weight"), group=group)
    buckets = GradientBuckets(named.items(), dp_group=mesh.dp_group, tp_group=mesh.tp_group)
    pipeline.accumulate_into(buckets.accumulate)
    optimizer = Optimizer(named.items(), mesh=mesh, clip_norm=None, counted_elsewhere=["output.weight"] if tied else [])
    with recording() as record:
        loss = pipeline.train_step(**data(), loss_fn=partial(mean_loss, group=mesh.tp_group))
    buckets.finish()
    if tied is not None:
        tied.sum_gradients()
    return {
        "loss": loss.item(),
        "tp_rank": mesh.tp_rank,
        "grads": {name: (param.grad, layout_of(param).shard_dim) for name, param in named.items()},
        "norm": optimizer.step(0, lr=0.0).grad_norm,
        "op_bytes": sum(event.num_bytes for event in record.events if "matmul" in event.name),
        "op_calls": record.paths,
    }


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("llama", "1f1b"),
        ("llama", "zbv"),
        ("gpt2", "interleaved"),
        ("gpt2", "zbv"),
        ("gpt2_recomputed", "zero_bubble"),
    ],
)
def test_transformer_on_tp_and_pp_matches_one_process(name, schedule):
    (exact,) = run_ranks(1, _one_process, name, torch.float64)
    (plain,) = run_ranks(1, _one_process, name, torch.float32)
    ranks = run_ranks(4, _on_the_mesh, name, schedule)
    assert sum(rank["loss"] for rank in ranks if rank["tp_rank"] == 0) == pytest.approx(exact["loss"], rel=1e-6)
    seen = set()
    for rank in ranks:
        assert rank["norm"] == ranks[0]["norm"] == pytest.approx(exact["norm"], rel=1e-6)
        for name, (grad, shard_dim) in rank["grads"].items():
            whole, rough = exact["grads"][name], plain["grads"][name]
            if shard_dim is not None:
                whole, rough = (full.chunk(2, dim=shard_dim)[rank["tp_rank"]] for full in (whole, rough))
            assert_as_accurate(grad, whole, rough, name=name)
            seen.add(name)
    assert seen == set(exact["grads"])


def test_a_split_backward_calls_and_sends_no_more_than_a_whole_one():
    """A function that gives both gradients at once would do all of it twice: once for each half."""
    totals = []
    split = [(schedule, "by_schedule") for schedule in ("zero_bubble", "zbv", "dualpipev")]
    for schedule, weight_gradients in (("1f1b", "by_schedule"), ("1f1b", "at_end"), *split):
        # Enough for DualPipeV.
        ranks = run_ranks(4, _on_the_mesh, "llama", schedule, 4, weight_gradients)
        calls = sum((rank["op_calls"] for rank in ranks), Counter())
        totals.append((sum(rank["op_bytes"] for rank in ranks), calls))
    assert totals[0][0] > 0
    assert all(total == totals[0] for total in totals)
