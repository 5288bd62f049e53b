"""The trainer's configuration: YAML in, frozen and typed sections out, every mistake in one line that names its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from fusedcomm.train.mistakes import in_one_line, shown
from fusedcomm.train.sections import ConfigError, Section, parse, read_keys, read_yaml

if TYPE_CHECKING:
    from fusedcomm.nn.config import TransformerConfig

Count = Annotated[int, Field(ge=1)]
# YAML has lists only, which strict tuples would refuse; their entries stay strict.
_Counts = Annotated[tuple[Count, ...], Field(strict=False)]
_Layers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
_Texts = Annotated[tuple[Annotated[str, Field(strict=True)], ...], Field(strict=False)]
_Beta = Annotated[float, Field(ge=0, lt=1)]
Checkpointing = Literal["none", "full", "selective"]
Method = Literal["auto", "serial", "chunked", "fused", "fused:symmetric", "fused:shared", "fused:c10d"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
WeightGradients = Literal["by_schedule", "at_end"]


class TensorParallelConfig(Section):
    """Ranks that share each layer's GEMMs.

    `split_dim` is the MLPs' pairing: 1 is column-parallel first, then row-parallel (one gather, one scatter); 0 is
    row-parallel first, which moves about ffn_hidden / hidden times the bytes. Attention is split by heads, as in 1.

    `tp_sync` is when ranks wait for each other: `every_layer` where a result is used; `interleave` computes two halves
    of each micro-batch in turns, so that one's transfers hide behind the other, and changes no number beyond rounding;
    `ladder` lets each block read the hidden states before the block before it has been added, so that its sums travel
    meanwhile: another model, whose weights are of no use without it.
    """

    size: Count = 1
    split_dim: Literal[0, 1] = 1
    method: Method = "auto"
    # Keep the shard and gather again in backward, or keep the gathered input (`size` times the memory).
    save: Literal["shard", "gathered"] = "shard"
    tp_sync: Literal["every_layer", "interleave", "ladder"] = "every_layer"


class PipelineParallelConfig(Section):
    """Ranks that hold consecutive layers; a batch passes through them in micro-batches.

    `weight_gradients: at_end` puts them off to the end of a pass, where they are computed layer by layer over all
    micro-batches: their sums over data-parallel ranks start early. It takes memory: see docs/training.md.
    """

    depth: Count = 1
    micro_batches: Count = 1
    schedule: Schedule = "1f1b"
    # null: the schedule's own number, 2 for interleaved, zbv and dualpipev, else 1.
    stages_per_rank: Count | None = None
    weight_gradients: WeightGradients = "by_schedule"
    # null: balanced by the layers' estimated FLOPs.
    stage_layers: _Counts | None = None


class DataParallelConfig(Section):
    """Copies of the model, each with its own samples; gradients are summed in buckets while backward runs.

    `mode: zero1` shares the optimizer's state and its work: each rank steps its own rows of each weight, which are
    gathered during the next forward. `fsdp` shares weights and gradients too: layers are gathered where they are used.
    With `overlap: backward+forward` sums also arrive during the next step's forward, whose layers wait for their own.
    `compression`, and every `sync` but `every_step`, change what is learned: see docs/training.md.
    """

    size: Count = 1
    mode: Literal["replicate", "zero1", "fsdp"] = "replicate"
    overlap: Literal["backward", "backward+forward"] = "backward"
    # null: as the measured rate and computing ask for.
    bucket_mb: Annotated[float, Field(gt=0)] | None = None
    # Bytes under way; null: three pieces.
    window_mb: Annotated[float, Field(gt=0)] | None = None
    # Of the sums: by the measured links (`auto`, which may choose otherwise in another run), or always one.
    algorithm: Literal["auto", "ring", "tree", "hierarchical"] = "ring"
    # Which ranks share a node; null: those whose host has one name.
    ranks_per_node: Count | None = None
    # What travels: everywhere, or across nodes where sums go by levels, and then in the nodes.
    compression: Literal["none", "bf16", "int8", "powersgd", "topk"] = "none"
    compression_in_node: Literal["none", "bf16", "int8"] = "none"
    powersgd_rank: Count = 4
    topk_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    # What is summed and when: gradients in every step, or one step late; or every `sync_every` steps the weights.
    sync: Literal["every_step", "delayed", "local_sgd", "diloco"] = "every_step"
    sync_every: Count = 10
    outer_lr: Annotated[float, Field(gt=0)] = 0.7
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    # The sum of one round travels during the next.
    outer_overlap: bool = False


class ParallelConfig(Section):
    """The mesh: pipeline_parallel.depth x data_parallel.size x tensor_parallel.size ranks, tensor innermost."""

    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    pipeline_parallel: PipelineParallelConfig = PipelineParallelConfig()
    data_parallel: DataParallelConfig = DataParallelConfig()

    @property
    def world(self) -> int:
        return self.tensor_parallel.size * self.pipeline_parallel.depth * self.data_parallel.size


class ModelConfig(Section):
    """A decoder-only Transformer of the Llama or the GPT-2 family; what is null takes the family's usual value."""

    kind: Literal["llama", "gpt2"] = "llama"
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count | None = None
    ffn_hidden: Count | None = None
    vocab_size: Count = 256
    tied_embeddings: bool | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    # Llama only: GPT-2's positions are learned.
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0


