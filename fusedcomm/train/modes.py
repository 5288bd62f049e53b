"""What does not go with what in data parallelism, and why: the checks, and the table that the documentation shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fusedcomm.train.config import Config, DataParallelConfig

_DP = "parallel_config.data_parallel"


@dataclass(frozen=True)
class Refusal:
    """A value of `key` that cannot be used `together` with another setting."""

    key: str
    value: str
    together: str
    why: str
    remedy: str
    applies: Callable[[Config], bool]

    @property
    def line(self) -> str:
        return f"{self.key}: {self.value} does not go with {self.together}: {self.why}; {self.remedy}"


def _in_forward(config: Config) -> bool:
    data = config.parallel_config.data_parallel
    return data.overlap == "backward+forward" and data.size > 1


def _ties_over_stages(config: Config) -> bool:
    return config.transformer().tied_embeddings and config.parallel_config.pipeline_parallel.depth > 1


def _data(config: Config) -> DataParallelConfig:
    return config.parallel_config.data_parallel


def _compresses(config: Config) -> bool:
    return _data(config).size > 1 and (_data(config).compression, _data(config).compression_in_node) != ("none", "none")


def _syncs(config: Config, *modes: str) -> bool:
    return _data(config).size > 1 and _data(config).sync in modes


def _shares(config: Config) -> bool:
    return _data(config).size > 1 and _data(config).mode != "replicate"


def _fully_shards(config: Config) -> bool:
    return _shares(config) and _data(config).mode == "fsdp"


REFUSALS = (
    Refusal(
        f"{_DP}.mode",
        "zero1 or fsdp",
        "overlap: backward+forward",
        "its weights arrive during the next forward, which sums must have come before",
        "use overlap: backward or mode: replicate",
        lambda config: _shares(config) and _in_forward(config),
    ),
    Refusal(
        f"{_DP}.mode",
        "zero1 or fsdp",
        "sync: delayed, local_sgd or diloco",
        "they need whole gradients, or weights and moments of their own, on every rank",
        "use sync: every_step or mode: replicate",
        lambda config: _shares(config) and _data(config).sync != "every_step",
    ),
    Refusal(
        f"{_DP}.mode",
        "zero1 or fsdp",
        "any compression but none",
        "it makes up for what is lost in an all-reduce, and shares are reduce-scattered",
        "set compression: none and compression_in_node: none, or mode: replicate",
        lambda config: _shares(config) and _compresses(config),
    ),
    Refusal(
        f"{_DP}.mode",
        "zero1 or fsdp",
        "algorithm: auto, tree or hierarchical",
        "they are ways to all-reduce, and summands go straight to the owner of their share",
        "set algorithm: ring or mode: replicate",
        lambda config: _shares(config) and _data(config).algorithm != "ring",
    ),
    Refusal(
        f"{_DP}.mode",
        "fsdp",
        "bucket_mb or window_mb",
        "its buckets are the layers, each of which is gathered and summed as a whole",
        "set both to null, or use mode: zero1",
        lambda config: _fully_shards(config) and (_data(config).bucket_mb, _data(config).window_mb) != (None, None),
    ),
    Refusal(
        f"{_DP}.mode",
        "fsdp",
        "train.offload.activations: disk",
        "what forward saves refers to gathered weights, which would be written as well",
        "set train.offload.activations: none or mode: zero1",
        lambda config: _fully_shards(config) and config.train.offload.activations == "disk",
    ),
    Refusal(
        f"{_DP}.sync",
        "delayed, local_sgd or diloco",
        "overlap: backward+forward",
        "no gradient is summed in the step that computes it",
        "use sync: every_step or overlap: backward",
        lambda config: _in_forward(config) and not _syncs(config, "every_step"),
    ),
    Refusal(
        f"{_DP}.sync",
        "delayed, local_sgd or diloco",
        "train.precision: fp16",
        "the loss scale of a late gradient, or of another replica, may be another one",
        "use bf16 or sync: every_step",
        lambda config: _syncs(config, "delayed", "local_sgd", "diloco") and config.train.precision == "fp16",
    ),
    Refusal(
        f"{_DP}.sync",
        "local_sgd or diloco",
        "tied embeddings over pipeline stages",
        "the two copies are summed by different ranks, and would drift apart by rounding",
        "set model.tied_embeddings: false or sync: every_step",
        lambda config: _syncs(config, "local_sgd", "diloco") and _ties_over_stages(config),
    ),
    Refusal(
        f"{_DP}.compression",
        "anything but none",
        "sync: local_sgd",
        "it averages weights, of which too much would be lost",
        "use sync: diloco, which sums what weights have moved by, or compression: none",
        lambda config: _compresses(config) and _syncs(config, "local_sgd"),
    ),
    Refusal(
        f"{_DP}.compression",
        "anything but none",
        "train.precision: fp16",
        "a step that overflows leaves its infinities in what the next ones make up for",
        "use bf16 or compression: none",
        lambda config: _compresses(config) and config.train.precision == "fp16",
    ),
    Refusal(
        f"{_DP}.compression",
        "anything but none",
        "bucket_mb: null",
        "sizes that follow measurements would round otherwise in each run",
        "set bucket_mb, for example to 4",
        lambda config: _compresses(config) and _data(config).bucket_mb is None and _syncs(config, "every_step"),
    ),
    Refusal(
        f"{_DP}.compression_in_node",
        "anything but none",
        "algorithm: auto, ring or tree",
        "they know no nodes",
        "set algorithm: hierarchical or compression_in_node: none",
        lambda config: _data(config).compression_in_node != "none" and _data(config).algorithm != "hierarchical",
    ),
    Refusal(
        f"{_DP}.compression_in_node",
        "anything but none",
        "compression: powersgd",
        "what stands for matrices must be summed exactly",
        "set compression_in_node: none",
        lambda config: _data(config).compression_in_node != "none" and _data(config).compression == "powersgd",
    ),
    Refusal(
        f"{_DP}.overlap",
        "backward+forward",
        "train.clip_norm",
        "the norm of all gradients is known only when the last sum is in, after the first were applied",
        "set train.clip_norm: null or overlap: backward",
        lambda config: _in_forward(config) and config.train.clip_norm is not None,
    ),
    Refusal(
        f"{_DP}.overlap",
        "backward+forward",
        "train.precision: fp16",
        "an overflow that a late sum shows could not undo what was applied before",
        "use bf16 or overlap: backward",
        lambda config: _in_forward(config) and config.train.precision == "fp16",
    ),
    Refusal(
        f"{_DP}.overlap",
        "backward+forward",
        "tp_sync: interleave or ladder",
        "blocks run in turns and not layer by layer, so no layer's forward could wait for its own weights",
        "use tp_sync: every_layer or overlap: backward",
        lambda config: _in_forward(config) and config.parallel_config.tensor_parallel.tp_sync != "every_layer",
    ),
    Refusal(
        f"{_DP}.overlap",
        "backward+forward",
        "tied embeddings over pipeline stages",
        "the two copies' gradients are added when both sums are in, at the end of backward",
        "set model.tied_embeddings: false or overlap: backward",
        lambda config: _in_forward(config) and _ties_over_stages(config),
    ),
)


def mode_problems(config: Config) -> Iterator[str]:
    """One line for each combination that is refused, and for steps that are no multiples of the replicas' syncs."""
    yield from (refusal.line for refusal in REFUSALS if refusal.applies(config))
    if not _syncs(config, "local_sgd", "diloco"):
        return
    every = _data(config).sync_every
    for name in ("steps", "eval_every", "checkpoint_every"):
        value = getattr(config.train, name)
        if value is not None and value % every:
            yield (
                f"train.{name}: {value} is no multiple of {_DP}.sync_every {every}, but replicas share their weights "
                f"right after a sync only; use a multiple"
            )


def comparison_problems(config: Config) -> Iterator[str]:
    """One line for each setting whose gradients are meant to be others than those of one process."""
    if _syncs(config, "delayed", "local_sgd", "diloco"):
        yield (
            f"{_DP}.sync: {_data(config).sync} steps by other gradients than one process would, so there is nothing to "
            "compare; verify with every_step"
        )
    if _compresses(config):
        yield (
            f"{_DP}.compression: what travels smaller sums up to other gradients than one process has, so there is "
            "nothing to compare; verify with none, also in the node"
        )


def markdown_table() -> str:
    """The refusals for the documentation."""
    lines = ["| setting | does not go with | because |", "| --- | --- | --- |"]
    for refusal in REFUSALS:
        name = refusal.key.removeprefix("parallel_config.")
        lines.append(f"| `{name}: {refusal.value}` | {refusal.together} | {refusal.why} |")
    return "\n".join(lines)
