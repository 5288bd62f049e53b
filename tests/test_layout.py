"""What does not fit on its ranks is refused with numbers; --fit finds the layout that does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from fusedcomm.nn.config import check_tensor_parallel
from fusedcomm.train.config import Config, ConfigError, load_config, parse_config
from fusedcomm.train.layout import coordinates, describe_layout, fit, stages_of, validate_for_world

_EXAMPLES = Path(__file__).parent.parent / "examples"


def _config(*, pp: int = 1, dp: int = 1, tp: int = 1, micro_batches: int = 4, **sections: dict[str, Any]) -> Config:
    parallel = {
        "tensor_parallel": {"size": tp},
        "pipeline_parallel": {"depth": pp, "micro_batches": micro_batches},
        "data_parallel": {"size": dp},
    }
    for name, keys in sections.pop("parallel", {}).items():
        parallel[name] |= keys
    raw: dict[str, Any] = {
        "model": {"layers": 8, "hidden": 64, "heads": 4},
        "data": {"seq_len": 128},
        "train": {"steps": 10, "global_batch": 256},
    }
    for name, keys in sections.items():
        raw[name] |= keys
    return parse_config(raw | {"parallel_config": parallel})


def _lines(config: Config, world: int) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate_for_world(config, world)
    return caught.value.lines


def test_512_ranks_are_accepted():
    config = _config(pp=8, dp=16, tp=4, micro_batches=16)
    validate_for_world(config, 512)
    assert describe_layout(config) == (
        "512 ranks = pipeline 8 x data 16 x tensor 4; 1f1b, 16 micro-batches, layers 1 | 1 | 1 | 1 | 1 | 1 | 1 | 1"
    )


@pytest.mark.parametrize("name", ["quickstart.yaml", "llama-1b-tp4-pp8-dp16.yaml"])
def test_examples_fit_their_ranks(name):
    config = load_config(_EXAMPLES / name)
    validate_for_world(config, config.parallel_config.world)


def test_degrees_that_do_not_multiply_to_the_world_are_refused():
    assert _lines(_config(pp=2, dp=3, tp=4, train={"global_batch": 24}), 8) == [
        "parallel_config: pipeline_parallel.depth 2 x data_parallel.size 3 x tensor_parallel.size 4 = 24 ranks, "
        "but 8 are running; change a degree or start 24 ranks"
    ]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"heads": 6, "hidden": 96}}, "model.heads: 6 does not divide by"),
        ({"model": {"kv_heads": 2}}, "model.kv_heads: 2 does not divide by"),
        ({"model": {"vocab_size": 258}}, "model.vocab_size: 258 .*pad the vocabulary to 260"),
        ({"model": {"ffn_hidden": 130}}, r"model.ffn_hidden: 130 .*\(remainder 2\).*split_dim: 0"),
        ({"model": {"vocab_size": 128}}, "128 is less than a byte's 256 values"),
        ({"model": {"heads": 5}}, "model: hidden=64 over heads=5 leaves 4"),
        ({"model": {"layers": 1}}, "parallel_config.pipeline_parallel: 1 layers cannot fill 2 stages"),
        (
            {"train": {"global_batch": 13}},
            "13 samples cannot be cut into .* = 2 equal passes of at least 4 samples, .*; use 12 or 14 samples",
        ),
        ({"train": {"global_batch": 4}}, "use 8 samples"),
        ({"train": {"min_lr": 1.0}}, "train.min_lr: 1 exceeds train.lr 0.0003"),
        ({"train": {"warmup_steps": 11}}, "train.warmup_steps: 11 exceeds train.steps 10"),
        ({"train": {"loss_scale": {"initial": 8.0}}}, "train.loss_scale: fp32 needs none"),
        ({"train": {"precision": "fp16", "loss_scale": {"initial": 3.0}}}, "initial: 3 is no power of two"),
        ({"model": {"kind": "gpt2", "rope_theta": 1.0}}, "model.rope_theta: gpt2 learns its positions"),
        (
            {"parallel": {"tensor_parallel": {"tp_sync": "ladder", "split_dim": 0}}},
            "parallel_config.tensor_parallel.tp_sync: tp_sync='ladder' with split_dim=0, whose all-to-alls wait",
        ),
        (
            {
                "parallel": {"tensor_parallel": {"tp_sync": "interleave"}},
                "train": {"activation_checkpointing": "selective"},
            },
            "tensor_parallel.tp_sync: tp_sync='interleave' with checkpointing='selective'",
        ),
        (
            {"train": {"activation_checkpointing": {"selective": [1]}, "offload": {"activations": "disk"}}},
            "train.offload.activations: disk does not go with selective checkpointing",
        ),
        ({"train": {"offload": {"folder": "/x"}}}, "train.offload.folder: /x would stay empty"),
        (
            {"train": {"activation_checkpointing": {"full": [0, 8]}}},
            "train.activation_checkpointing: full names layer 8; a model of 8 has 0..7",
        ),
        (
            {"train": {"activation_checkpointing": {"full": [0, 1], "none": [1]}}},
            "train.activation_checkpointing: layer 1 is listed under none and full",
        ),
        (
            {"parallel": {"tensor_parallel": {"tp_sync": "interleave"}}, "train": {"global_batch": 8}},
            "train.global_batch 8 in 8 micro-batches leaves some with one sample; use 16 samples",
        ),
        (
            {"parallel": {"pipeline_parallel": {"schedule": "dualpipev", "micro_batches": 2}}},
            "raise micro_batches to 4",
        ),
        ({"parallel": {"pipeline_parallel": {"schedule": "zbv", "stages_per_rank": 3}}}, "zbv"),
        ({"parallel": {"pipeline_parallel": {"schedule": "interleaved", "micro_batches": 5}}}, "interleaved"),
        ({"parallel": {"pipeline_parallel": {"stage_layers": [3, 4]}}}, r"\[3, 4\] gives 7 layers to 2 stages"),
    ],
)
def test_what_does_not_divide_is_refused_with_numbers(sections, message):
    config = _config(pp=2, dp=2, tp=4, micro_batches=4, **sections)
    with pytest.raises(ConfigError, match=message):
        validate_for_world(config, 16)


def test_all_mistakes_come_at_once():
    config = _config(tp=4, model={"heads": 6, "hidden": 96, "vocab_size": 255}, train={"min_lr": 1.0})
    assert [line.partition(":")[0] for line in _lines(config, 8)] == [
        "parallel_config",
        "model.heads",
        "model.vocab_size",
        "model.vocab_size",
        "train.min_lr",
    ]


def test_what_is_accepted_is_what_the_layers_accept():
    for tp, heads, kv_heads, ffn_hidden, split_dim in itertools.product(
        (1, 2, 3, 4), (4, 6), (2, None), (96, 130), (0, 1)
    ):
        model = {"hidden": 96, "heads": heads, "kv_heads": kv_heads, "ffn_hidden": ffn_hidden, "vocab_size": 300}
        config = _config(tp=tp, model=model, parallel={"tensor_parallel": {"split_dim": split_dim}})
        assert _accepts(lambda config=config, tp=tp: validate_for_world(config, tp)) == _accepts(
            lambda config=config, tp=tp: check_tensor_parallel(config.transformer(), tp)
        )


def _accepts(check) -> bool:
    try:
        check()
    except ValueError:
        return False
    return True


def test_stages_are_balanced_or_pinned():
    assert [len(stage) for stage in stages_of(_config(pp=4))] == [2, 2, 2, 2]
    # The head costs as much as about five layers.
    assert [len(stage) for stage in stages_of(_config(pp=2, model={"vocab_size": 5120}))] == [7, 1]
    pinned = {"pipeline_parallel": {"stage_layers": [1, 7]}}
    assert stages_of(_config(pp=2, parallel=pinned)) == [range(1), range(1, 8)]
    assert len(stages_of(_config(pp=2, parallel={"pipeline_parallel": {"schedule": "zbv"}}))) == 4


@pytest.mark.parametrize(
    ("num_ranks", "degrees"),
    [
        (1, (1, 1, 1)),
        (2, (1, 1, 2)),
        (3, (3, 1, 1)),
        (4, (1, 2, 2)),
        (7, (3, 1, 2)),
        (8, (2, 2, 2)),
        (16, (2, 2, 4)),
        (64, (4, 4, 4)),
    ],
)
def test_fit_takes_the_nearest_layout(num_ranks, degrees):
    fitted = fit(_config(pp=2, dp=2, tp=2, model={"layers": 4}, train={"global_batch": 16}), num_ranks)
    parallel = fitted.parallel_config
    found = (parallel.pipeline_parallel.depth, parallel.data_parallel.size, parallel.tensor_parallel.size)
    assert found == degrees
    validate_for_world(fitted, parallel.world)
    assert fitted.model.layers == 4


def test_fit_leaves_what_fits_and_drops_pinned_stages_only_with_the_depth():
    pinned = {"pipeline_parallel": {"stage_layers": [3, 5]}}
    config = _config(pp=2, tp=2, parallel=pinned)
    assert fit(config, 4) is config
    assert fit(config, 8).parallel_config.pipeline_parallel.stage_layers == (3, 5)
    assert fit(config, 2).parallel_config.pipeline_parallel.stage_layers is None


def test_fit_says_what_no_layout_can_mend():
    with pytest.raises(ConfigError, match=r"^train.min_lr: 1 exceeds"):
        fit(_config(tp=2, train={"min_lr": 1.0}), 2)


def test_coordinates_have_tp_innermost():
    parallel = _config(pp=2, dp=3, tp=4).parallel_config
    assert coordinates(parallel, 0) == "pp 0, dp 0, tp 0"
    assert coordinates(parallel, 1) == "pp 0, dp 0, tp 1"
    assert coordinates(parallel, 4) == "pp 0, dp 1, tp 0"
    assert coordinates(parallel, 23) == "pp 1, dp 2, tp 3"
