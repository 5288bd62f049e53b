"""What does not go with what in data parallelism, and why: the checks, and the table that the documentation shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fusedcomm.train.config import Config

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


REFUSALS = (
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
    """One line for each combination that is refused."""
    return (refusal.line for refusal in REFUSALS if refusal.applies(config))


def markdown_table() -> str:
    """The refusals for the documentation."""
    lines = ["| setting | does not go with | because |", "| --- | --- | --- |"]
    for refusal in REFUSALS:
        name = refusal.key.removeprefix("parallel_config.")
        lines.append(f"| `{name}: {refusal.value}` | {refusal.together} | {refusal.why} |")
    return "\n".join(lines)
