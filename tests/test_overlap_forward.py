"""Sums that arrive during the next forward: the same weights as without, never stale, refused where they would be."""

from __future__ import annotations

import copy
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from torch import Tensor, nn

from fusedcomm.parallel import GradientBuckets, Optimizer
from fusedcomm.train.config import ConfigError, parse_config
from fusedcomm.train.data import open_data
from fusedcomm.train.layout import validate_for_world
from fusedcomm.train.loop import mesh_of
from fusedcomm.train.modes import REFUSALS, markdown_table
from fusedcomm.train.trainer import Trainer

TINY = {
    "model": {"layers": 3, "hidden": 32, "heads": 4, "ffn_hidden": 48, "vocab_size": 256},
    "data": {"path": str(Path(__file__)), "seq_len": 16},
    "train": {"steps": 6, "global_batch": 8, "lr": 1e-2, "warmup_steps": 1, "clip_norm": None},
    "parallel_config": {"tensor_parallel": {"method": "chunked"}, "data_parallel": {"size": 2, "bucket_mb": 0.01}},
}


def changed(path: str, value: Any, raw: dict | None = None) -> dict:
    """The configuration with one key set."""
    raw = copy.deepcopy(TINY if raw is None else raw)
    *parents, last = path.split(".")
    section = raw
    for parent in parents:
        section = section.setdefault(parent, {})
    section[last] = value
    return raw


OVERLAP = "parallel_config.data_parallel.overlap"
FORWARD = changed(OVERLAP, "backward+forward")


def _trajectory(
    rank: int, world: int, raw: dict, jitter_seed: int | None
) -> tuple[list[float], float, dict[str, Tensor]]:
    """Losses of every step, the validation loss in the middle, and the weights at the end."""
    config = parse_config(raw)
    validate_for_world(config, world)
    trainer = Trainer(config, mesh_of(config, torch.device("cpu")))
    data = open_data(config)
    jitter = None if jitter_seed is None else random.Random(jitter_seed + rank)
    losses, validation = [], 0.0
    for step in range(config.train.steps):
        if jitter is not None:
            time.sleep(jitter.random() * 0.05)
        batch = data.train.batch(step * config.train.global_batch, trainer.mesh.dp_rank)
        losses.append(trainer.gradients(step, batch.pieces(config.train.accumulation)))
        trainer.update(step)
        if step == 2:
            passes = list(data.validation.passes(trainer.mesh.dp_rank))
            validation = trainer.evaluate(passes[:1]).loss
    trainer.settle()
    return losses, validation, {name: param.detach().clone() for name, param in trainer.params.items()}


def assert_same_trajectory(raw: dict, other: dict, world: int, jitter_seed: int | None = None) -> None:
    for expected, found in zip(
        run_ranks(world, _trajectory, raw, None, timeout_s=180),
        run_ranks(world, _trajectory, other, jitter_seed, timeout_s=180),
    ):
        assert found[:2] == expected[:2]
        for name, weight in expected[2].items():
            assert torch.equal(found[2][name], weight), name


def test_sums_in_the_next_forward_change_no_bit_of_losses_evaluation_and_weights():
    assert_same_trajectory(TINY, FORWARD, 2, jitter_seed=1)


def test_sums_in_the_next_forward_change_no_bit_with_a_split_backward_and_accumulation():
    raw = changed("parallel_config.pipeline_parallel", {"depth": 2, "micro_batches": 2, "schedule": "zbv"})
    raw = changed("model.layers", 4, changed("train.accumulation", 2, raw))
    assert_same_trajectory(raw, changed(OVERLAP, "backward+forward", raw), 4)


def test_buckets_that_adapt_train_alike():
    raw = changed("parallel_config.data_parallel.bucket_mb", None)
    for _, _, weights in run_ranks(2, _trajectory, raw, None):
        for _, _, fixed in run_ranks(2, _trajectory, TINY, None)[:1]:
            for name, weight in fixed.items():
                # Two summands: their order and the cuts between them change nothing.
                assert torch.equal(weights[name], weight), name


def _stale(rank: int, world: int) -> str:
    """The second layer is not given to the buckets, so nothing makes its forward wait."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = Optimizer(model.named_parameters(), clip_norm=None)
    buckets = GradientBuckets(model.named_parameters(), dp_group=dist.group.WORLD, layers=[model[0]], bucket_mb=1e-5)
    model(torch.ones(2, 3)).sum().backward()
    buckets.finish_later(lambda names: optimizer.update(names, 0, lr=0.1))
    buckets.zero()
    try:
        model(torch.ones(2, 3)).sum().backward()
    except RuntimeError as error:
        buckets.settle()
        return str(error)
    return ""


def test_a_parameter_that_was_used_too_early_is_named():
    for message in run_ranks(2, _stale):
        assert "1.bias was used before its update" in message or "1.weight was used before its update" in message
        assert "layers=" in message


def _non_finite(rank: int, world: int) -> tuple[str, bool]:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Optimizer([("weight", weight)], clip_norm=None)
    buckets = GradientBuckets([("weight", weight)], dp_group=dist.group.WORLD)
    (weight * (torch.nan if rank == 0 else 1.0)).sum().backward()
    buckets.finish_later(lambda names: optimizer.update(names, 5, lr=0.1))
    try:
        buckets.settle()
    except FloatingPointError as error:
        return str(error), torch.equal(weight, torch.ones(3))
    return "", False


def test_a_non_finite_sum_stops_every_rank_before_the_weights_take_it():
    for message, unchanged in run_ranks(2, _non_finite):
        assert "step 5 are not finite: weight" in message
        assert unchanged


REFUSED = {
    "train.clip_norm": changed("train.clip_norm", 1.0, FORWARD),
    "train.precision: fp16": changed("train.precision", "fp16", FORWARD),
    "tp_sync: interleave or ladder": changed("parallel_config.tensor_parallel.tp_sync", "ladder", FORWARD),
    "tied embeddings over pipeline stages": changed(
        "model.tied_embeddings", True, changed("parallel_config.pipeline_parallel", {"depth": 2}, FORWARD)
    ),
}


OVERLAP_REFUSALS = [refusal for refusal in REFUSALS if refusal.key.endswith(".overlap")]


@pytest.mark.parametrize("refusal", OVERLAP_REFUSALS, ids=lambda refusal: f"{refusal.value}, {refusal.together}")
def test_what_does_not_go_together_is_refused_with_the_reason(refusal):
    config = parse_config(REFUSED[refusal.together])
    with pytest.raises(ConfigError) as caught:
        validate_for_world(config, config.parallel_config.world)
    assert refusal.line in caught.value.lines
    assert refusal.why in refusal.line
    assert refusal.remedy in refusal.line


def test_the_documented_table_is_that_of_the_checks():
    assert markdown_table() in (Path(__file__).parent.parent / "docs" / "training.md").read_text()
