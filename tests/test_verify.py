"""`fusedcomm verify` on every layout and schedule: the mesh against one process, by the rounding rule."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from pathlib import Path

import pytest
import torch
from helpers import run_ranks

from fusedcomm.train.config import parse_config
from fusedcomm.train.layout import validate_for_world
from fusedcomm.train.verify import verify

TINY = {
    "seed": 3,
    "model": {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 48},
    "data": {"seq_len": 24},
    "train": {"steps": 4, "global_batch": 8, "lr": 1e-3, "warmup_steps": 1},
    "parallel_config": {
        "tensor_parallel": {"size": 1, "method": "chunked"},
        "pipeline_parallel": {"depth": 1, "micro_batches": 2},
        "data_parallel": {"size": 1},
    },
}


def tiny(pp: int, dp: int, tp: int, **overrides) -> dict:
    """The tiny run on a mesh, with `section__key=value` on top."""
    raw = copy.deepcopy(TINY)
    parallel = raw["parallel_config"]
    parallel["pipeline_parallel"]["depth"] = pp
    parallel["data_parallel"]["size"] = dp
    parallel["tensor_parallel"]["size"] = tp
    for name, value in overrides.items():
        section, key = name.split("__")
        target = raw[section] if section in raw else parallel[section]
        target[key] = value
    return raw


def run_verify(rank, world, raw, steps, json_path):
    config = parse_config(raw)
    validate_for_world(config, world)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = verify(config, steps=steps, json_path=Path(json_path), device=torch.device("cpu"))
    return code, output.getvalue()


def report_of(raw: dict, tmp_path: Path, steps: int = 2) -> dict:
    parallel = raw["parallel_config"]
    world = (
        parallel["pipeline_parallel"]["depth"] * parallel["data_parallel"]["size"] * parallel["tensor_parallel"]["size"]
    )
    path = tmp_path / "verify.json"
    results = run_ranks(world, run_verify, raw, steps, str(path), timeout_s=120)
    report = json.loads(path.read_text())
    wrong = [row for row in report["rows"] if not row["passed"]]
    assert not wrong, f"{len(wrong)} of {len(report['rows'])}: {wrong[:5]}"
    assert [code for code, _ in results] == [0] * world
    return report


LAYOUTS = {
    "tp": tiny(1, 1, 2),
    "pp": tiny(2, 1, 1),
    "dp": tiny(1, 2, 1),
    "tp x dp": tiny(1, 2, 2),
    "pp x dp": tiny(2, 2, 1),
    "tp x pp": tiny(2, 1, 2),
    "2 x 2 x 2": tiny(2, 2, 2),
    "tp 4": tiny(1, 1, 4, model__kv_heads=4),
    "gpipe": tiny(2, 1, 1, pipeline_parallel__schedule="gpipe"),
    "interleaved": tiny(2, 1, 1, pipeline_parallel__schedule="interleaved"),
    "zero_bubble, dp": tiny(2, 2, 1, pipeline_parallel__schedule="zero_bubble"),
    "dualpipev, tp, uneven micro-batches": tiny(
        2, 1, 2, pipeline_parallel__schedule="dualpipev", pipeline_parallel__micro_batches=5
    ),
    "fewer micro-batches than stages": tiny(4, 1, 1, pipeline_parallel__micro_batches=3),
    "zero_bubble, accumulation": tiny(
        2, 2, 1, pipeline_parallel__schedule="zero_bubble", train__accumulation=2, train__global_batch=12
    ),
    "zbv, tp": tiny(2, 1, 2, pipeline_parallel__schedule="zbv"),
    "sequence not divisible": tiny(2, 1, 2, data__seq_len=23),
    "sequence not divisible, tp 4": tiny(1, 1, 4, model__kv_heads=4, data__seq_len=22),
    "accumulation 2, clipped hard": tiny(1, 2, 2, train__accumulation=2, train__clip_norm=0.01),
    "accumulation 8": tiny(1, 1, 2, train__accumulation=8, train__global_batch=16),
    "backward+forward": tiny(1, 2, 2, data_parallel__overlap="backward+forward", train__clip_norm=None),
    "backward+forward, zbv, accumulation": tiny(
        2,
        2,
        1,
        data_parallel__overlap="backward+forward",
        train__clip_norm=None,
        pipeline_parallel__schedule="zbv",
        train__accumulation=2,
    ),
    "at_end, dp": tiny(2, 2, 1, pipeline_parallel__weight_gradients="at_end"),
    "at_end, gpipe, 2 x 2 x 2, accumulation, clipped hard": tiny(
        2,
        2,
        2,
        pipeline_parallel__weight_gradients="at_end",
        pipeline_parallel__schedule="gpipe",
        train__accumulation=2,
        train__global_batch=16,
        train__clip_norm=0.01,
    ),
    "at_end, interleaved, backward+forward": tiny(
        2,
        2,
        1,
        pipeline_parallel__weight_gradients="at_end",
        pipeline_parallel__schedule="interleaved",
        data_parallel__overlap="backward+forward",
        train__clip_norm=None,
    ),
    "at_end, backward+forward, no pipeline": tiny(
        1,
        2,
        2,
        pipeline_parallel__weight_gradients="at_end",
        data_parallel__overlap="backward+forward",
        train__clip_norm=None,
    ),
    "at_end, 2 x 2 x 2, bf16, backward+forward": tiny(
        2,
        2,
        2,
        pipeline_parallel__weight_gradients="at_end",
        data_parallel__overlap="backward+forward",
        train__clip_norm=None,
        train__precision="bf16",
    ),
    "at_end, zero1, tied, zbv": tiny(
        2,
        2,
        1,
        model__tied_embeddings=True,
        pipeline_parallel__weight_gradients="at_end",
        pipeline_parallel__schedule="zbv",
        data_parallel__mode="zero1",
    ),
    "at_end, zero1, interleaved, tp": tiny(
        2,
        2,
        2,
        pipeline_parallel__weight_gradients="at_end",
        pipeline_parallel__schedule="interleaved",
        data_parallel__mode="zero1",
    ),
    "at_end, fsdp, bf16, accumulation": tiny(
        2,
        2,
        1,
        pipeline_parallel__weight_gradients="at_end",
        data_parallel__mode="fsdp",
        train__precision="bf16",
        train__accumulation=2,
    ),
    "at_end, checkpointing, dropout": tiny(
        2,
        1,
        2,
        pipeline_parallel__weight_gradients="at_end",
        train__activation_checkpointing="full",
        model__dropout=0.2,
    ),
    "at_end, interleave, uneven micro-batches": tiny(
        2,
        1,
        2,
        pipeline_parallel__weight_gradients="at_end",
        pipeline_parallel__micro_batches=3,
        tensor_parallel__tp_sync="interleave",
    ),
    "zero1, tp, clipped hard": tiny(1, 2, 2, data_parallel__mode="zero1", train__clip_norm=0.01),
    "zero1, 3 ranks, uneven rows": tiny(1, 3, 1, data_parallel__mode="zero1", train__global_batch=12),
    "zero1, zero_bubble, accumulation": tiny(
        2,
        2,
        1,
        data_parallel__mode="zero1",
        pipeline_parallel__schedule="zero_bubble",
        train__accumulation=2,
    ),
    "zero1, tied, gpt2, 2 x 2 x 2": tiny(2, 2, 2, model__kind="gpt2", model__kv_heads=4, data_parallel__mode="zero1"),
    "zero1, tied on one stage, bf16": tiny(
        1, 4, 1, model__tied_embeddings=True, data_parallel__mode="zero1", train__precision="bf16"
    ),
    "zero1, tied, zbv, fp16": tiny(
        2,
        2,
        1,
        model__tied_embeddings=True,
        pipeline_parallel__schedule="zbv",
        data_parallel__mode="zero1",
        train__precision="fp16",
        train__loss_scale={"initial": 1024.0},
    ),
    "zero1, interleave": tiny(1, 2, 2, tensor_parallel__tp_sync="interleave", data_parallel__mode="zero1"),
    "fsdp, tp, clipped hard": tiny(1, 2, 2, data_parallel__mode="fsdp", train__clip_norm=0.01),
    "fsdp, 3 ranks, uneven rows, accumulation": tiny(
        1, 3, 1, data_parallel__mode="fsdp", train__global_batch=12, train__accumulation=2
    ),
    "fsdp, pp, bf16, accumulation": tiny(
        2, 2, 1, data_parallel__mode="fsdp", train__precision="bf16", train__accumulation=2
    ),
    "fsdp, zero_bubble, bf16, accumulation": tiny(
        2,
        2,
        1,
        data_parallel__mode="fsdp",
        pipeline_parallel__schedule="zero_bubble",
        train__accumulation=2,
        train__precision="bf16",
    ),
    "fsdp, tied, gpt2, 2 x 2 x 2": tiny(2, 2, 2, model__kind="gpt2", model__kv_heads=4, data_parallel__mode="fsdp"),
    "fsdp, tied on one stage, checkpointing": tiny(
        1, 4, 1, model__tied_embeddings=True, data_parallel__mode="fsdp", train__activation_checkpointing="full"
    ),
    "fsdp, tied, zbv, fp16": tiny(
        2,
        2,
        1,
        model__tied_embeddings=True,
        pipeline_parallel__schedule="zbv",
        data_parallel__mode="fsdp",
        train__precision="fp16",
        train__loss_scale={"initial": 1024.0},
    ),
    "fsdp, interleave": tiny(1, 2, 2, tensor_parallel__tp_sync="interleave", data_parallel__mode="fsdp"),
    "unclipped": tiny(1, 2, 1, train__clip_norm=None),
    "serial": tiny(1, 1, 2, tensor_parallel__method="serial"),
    "auto": tiny(1, 1, 2, tensor_parallel__method="auto"),
    "gathered input kept": tiny(1, 1, 2, tensor_parallel__save="gathered"),
    "split_dim 0": tiny(1, 1, 2, tensor_parallel__split_dim=0),
    "checkpointing, dropout": tiny(1, 1, 2, train__activation_checkpointing="full", model__dropout=0.2),
    "selective, dropout, pp": tiny(2, 1, 2, train__activation_checkpointing="selective", model__dropout=0.2),
    "zero_bubble, checkpointing": tiny(
        2, 1, 2, pipeline_parallel__schedule="zero_bubble", train__activation_checkpointing="full"
    ),
    "checkpointing by layer, zbv": tiny(
        2,
        1,
        2,
        pipeline_parallel__schedule="zbv",
        train__activation_checkpointing={"others": "selective", "full": [1], "none": [2]},
    ),
    "ladder, checkpointing by layer": tiny(
        1, 1, 2, tensor_parallel__tp_sync="ladder", train__activation_checkpointing={"full": [0, 3]}
    ),
    "gpt2, dropout": tiny(1, 2, 2, model__kind="gpt2", model__kv_heads=4, model__dropout=0.1),
    "tied over stages": tiny(2, 1, 2, model__tied_embeddings=True),
    "tied, zbv": tiny(2, 2, 1, model__tied_embeddings=True, pipeline_parallel__schedule="zbv"),
    "tied, gpt2, 2 x 2 x 2": tiny(2, 2, 2, model__kind="gpt2", model__kv_heads=4),
    "interleave": tiny(1, 1, 2, tensor_parallel__tp_sync="interleave"),
    "interleave, halves of 2 and 1": tiny(1, 2, 2, tensor_parallel__tp_sync="interleave", train__global_batch=12),
    "interleave, auto, checkpointing, dropout, dp": tiny(
        1,
        2,
        2,
        tensor_parallel__tp_sync="interleave",
        tensor_parallel__method="auto",
        train__activation_checkpointing="full",
        model__dropout=0.2,
    ),
    "interleave, zero_bubble, gathered input kept": tiny(
        2,
        1,
        2,
        tensor_parallel__tp_sync="interleave",
        tensor_parallel__save="gathered",
        pipeline_parallel__schedule="zero_bubble",
    ),
    "interleave, gpt2, bf16": tiny(
        1, 1, 4, model__kind="gpt2", model__kv_heads=4, tensor_parallel__tp_sync="interleave", train__precision="bf16"
    ),
    "ladder": tiny(1, 1, 2, tensor_parallel__tp_sync="ladder"),
    "ladder, dp x tp": tiny(1, 2, 2, tensor_parallel__tp_sync="ladder", tensor_parallel__method="serial"),
    "ladder, gpt2, pp, checkpointing, dropout": tiny(
        2,
        1,
        2,
        model__kind="gpt2",
        model__kv_heads=4,
        model__dropout=0.2,
        tensor_parallel__tp_sync="ladder",
        train__activation_checkpointing="full",
    ),
    "ladder, zbv": tiny(2, 1, 2, tensor_parallel__tp_sync="ladder", pipeline_parallel__schedule="zbv"),
    "bf16": tiny(2, 1, 2, train__precision="bf16"),
    "bf16, dp": tiny(1, 2, 2, train__precision="bf16"),
    "fp16": tiny(1, 2, 2, train__precision="fp16", train__loss_scale={"initial": 1024.0}),
    **{
        f"two nodes, {algorithm}": tiny(
            1, 4, 1, data_parallel__algorithm=algorithm, data_parallel__ranks_per_node=2, data_parallel__bucket_mb=0.01
        )
        for algorithm in ("ring", "hierarchical", "auto")
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_mesh_matches_one_process(name, tmp_path):
    report = report_of(LAYOUTS[name], tmp_path)
    names = {row["name"] for row in report["rows"]}
    shape = parse_config(LAYOUTS[name]).transformer()
    assert "loss" in names
    assert "layers.3.mlp.down.weight" in names
    assert ("output.weight" in names) != shape.tied_embeddings
    first, last = report["losses"][0], report["losses"][-1]
    assert first["alone"] == pytest.approx(first["mesh"], rel=2e-3)
    assert last["mesh"] < first["mesh"] + 0.2


def test_an_overflow_is_skipped_by_all_ranks_alike(tmp_path):
    raw = tiny(2, 2, 1, train__precision="fp16", train__loss_scale={"initial": 2.0**26})
    report = report_of(raw, tmp_path, steps=3)
    skipped = [loss["skipped"] for loss in report["losses"]]
    assert skipped[0], "a scale of 2^26 must overflow fp16"
    # A skipped step leaves every weight as it was: on other data, the loss is still that of the first weights.
    assert report["losses"][1]["mesh"] == pytest.approx(report["losses"][0]["mesh"], abs=0.1)


def run_broken(rank, world, raw, json_path):
    # Gradients that are averaged where they must be summed, as the seed tutorial has it.
    from fusedcomm.train import trainer

    finish = trainer.GradientBuckets.finish

    def averaged(self, **options):
        finish(self, **options)
        # Only the mesh: the reference sums its micro-batches in buckets too, without a group.
        if self._transfers is not None:
            for slot in self._slots.values():
                slot.grad /= world

    trainer.GradientBuckets.finish = averaged
    try:
        return run_verify(rank, world, raw, 1, json_path)[0]
    finally:
        trainer.GradientBuckets.finish = finish


def test_verify_finds_a_wrong_gradient(tmp_path):
    assert run_ranks(2, run_broken, tiny(1, 2, 1), str(tmp_path / "verify.json"), timeout_s=120) == [1, 1]
