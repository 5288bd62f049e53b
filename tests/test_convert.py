"""Weights to Hugging Face transformers and back: the models there and here compute the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from helpers import run_ranks
from typer.testing import CliRunner

from fusedcomm import cli
from fusedcomm.comm.mesh import build_mesh
from fusedcomm.nn import TensorParallel, Transformer
from fusedcomm.train import convert as module
from fusedcomm.train.checkpoint import load_checkpoint, save_checkpoint
from fusedcomm.train.config import Config, parse_config
from fusedcomm.train.convert import convert
from fusedcomm.train.loop import train
from fusedcomm.train.trainer import Trainer

MODELS = {
    "llama": {"kind": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 48},
    "llama-tied": {"kind": "llama", "layers": 1, "hidden": 32, "heads": 4, "tied_embeddings": True, "rope_theta": 5e5},
    "gpt2": {"kind": "gpt2", "layers": 2, "hidden": 32, "heads": 4},
    "gpt2-untied": {"kind": "gpt2", "layers": 1, "hidden": 32, "heads": 4, "tied_embeddings": False},
}
SEQ_LEN = 16
TOKENS = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) * 7 % 64


@pytest.fixture(scope="module")
def transformers():
    # It must not ask the network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    return pytest.importorskip("transformers", reason="needs the package transformers (extra test)")


def config_of(kind: str, folder: Path, **parallel: dict) -> Config:
    return parse_config(
        {
            "model": {"vocab_size": 64} | MODELS[kind],
            "data": {"seq_len": SEQ_LEN, "path": [str(folder / "text.txt")]},
            "train": {"steps": 1, "global_batch": 4, "output_dir": str(folder / "run"), "eval_batches": 1},
            "parallel_config": parallel,
        }
    )


def _open(config: Config) -> Trainer:
    parallel = config.parallel_config
    sizes = {"pp": parallel.pipeline_parallel.depth, "tp": parallel.tensor_parallel.size}
    return Trainer(config, build_mesh(dp=parallel.data_parallel.size, timeout_s=30.0, **sizes))


def _save(rank: int, world: int, config: Config, folder: Path) -> Path:
    trainer = _open(config)
    # Not ones and zeros, by which a mistake could hide.
    with torch.no_grad():
        state = trainer.optimizer.state_dict()
        for name, tensors in state.items():
            if "norm" in name or "bias" in name:
                tensors["master"].add_(torch.linspace(-0.5, 0.5, tensors["master"].numel()))
        trainer.optimizer.load_state_dict(state)
    return save_checkpoint(folder, trainer, {"step": 3, "data": {"position": 0}})


def _logits(rank: int, world: int, config: Config, checkpoint: Path) -> torch.Tensor:
    """[samples, positions, vocabulary], from the checkpoint."""
    trainer = _open(config)
    load_checkpoint(checkpoint, trainer)
    mesh = trainer.mesh
    model = Transformer(trainer.shape, tp=TensorParallel(mesh.tp_group))
    model.load_state_dict(trainer.pipeline.stages[0].state_dict())
    with torch.no_grad():
        own = model.eval()(TOKENS).transpose(0, 1)
    parts = [torch.empty_like(own) for _ in range(world)]
    torch.distributed.all_gather(parts, own.contiguous())
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("kind", MODELS)
def test_both_sides_compute_the_same_there_and_back(transformers, tmp_path, kind):
    config = config_of(kind, tmp_path, tensor_parallel={"size": 2})
    checkpoint = run_ranks(2, _save, config, tmp_path)[0]
    expected = run_ranks(2, _logits, config, checkpoint)[0]

    folder = tmp_path / "theirs"
    assert "for transformers" in convert(checkpoint, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(TOKENS).logits
    torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-5)

    # As their own library writes it.
    model.save_pretrained(tmp_path / "saved")
    back = tmp_path / "step-00000000"
    convert(tmp_path / "saved", back)
    alone = config_of(kind, tmp_path)
    assert torch.equal(run_ranks(1, _logits, alone, back)[0], run_ranks(1, _logits, alone, checkpoint)[0])


def _train(rank: int, world: int, config: Config, checkpoint: Path) -> None:
    train(config, resume=str(checkpoint), device=torch.device("cpu"))


def test_training_begins_with_converted_weights(tmp_path):
    (tmp_path / "text.txt").write_text("all work and no play\n" * 200)
    raw = config_of("llama", tmp_path).model_dump()
    raw["model"]["vocab_size"] = 256
    raw["parallel_config"]["data_parallel"] |= {"size": 2, "mode": "zero1"}
    config = parse_config(raw)
    checkpoint = run_ranks(2, _save, config, tmp_path)[0]
    convert(checkpoint, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "begin")
    run_ranks(2, _train, config, tmp_path / "begin")
    (step, *_) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (step["kind"], step["step"]) == ("train", 1)


def test_a_vocabulary_is_padded_with_zeros(tmp_path):
    config = config_of("llama", tmp_path)
    checkpoint = run_ranks(1, _save, config, tmp_path)[0]
    convert(checkpoint, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "padded", vocab_size=80)
    raw = config.model_dump()
    raw["model"]["vocab_size"] = 80
    wide = run_ranks(1, _logits, parse_config(raw), tmp_path / "padded")[0]
    assert torch.equal(wide[..., 64:], torch.zeros(2, SEQ_LEN, 16))
    torch.testing.assert_close(wide[..., :64], run_ranks(1, _logits, config, checkpoint)[0])


def test_large_models_are_written_in_several_files(transformers, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARD_BYTES", 20_000)
    checkpoint = run_ranks(1, _save, config_of("gpt2", tmp_path), tmp_path)[0]
    convert(checkpoint, tmp_path / "theirs", dtype="bf16")
    assert len(list((tmp_path / "theirs").glob("model-*-of-*.safetensors"))) > 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert model.dtype == torch.bfloat16
    convert(tmp_path / "theirs", tmp_path / "back")
    assert yaml.safe_load((tmp_path / "back" / "config.yaml").read_text())["model"]["kind"] == "gpt2"


LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "is a bert; llama and gpt2 are known here"),
        (LLAMA | {"attention_bias": True}, "sets attention_bias as no model here does"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "sets rope_scaling"),
        (LLAMA | {"head_dim": 16}, "sets head_dim"),
        ({"model_type": "llama", "vocab_size": 64}, r"config.json does not say 'num_hidden_layers', which"),
        (LLAMA, "holds no model.safetensors; weights are read from safetensors"),
        (None, "holds neither progress.json, as our checkpoints do, nor config.json"),
    ],
)
def test_what_cannot_be_converted_is_said(tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_said(tmp_path):
    checkpoint = run_ranks(1, _save, config_of("llama", tmp_path), tmp_path)[0]
    convert(checkpoint, tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: .*fetch it again"):
        convert(tmp_path / "theirs", tmp_path / "out")
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match="step-00000003 is not whole"):
        convert(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("change", ["a tensor more", "a tensor less"])
def test_tensors_are_those_of_the_model(tmp_path, change):
    from safetensors.torch import load_file, save_file

    checkpoint = run_ranks(1, _save, config_of("llama", tmp_path), tmp_path)[0]
    convert(checkpoint, tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    if change == "a tensor more":
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    else:
        del tensors["model.norm.weight"]
    save_file(tensors, path)
    message = "holds model.layers.0.self_attn.q_proj.bias, which" if "more" in change else "holds no model.norm.weight"
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "theirs", tmp_path / "out")


def test_the_command_says_what_it_wrote_and_refuses_to_write_over_it(tmp_path):
    checkpoint = run_ranks(1, _save, config_of("llama", tmp_path), tmp_path)[0]
    arguments = ["convert", str(checkpoint), str(tmp_path / "theirs"), "--dtype", "bf16"]
    result = CliRunner().invoke(cli.app, arguments)
    assert (result.exit_code, result.stdout.strip()) == (
        0,
        f"{tmp_path / 'theirs'}: LlamaForCausalLM in bfloat16, for transformers",
    )
    again = CliRunner().invoke(cli.app, arguments)
    assert again.exit_code == 2
    assert again.stderr == f"convert: {tmp_path / 'theirs'} exists; choose another folder\n"
    wrong = CliRunner().invoke(cli.app, [*arguments[:-1], "fp8"])
    assert (wrong.exit_code, wrong.stderr) == (2, "convert: --dtype fp8; choose one of fp32, bf16, fp16\n")
