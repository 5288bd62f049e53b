"""Weights between our checkpoints and the folders of Hugging Face transformers: config.json and safetensors."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fusedcomm.nn.config import TransformerConfig
from fusedcomm.train.config import Config, dump_config, load_config, parse_config

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"
# Of old files: what a model computes itself.
_COMPUTED = re.compile(r"\.(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class _Pair:
    """A tensor of theirs and those of ours that it holds, one after the other; `transposed` where it is [in, out]."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def to_theirs(self, tensors: Mapping[str, Tensor]) -> Tensor:
        joined = torch.cat([tensors[name] for name in self.ours])
        return (joined.t() if self.transposed else joined).contiguous()

    def to_ours(self, tensor: Tensor) -> dict[str, Tensor]:
        whole = tensor.t() if self.transposed else tensor
        return dict(zip(self.ours, whole.chunk(len(self.ours))))


def convert(source: Path, target: Path, *, dtype: str = "fp32", vocab_size: int | None = None) -> str:
    """One of our checkpoints into a folder that `transformers` reads, or such a folder into one of our checkpoints.

    What it is says which way. `dtype` is that of the weights written for `transformers`; ours are fp32. A checkpoint
    from elsewhere is one after 0 steps, with fresh moments: training begins with its weights where it is resumed from.

    Args:
        vocab_size: of our checkpoint, padded with zeros where theirs is smaller: tensor parallelism divides it.

    Returns:
        What was written, in one line.

    Raises:
        ValueError: it is neither, of a model that the other side does not know, or `target` exists.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"convert: --dtype {dtype}; choose one of {', '.join(_DTYPES)}")
    if target.exists():
        raise ValueError(f"convert: {target} exists; choose another folder")
    if (source / "progress.json").is_file():
        return _to_transformers(source, target, _DTYPES[dtype])
    if (source / "config.json").is_file():
        return _from_transformers(source, target, vocab_size)
    raise ValueError(
        f"convert: {source} holds neither progress.json, as our checkpoints do, nor config.json, as models of "
        "transformers do; give such a folder"
    )


def _to_transformers(source: Path, target: Path, dtype: torch.dtype) -> str:
    config = load_config(source / "config.yaml")
    shape = config.transformer()
    if shape.tp_sync == "ladder":
        raise ValueError(f"convert: {source} is a ladder (tp_sync: ladder), a model that transformers does not have")
    found = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    tensors = {
        name.removeprefix("model."): torch.empty(entry.size)
        for name, entry in found.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    try:
        with _alone():
            dcp.load({"model": tensors}, checkpoint_id=source)
    except CheckpointException as error:
        raise ValueError(f"convert: {source} is not whole, and cannot be read; give another checkpoint") from error
    target.mkdir(parents=True)
    # One after the other, so that the whole is in memory once.
    _save_shards(target, ((pair.theirs, pair.to_theirs(tensors).to(dtype)) for pair in _pairs(shape)))
    theirs = _their_config(config.model.kind, shape, dtype)
    (target / "config.json").write_text(json.dumps(theirs, indent=2) + "\n", encoding="utf-8")
    return f"{target}: {theirs['architectures'][0]} in {str(dtype).removeprefix('torch.')}, for transformers"


def _from_transformers(source: Path, target: Path, vocab_size: int | None) -> str:
    theirs = json.loads((source / "config.json").read_text(encoding="utf-8"))
    try:
        config = _our_config(source, theirs)
    except KeyError as error:
        raise ValueError(f"convert: {source / 'config.json'} does not say {error}, which its model has") from error
    if vocab_size is not None:
        if vocab_size < config.model.vocab_size:
            raise ValueError(
                f"convert: --vocab-size {vocab_size} is less than the {config.model.vocab_size} entries that "
                f"{source} has"
            )
        config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocab_size})})
    shape = config.transformer()
    model: dict[str, Tensor] = {}
    left = dict(_tensors_of(source))
    for pair in _pairs(shape):
        # The first GPT-2's have no prefix.
        name = next((name for name in (pair.theirs, pair.theirs.removeprefix("transformer.")) if name in left), None)
        if name is None:
            raise ValueError(f"convert: {source} holds no {pair.theirs}, which its config.json asks for")
        model |= pair.to_ours(left.pop(name).float())
    if shape.tied_embeddings:
        left.pop("lm_head.weight", None)
    if unknown := sorted(name for name in left if not _COMPUTED.search(name)):
        raise ValueError(f"convert: {source} holds {unknown[0]}, which this model does not have")
    for name in ("embedding.weight", "output.weight"):
        if name in model:
            missing = shape.vocab_size - len(model[name])
            model[name] = torch.nn.functional.pad(model[name], (0, 0, 0, missing))
    optimizer = {f"{name}.step": torch.zeros(()) for name in model}
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer |= {f"{name}.{key}": torch.zeros_like(tensor) for name, tensor in model.items()}
    with _alone():
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=target)
    progress = {"step": 0, "data": None, "loss_scale": None, "sync": "every_step", "has_sum": False}
    (target / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    # Last: with it the checkpoint is complete.
    (target / "progress.json").write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")
    return f"{target}: a checkpoint after 0 steps; its model section is in {target / 'config.yaml'}"


@contextmanager
def _alone() -> Iterator[None]:
    """One process is meant, which torch warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _pairs(shape: TransformerConfig) -> Iterator[_Pair]:
    if shape.position == "rope":
        yield from _llama_pairs(shape)
    else:
        yield from _gpt2_pairs(shape)