class DataConfig(Section):
    """What is learned.

    `path` names text files, folders, patterns such as `docs/**/*.md`, or `.npy` and `.bin` token files (`.bin` is a
    bare array of `dtype`); null is the Python standard library's own sources. `tokenizer` is `bytes` or the path of a
    tokenizer.json.
    """

    path: Annotated[_Texts | None, BeforeValidator(lambda path: [path] if isinstance(path, str) else path)] = None
    seq_len: Count
    tokenizer: str = "bytes"
    dtype: Literal["uint8", "uint16", "uint32", "int32"] = "uint16"
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05


class LossScaleConfig(Section):
    """Dynamic loss scaling, for fp16 alone: halved at an overflow, doubled after `growth_interval` good steps."""

    initial: Annotated[float, Field(gt=0)] = 65536.0
    growth_interval: Count = 2000


class CheckpointingConfig(Section):
    """What backward computes again, layer by layer: `others` of those that no list names; a word alone is `others`."""

    others: Checkpointing = "none"
    none: _Layers = ()
    full: _Layers = ()
    selective: _Layers = ()

    @property
    def listed(self) -> dict[Checkpointing, tuple[int, ...]]:
        return {"none": self.none, "full": self.full, "selective": self.selective}

    def of_layers(self, num_layers: int) -> tuple[Checkpointing, ...]:
        """One word a layer.

        Raises:
            ValueError: a list names a layer that there is not, or two lists name the same.
        """
        found: dict[int, Checkpointing] = {}
        for mode, layers in self.listed.items():
            for layer in layers:
                if layer >= num_layers:
                    raise ValueError(
                        f"checkpointing: {mode} names layer {layer}; a model of {num_layers} has 0..{num_layers - 1}"
                    )
                if found.setdefault(layer, mode) != mode:
                    raise ValueError(
                        f"checkpointing: layer {layer} is listed under {found[layer]} and {mode}; choose one"
                    )
        return tuple(found.get(layer, self.others) for layer in range(num_layers))

    @model_serializer(mode="wrap")
    def _serialize(self, whole: SerializerFunctionWrapHandler) -> Any:
        return whole(self) if any(self.listed.values()) else self.others


class OffloadConfig(Section):
    """What lies in files, on the disk of the rank's machine, while it is not used; for CPU ranks. A word is both."""

    # AdamW's moments, and the fp32 masters of weights in another precision.
    optimizer: Literal["none", "disk"] = "none"
    # What forward saves for backward.
    activations: Literal["none", "disk"] = "none"
    # null: train.output_dir.
    folder: str | None = None


