"""How a configuration lies on its ranks: what must divide, which layout fits another number of ranks, who is where."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fusedcomm.nn.config import TransformerConfig, check_sync, layer_flops
from fusedcomm.parallel.schedule import split_layers, stages_on_each_rank
from fusedcomm.train.config import Config, ConfigError, ParallelConfig
from fusedcomm.train.modes import mode_problems

_TP = "parallel_config.tensor_parallel.size"
_SYNC = "parallel_config.tensor_parallel.tp_sync"
_PP = "parallel_config.pipeline_parallel"
_DP = "parallel_config.data_parallel.size"


def validate_for_world(config: Config, world: int) -> None:
    """Refuse a configuration that `world` ranks cannot run; starts nothing and sends nothing.

    Raises:
        ConfigError: one line per mistake, each with the numbers, the rule and the remedy.
    """
    parallel = config.parallel_config
    lines = []
    if parallel.world != world:
        lines.append(
            f"parallel_config: pipeline_parallel.depth {parallel.pipeline_parallel.depth} x "
            f"data_parallel.size {parallel.data_parallel.size} x "
            f"tensor_parallel.size {parallel.tensor_parallel.size} = {parallel.world} ranks, but "
            f"{world} {'is' if world == 1 else 'are'} running; change a degree or start {parallel.world} ranks"
        )
    lines += problems(config)
    if lines:
        raise ConfigError(lines)


def fit(config: Config, num_ranks: int) -> Config:
    """The configuration with the layout that fits `num_ranks` ranks and is nearest to the one asked for.

    Nearest by the ratios of the degrees; among equals the one with more tensor parallelism, then more data parallelism.
    Where no layout of exactly `num_ranks` is possible, the largest smaller number is used.

    Raises:
        ConfigError: what hinders the model even on a single rank.
    """
    asked = config.parallel_config
    if asked.world == num_ranks and not problems(config):
        return config
    for count in range(num_ranks, 0, -1):
        candidates = [candidate for candidate in layouts(config, count) if not problems(candidate)]
        if candidates:
            return min(candidates, key=lambda candidate: _distance(candidate.parallel_config, asked))
    raise ConfigError(problems(with_degrees(config, pp=1, dp=1, tp=1)))


def with_degrees(config: Config, *, pp: int, dp: int, tp: int) -> Config:
    """The configuration on another mesh; layers pinned to stages are balanced anew where the depth changes."""
    parallel = config.parallel_config
    pipeline = parallel.pipeline_parallel
    if pp != pipeline.depth:
        pipeline = pipeline.model_copy(update={"depth": pp, "stage_layers": None})
    update = {
        "tensor_parallel": parallel.tensor_parallel.model_copy(update={"size": tp}),
        "pipeline_parallel": pipeline,
        "data_parallel": parallel.data_parallel.model_copy(update={"size": dp}),
    }
    return config.model_copy(update={"parallel_config": parallel.model_copy(update=update)})


def layouts(config: Config, num_ranks: int) -> Iterator[Config]:
    """The configuration on every mesh of exactly `num_ranks` ranks, whether it fits or not."""
    for tp in divisors(num_ranks):
        for dp in divisors(num_ranks // tp):
            yield with_degrees(config, pp=num_ranks // tp // dp, dp=dp, tp=tp)


def stages_of(config: Config) -> list[range]:
    """The layers of every pipeline stage, as pinned by `stage_layers` or balanced by estimated FLOPs."""
    pipeline = config.parallel_config.pipeline_parallel
    flops = layer_flops(config.transformer())
    return split_layers(
        [flops.layer] * config.model.layers,
        pipeline.depth * _stages_per_rank(config),
        first_cost=flops.embedding,
        last_cost=flops.head,
        sizes=pipeline.stage_layers,
    )


def problems(config: Config) -> list[str]:
    """Everything that does not fit, whatever the number of ranks: a line each."""
    if sync := list(_layer_problems(config)):
        return [*sync, *_batch_problems(config), *_training_problems(config)]
    try:
        shape = config.transformer()
    except ValueError as error:
        return [f"model: {_detail(error)}", *_training_problems(config)]
    return [
        *_model_problems(config, shape),
        *_pipeline_problems(config),
        *_batch_problems(config),
        *_training_problems(config),
        *mode_problems(config),
    ]


def describe_layout(config: Config) -> str:
    """One line for the console: the mesh, the schedule and the layers of each stage."""
    parallel = config.parallel_config
    pipeline, tensor = parallel.pipeline_parallel, parallel.tensor_parallel
    text = (
        f"{parallel.world} {'rank' if parallel.world == 1 else 'ranks'} = pipeline {pipeline.depth} "
        f"x data {parallel.data_parallel.size} x tensor {tensor.size}"
    )
    if pipeline.depth > 1:
        layers = " | ".join(str(len(layers)) for layers in stages_of(config))
        text += f"; {pipeline.schedule}, {pipeline.micro_batches} micro-batches, layers {layers}"
    if tensor.split_dim == 0:
        text += "; MLPs row-parallel first (split_dim 0), attention split by heads"
    if tensor.tp_sync != "every_layer":
        text += f"; tensor-parallel synchronisation: {tensor.tp_sync}"
    return text


def coordinates(parallel: ParallelConfig, rank: int) -> str:
    """Where a rank sits on the mesh, whose axes are pp, dp, tp from outermost to innermost."""
    rest, tp = divmod(rank, parallel.tensor_parallel.size)
    pp, dp = divmod(rest, parallel.data_parallel.size)
    return f"pp {pp}, dp {dp}, tp {tp}"


def _layer_problems(config: Config) -> Iterator[str]:
    tensor = config.parallel_config.tensor_parallel
    try:
        checkpointing = config.train.activation_checkpointing.of_layers(config.model.layers)
    except ValueError as error:
        yield f"train.activation_checkpointing: {_detail(error)}"
        return
    try:
        check_sync(_SYNC, tensor.tp_sync, tensor.split_dim, checkpointing)
    except ValueError as error:
        yield str(error)


def _model_problems(config: Config, shape: TransformerConfig) -> Iterator[str]:
    tp = config.parallel_config.tensor_parallel
    padded = math.ceil(shape.vocab_size / tp.size) * tp.size
    must_divide = {
        "heads": (shape.heads, "each rank computes whole heads"),
        "vocab_size": (shape.vocab_size, f"pad the vocabulary to {padded}"),
    }
    # Not given, it is `heads`, which is reported.
    if config.model.kv_heads is not None:
        must_divide["kv_heads"] = (shape.kv_heads, "each rank holds whole key and value heads")
    if tp.split_dim == 1:
        must_divide["ffn_hidden"] = (shape.ffn_hidden, "or set parallel_config.tensor_parallel.split_dim: 0")
    else:
        must_divide["hidden"] = (shape.hidden, "split_dim: 0 splits the hidden features of the MLPs")
    for name, (value, note) in must_divide.items():
        if value % tp.size:
            yield (
                f"model.{name}: {value} does not divide by {_TP} {tp.size} (remainder {value % tp.size}); "
                f"choose a multiple of {tp.size}, or a size that divides {value}; {note}"
            )
    if config.model.kind != "llama" and "rope_theta" in config.model.model_fields_set:
        yield f"model.rope_theta: {config.model.kind} learns its positions and does not use it; remove it or use llama"
    if config.data.tokenizer == "bytes" and shape.vocab_size < 256:
        yield f"model.vocab_size: {shape.vocab_size} is less than a byte's 256 values; raise it or set data.tokenizer"


def _pipeline_problems(config: Config) -> Iterator[str]:
    try:
        stages_of(config)
    except ValueError as error:
        yield f"{_PP}: {_detail(error)}"


def _stages_per_rank(config: Config) -> int:
    pipeline = config.parallel_config.pipeline_parallel
    return stages_on_each_rank(
        pipeline.schedule,
        pp=pipeline.depth,
        micro_batches=pipeline.micro_batches,
        num_layers=config.model.layers,
        stages_per_rank=pipeline.stages_per_rank,
    )


def _batch_problems(config: Config) -> Iterator[str]:
    train, parallel = config.train, config.parallel_config
    dp, micro_batches = parallel.data_parallel.size, parallel.pipeline_parallel.micro_batches
    parts = dp * train.accumulation
    samples = train.global_batch // parts
    if train.global_batch % parts or samples < micro_batches:
        below = train.global_batch // parts * parts
        choices = f"{below} or {below + parts}" if below >= parts * micro_batches else f"{parts * micro_batches}"
        yield (
            f"train.global_batch: {train.global_batch} samples cannot be cut into {_DP} {dp} x train.accumulation "
            f"{train.accumulation} = {parts} equal passes of at least {micro_batches} samples, one for each of "
            f"{_PP}.micro_batches; use {choices} samples, or change a factor"
        )
    elif samples < 2 * micro_batches and parallel.tensor_parallel.tp_sync == "interleave":
        yield (
            f"{_SYNC}: interleave computes two halves of each micro-batch, but train.global_batch {train.global_batch} "
            f"in {parts * micro_batches} micro-batches leaves some with one sample; use {2 * parts * micro_batches} "
            "samples, fewer micro-batches or every_layer"
        )


def _training_problems(config: Config) -> Iterator[str]:
    train = config.train
    if train.min_lr > train.lr:
        yield f"train.min_lr: {train.min_lr:g} exceeds train.lr {train.lr:g}, from which it is reached; lower it"
    if train.warmup_steps > train.steps:
        yield f"train.warmup_steps: {train.warmup_steps} exceeds train.steps {train.steps}; warm up for fewer steps"
    if train.precision != "fp16" and "loss_scale" in train.model_fields_set:
        yield f"train.loss_scale: {train.precision} needs none; remove it or set train.precision: fp16"
    if train.offload.activations == "disk" and "selective" in {*_checkpointing(config)}:
        yield (
            "train.offload.activations: disk does not go with selective checkpointing, which keeps the GEMMs' outputs "
            "itself, out of reach; use full or none"
        )
    if train.offload.folder is not None and "disk" not in (train.offload.activations, train.offload.optimizer):
        yield f"train.offload.folder: {train.offload.folder} would stay empty; set train.offload.optimizer: disk"
    if train.loss_scale.initial != 2.0 ** round(math.log2(train.loss_scale.initial)):
        yield f"train.loss_scale.initial: {train.loss_scale.initial:g} is no power of two, so scaling rounds; use one"


def _checkpointing(config: Config) -> Iterator[str]:
    """Every word that is used, of layers that there are or not."""
    given = config.train.activation_checkpointing
    yield given.others
    yield from (mode for mode, layers in given.listed.items() if layers)


def _detail(error: ValueError) -> str:
    """The message without the function that raised it, in the words of the configuration."""
    return str(error).partition(": ")[2]


def divisors(number: int) -> list[int]:
    """In ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _distance(parallel: ParallelConfig, asked: ParallelConfig) -> tuple[float, int, int]:
    ratios = (
        parallel.tensor_parallel.size / asked.tensor_parallel.size,
        parallel.pipeline_parallel.depth / asked.pipeline_parallel.depth,
        parallel.data_parallel.size / asked.data_parallel.size,
    )
    # Rounded, so that equal ratios in another order are equal sums.
    total = round(sum(abs(math.log2(ratio)) for ratio in ratios), 9)
    return total, -parallel.tensor_parallel.size, -parallel.data_parallel.size