def _llama_pairs(shape: TransformerConfig) -> Iterator[_Pair]:
    names = {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.qkv.q",
        "self_attn.k_proj": "attention.qkv.k",
        "self_attn.v_proj": "attention.qkv.v",
        "self_attn.o_proj": "attention.out",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.gate_up.gate",
        "mlp.up_proj": "mlp.gate_up.up",
        "mlp.down_proj": "mlp.down",
    }
    yield _Pair("model.embed_tokens.weight", ("embedding.weight",))
    for layer in range(shape.layers):
        for theirs, ours in names.items():
            yield _Pair(f"model.layers.{layer}.{theirs}.weight", (f"layers.{layer}.{ours}.weight",))
    yield _Pair("model.norm.weight", ("norm.weight",))
    if not shape.tied_embeddings:
        yield _Pair("lm_head.weight", ("output.weight",))


def _gpt2_pairs(shape: TransformerConfig) -> Iterator[_Pair]:
    names = {
        "ln_1": ("attention_norm",),
        "attn.c_attn": ("attention.qkv.q", "attention.qkv.k", "attention.qkv.v"),
        "attn.c_proj": ("attention.out",),
        "ln_2": ("mlp_norm",),
        "mlp.c_fc": ("mlp.up",),
        "mlp.c_proj": ("mlp.down",),
    }
    yield _Pair("transformer.wte.weight", ("embedding.weight",))
    yield _Pair("transformer.wpe.weight", ("position.weight",))
    for layer in range(shape.layers):
        for theirs, ours in names.items():
            for kind in ("weight", "bias"):
                # Their linear layers hold weights as [in, out].
                transposed = kind == "weight" and ".c_" in theirs
                own = tuple(f"layers.{layer}.{name}.{kind}" for name in ours)
                yield _Pair(f"transformer.h.{layer}.{theirs}.{kind}", own, transposed)
    for kind in ("weight", "bias"):
        yield _Pair(f"transformer.ln_f.{kind}", (f"norm.{kind}",))
    if not shape.tied_embeddings:
        yield _Pair("lm_head.weight", ("output.weight",))


def _their_config(kind: str, shape: TransformerConfig, dtype: torch.dtype) -> dict[str, Any]:
    common = {
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if kind == "llama":
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn_hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": shape.seq_len,
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            **common,
        }
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": shape.hidden,
        "n_inner": shape.ffn_hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_positions": shape.seq_len,
        "layer_norm_epsilon": shape.norm_eps,
        "activation_function": "gelu_new",
        "resid_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
        # Ours drops nothing inside attention.
        "attn_pdrop": 0.0,
        **common,
    }


def _our_config(source: Path, theirs: Mapping[str, Any]) -> Config:
    """The model section, and what a configuration cannot do without.

    Raises:
        ValueError: a model that ours are not.
    """
    kind = theirs.get("model_type")
    rope = {"rope_theta": theirs.get("rope_theta", 10_000.0), **(theirs.get("rope_parameters") or {})}
    scaling = theirs.get("rope_scaling") or rope
    usual: dict[str, Any] = {
        "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    }
    if kind not in usual:
        raise ValueError(f"convert: {source} is a {kind}; llama and gpt2 are known here")
    strange = [name for name, value in usual[kind].items() if theirs.get(name, value) != value]
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        strange.append("rope_scaling")
    if theirs.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        strange.append("activation_function")
    if theirs.get("head_dim") not in (None, theirs.get("hidden_size", 0) // theirs.get("num_attention_heads", 1)):
        strange.append("head_dim")
    if strange:
        raise ValueError(f"convert: {source} sets {', '.join(strange)} as no model here does; it cannot be converted")
    if kind == "llama":
        model = {
            "layers": theirs["num_hidden_layers"],
            "hidden": theirs["hidden_size"],
            "heads": theirs["num_attention_heads"],
            "kv_heads": theirs.get("num_key_value_heads") or theirs["num_attention_heads"],
            "ffn_hidden": theirs["intermediate_size"],
            "norm_eps": float(theirs.get("rms_norm_eps", 1e-6)),
            "rope_theta": float(rope["rope_theta"]),
        }
        seq_len = theirs.get("max_position_embeddings", 2048)
    else:
        model = {
            "layers": theirs["n_layer"],
            "hidden": theirs["n_embd"],
            "heads": theirs["n_head"],
            "ffn_hidden": theirs.get("n_inner") or 4 * theirs["n_embd"],
            "norm_eps": float(theirs.get("layer_norm_epsilon", 1e-5)),
        }
        seq_len = theirs["n_positions"]
    model |= {
        "kind": kind,
        "vocab_size": theirs["vocab_size"],
        "tied_embeddings": theirs.get("tie_word_embeddings", kind == "gpt2"),
    }
    return parse_config({"model": model, "data": {"seq_len": seq_len}, "train": {"steps": 1, "global_batch": 1}})


def _tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    index = folder / _INDEX
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"convert: {folder} holds no {file}; weights are read from safetensors")
        try:
            with safe_open(folder / file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"convert: {folder / file} cannot be read: {error}; fetch it again") from error


def _save_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """In files of at most 5 GB, and an index where there are several."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors:
        if shards[-1] and size + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file, shard in zip(names, shards):
        save_file(shard, folder / file, metadata={"format": "pt"})