class TrainConfig(Section):
    """How it is learned: `global_batch` samples a step over all data-parallel ranks, cut into `accumulation` passes."""

    steps: Count
    global_batch: Count
    accumulation: Count = 1
    lr: Annotated[float, Field(gt=0)] = 3e-4
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: Annotated[tuple[_Beta, _Beta], Field(strict=False)] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    # null: no clipping.
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scale: LossScaleConfig = LossScaleConfig()
    activation_checkpointing: Annotated[
        CheckpointingConfig, BeforeValidator(lambda given: {"others": given} if isinstance(given, str) else given)
    ] = CheckpointingConfig()
    offload: Annotated[
        OffloadConfig,
        BeforeValidator(lambda given: {"optimizer": given, "activations": given} if isinstance(given, str) else given),
    ] = OffloadConfig()
    # null: at the end only.
    eval_every: Count | None = None
    # Passes of global_batch / accumulation samples; null: the whole validation part.
    eval_batches: Count | None = None
    # null: no checkpoints.
    checkpoint_every: Count | None = None
    log_every: Count = 1
    output_dir: str = "runs/default"
    # The longest wait for a peer: while everything starts, and afterwards.
    startup_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    timeout_s: Annotated[float, Field(gt=0)] = 120.0


class Config(Section):
    """All of it."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    parallel_config: ParallelConfig = ParallelConfig()

    def transformer(self) -> TransformerConfig:
        """The model's shape for `fusedcomm.nn.Transformer`; ValueError where it does not fit together."""
        from dataclasses import replace

        from fusedcomm.nn.config import TransformerConfig

        model = self.model
        family = TransformerConfig.llama if model.kind == "llama" else TransformerConfig.gpt2
        usual = family(
            vocab_size=model.vocab_size,
            hidden=model.hidden,
            layers=model.layers,
            heads=model.heads,
            seq_len=self.data.seq_len,
        )
        given = {name: getattr(model, name) for name in ("kv_heads", "ffn_hidden", "tied_embeddings")}
        return replace(
            usual,
            **{name: value for name, value in given.items() if value is not None},
            dropout=model.dropout,
            norm_eps=model.norm_eps,
            rope_theta=model.rope_theta,
            split_dim=self.parallel_config.tensor_parallel.split_dim,
            tp_sync=self.parallel_config.tensor_parallel.tp_sync,
            checkpointing=self.train.activation_checkpointing.of_layers(model.layers),
        )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file, with `a.b.c=value` overrides (YAML values) on top.

    A file without `train.output_dir` writes below `runs/`, in a folder named after the file.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or has a value that it cannot have.
    """
    path = Path(path)
    raw = read_keys(path, Config)
    for override in overrides:
        _apply_override(raw, override)
    if isinstance(train := raw.get("train"), dict):
        train.setdefault("output_dir", f"runs/{path.stem}")
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> Config:
    """Nested dictionaries, as YAML gives them, into a `Config`; ConfigError names every key at fault."""
    return parse(Config, raw)


def dump_config(config: Config) -> str:
    """The configuration as YAML that `load_config` reads back, with the model family's usual values filled in."""
    raw = config.model_dump(mode="json")
    shape = config.transformer()
    for name in ("kv_heads", "ffn_hidden", "tied_embeddings"):
        raw["model"][name] = getattr(shape, name)
    # A value that is refused, or means nothing, elsewhere.
    if config.model.kind != "llama":
        del raw["model"]["rope_theta"]
    if config.train.precision != "fp16":
        del raw["train"]["loss_scale"]
    return yaml.safe_dump(raw, sort_keys=False)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError([f"--set {override}: write it as key=value, for example train.steps=100"])
    try:
        value = read_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"--set {override}: {in_one_line(error)}"]) from error
    *parents, last = key.split(".")
    section = raw
    for depth, parent in enumerate(parents):
        below = section.get(parent)
        below = {} if below is None else below
        if not isinstance(below, dict):
            above = ".".join(parents[: depth + 1])
            raise ConfigError([f"--set {override}: {above} is {shown(below)}, which has no keys below it"])
        section[parent] = below
        section = below
    section[last] = value
