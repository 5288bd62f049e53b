"""Configurations are read as users write them, and every mistake is one line that names its key."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from fusedcomm.parallel.schedule import SCHEDULES
from fusedcomm.train.config import Config, ConfigError, dump_config, load_config, parse_config

_MINIMAL: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 64, "heads": 4},
    "data": {"seq_len": 128},
    "train": {"steps": 10, "global_batch": 16},
}


def _with(**changes: Any) -> dict[str, Any]:
    """The minimal configuration with `a__b=value` set."""
    raw = copy.deepcopy(_MINIMAL)
    for key, value in changes.items():
        *parents, last = key.split("__")
        section = raw
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return raw


def _write(tmp_path, text: str):
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return path


def test_the_block_of_the_field_is_accepted_as_it_stands():
    block = """
parallel_config:
  tensor_parallel:
    size: 4          # comments as well
    split_dim: 1
  pipeline_parallel:
    depth: 8
    micro_batches: 16
  data_parallel:
    size: 16
"""
    parallel = parse_config({**_MINIMAL, **yaml.safe_load(block)}).parallel_config
    assert parallel.world == 512
    assert parallel.tensor_parallel.split_dim == 1
    assert parallel.pipeline_parallel.micro_batches == 16


def test_everything_but_the_sizes_has_a_default():
    config = parse_config(_MINIMAL)
    assert config.parallel_config.world == 1
    assert config.data.path is None
    assert config.train.precision == "fp32"


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"parallel_config__tensor_paralel": {"size": 2}},
            ["parallel_config.tensor_paralel: unknown key; did you mean tensor_parallel?"],
        ),
        (
            {"parallel_config__tensor_parallel__sizes": 2},
            ["parallel_config.tensor_parallel.sizes: unknown key; did you mean size?"],
        ),
        ({"lr": 0.1}, ["lr: unknown key; did you mean train.lr?"]),
        ({"data__zzz": 1}, ["data.zzz: unknown key; known here: path, seq_len, tokenizer, dtype, validation_fraction"]),
        ({"model__layers": "4"}, ["model.layers: must be a whole number, not '4'"]),
        ({"model__layers": True}, ["model.layers: must be a whole number, not True"]),
        ({"train__steps": 1.5}, ["train.steps: must be a whole number, not 1.5"]),
        ({"train__lr": float("nan")}, ["train.lr: must be finite, not nan"]),
        ({"train__betas": [0.9, 1.0]}, ["train.betas.1: must be less than 1.0, not 1.0"]),
        ({"train__betas": [0.9, 0.9, 0.9]}, ["train.betas: must have at most 2 entries, not [0.9, 0.9, 0.9]"]),
        ({"train__eval_every": 0}, ["train.eval_every: must be at least 1, not 0"]),
        ({"train__loss_scale": 3}, ["train.loss_scale: must be a section with keys of its own, not 3"]),
        (
            {"train__precision": "bf61"},
            ["train.precision: must be one of fp32, bf16, fp16, not 'bf61'; did you mean bf16?"],
        ),
        (
            {"parallel_config__tensor_parallel__split_dim": 2},
            ["parallel_config.tensor_parallel.split_dim: must be one of 0, 1, not 2"],
        ),
        ({"data__path": 3}, ["data.path: must be a list, not 3"]),
        ({"data__path": ["a", None]}, ["data.path.1: must be text, not nothing"]),
        ({"model__tied_embeddings": 1}, ["model.tied_embeddings: must be true or false, not 1"]),
        (
            {"model__hidden": 0, "train__lr": -1},
            ["model.hidden: must be at least 1, not 0", "train.lr: must be greater than 0.0, not -1"],
        ),
        ({"model": {"layers": 1, "heads": 1}}, ["model.hidden: missing; it has no default"]),
    ],
)
def test_mistakes_are_one_line_each(changes, lines):
    with pytest.raises(ConfigError) as caught:
        parse_config(_with(**changes))
    assert caught.value.lines == lines


def test_overrides_are_yaml_values_on_top(tmp_path):
    path = _write(tmp_path, yaml.safe_dump(_MINIMAL))
    config = load_config(
        path,
        [
            "train.lr=1e-3",
            "parallel_config.tensor_parallel={size: 2}",
            "parallel_config.data_parallel.size=4",
            "data.path=[a, b]",
            "train.clip_norm=null",
        ],
    )
    assert config.train.lr == 1e-3
    assert config.parallel_config.world == 8
    assert config.data.path == ("a", "b")
    assert config.train.clip_norm is None
    assert config.train.output_dir == "runs/small"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps", "--set train.steps: write it as key=value, for example train.steps=100"),
        ("seed.x=1", "--set seed.x=1: seed is 3, which has no keys below it"),
        ("train.stps=1", "train.stps: unknown key; did you mean steps?"),
        ("train.lr={", "--set train.lr={: line 1, column 2: expected the node content, but found '<stream end>'"),
    ],
)
def test_overrides_at_fault_are_named(tmp_path, override, line):
    path = _write(tmp_path, yaml.safe_dump({**_MINIMAL, "seed": 3}))
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert caught.value.lines == [line]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {steps: 1\n", "line 2, column 1: expected ',' or '}', but got '<stream end>'"),
        ("seed: 1\nmodel: {}\nseed: 2\n", "line 3, column 1: the key 'seed' is given twice"),
        ("? [1, 2]\n: 3\n", "line 1, column 3: found unhashable key"),
        ("seed: 2020-13-45\n", "month must be in 1..12"),
        ("- a\n", "holds ['a']; it must hold the keys seed, model, data, train, parallel_config"),
    ],
)
def test_files_at_fault_are_named_with_the_place(tmp_path, text, line):
    with pytest.raises(ConfigError) as caught:
        load_config(_write(tmp_path, text))
    assert caught.value.lines == [line]


def test_a_missing_file_is_an_error_of_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "nothing.yaml")


def test_exponents_need_no_point(tmp_path):
    text = yaml.safe_dump(_MINIMAL).replace("steps: 10", "steps: 10\n  lr: 3e-4\n  eps: 1E-9")
    train = load_config(_write(tmp_path, text)).train
    assert (train.lr, train.eps) == (3e-4, 1e-9)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_resolved_configuration_is_read_back_the_same(tmp_path, kind):
    config = parse_config(_with(model__kind=kind, train__betas=[0.8, 0.9], data__path="x"))
    resolved = load_config(_write(tmp_path, dump_config(config)))
    assert resolved.transformer() == config.transformer()
    assert resolved.train == config.train
    assert resolved.data == config.data
    assert dump_config(resolved) == dump_config(config)


def test_families_fill_in_what_is_null():
    llama = parse_config(_MINIMAL).transformer()
    assert (llama.norm, llama.kv_heads, llama.ffn_hidden, llama.tied_embeddings) == ("rmsnorm", 4, 192, False)
    gpt2 = parse_config(_with(model__kind="gpt2", model__ffn_hidden=100)).transformer()
    assert (gpt2.norm, gpt2.ffn_hidden, gpt2.tied_embeddings) == ("layernorm", 100, True)
    given = parse_config(
        _with(
            model__dropout=0.1,
            model__kv_heads=2,
            train__activation_checkpointing="full",
            parallel_config__tensor_parallel__split_dim=0,
        )
    ).transformer()
    assert (given.dropout, given.kv_heads, given.split_dim) == (0.1, 2, 0)
    assert given.checkpointing == ("full",) * given.layers
    assert given.tp_sync == "every_layer"
    assert parse_config(_with(parallel_config__tensor_parallel__tp_sync="ladder")).transformer().stage_features == 128


def test_checkpointing_is_chosen_per_layer(tmp_path):
    config = parse_config(
        _with(model__layers=5, train__activation_checkpointing={"others": "selective", "full": [0, 4]})
    )
    assert config.transformer().checkpointing == ("full", "selective", "selective", "selective", "full")
    path = _write(tmp_path, dump_config(config))
    assert load_config(path).train.activation_checkpointing == config.train.activation_checkpointing
    # A word stays a word.
    assert "activation_checkpointing: full\n" in dump_config(
        parse_config(_with(train__activation_checkpointing="full"))
    )
    with pytest.raises(ConfigError) as caught:
        parse_config(_with(train__activation_checkpointing={"full": [-1]}))
    assert caught.value.lines == ["train.activation_checkpointing.full.0: must be at least 0, not -1"]


def test_schedules_are_those_that_the_pipeline_runs():
    for schedule in SCHEDULES:
        parse_config(_with(parallel_config__pipeline_parallel__schedule=schedule))
    with pytest.raises(ConfigError) as caught:
        parse_config(_with(parallel_config__pipeline_parallel__schedule="none"))
    assert f"must be one of {', '.join(SCHEDULES)}, not 'none'" in caught.value.lines[0]


def test_a_configuration_is_frozen():
    config: Config = parse_config(_MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3
