"""What a run says about itself: one console line a step, metrics.jsonl, TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import json
import math
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(frozen=True)
class StepMetrics:
    """One training step, the same numbers on every rank.

    `exposed_ms` is the time in which computing stood still for a transfer, `path` the method that ran the ops,
    `skipped` whether the weights were left as they were: by an fp16 overflow, or in the first step of `sync: delayed`.
    FLOPs are the model's, without recomputation. `pipeline_idle` is each pipeline rank's share of forward and backward
    without work, `pipeline_ideal_idle` what the schedule would leave.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    tflops_per_s: float
    iteration_ms: float
    exposed_ms: float
    memory_gib: float
    pipeline_idle: Sequence[float]
    pipeline_ideal_idle: Sequence[float]
    path: str
    skipped: bool = False
    loss_scale: float | None = None


@dataclass(frozen=True)
class EvalMetrics:
    """The validation samples after `step` steps; `loss` in nats a token, whose name is `unit`."""

    step: int
    loss: float
    accuracy: float
    num_tokens: int
    unit: str = "token"

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


class MetricsLog:
    """Writes a run's metrics on the console rank; on the others (`enabled=False`) every call does nothing.

    A context manager: its files are closed however the run ends. A run resumed after `first_step` steps keeps the lines
    up to there and replaces what an interrupted run wrote beyond. The progress bar shows on a terminal only.
    """

    def __init__(self, output_dir: str | Path, *, enabled: bool, total_steps: int, first_step: int = 0) -> None:
        self._folder = Path(output_dir)
        self._enabled = enabled
        self._total_steps = total_steps
        self._first_step = first_step
        self._console = Console(soft_wrap=True, highlight=False)

    def __enter__(self) -> MetricsLog:
        with ExitStack() as stack:
            if self._enabled:
                self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def step(self, metrics: StepMetrics, *, console: bool = True) -> None:
        """Record a step, and print its line if `console`."""
        if not self._enabled:
            return
        self._record("train", asdict(metrics))
        if console:
            self._console.print(step_line(metrics, self._total_steps))
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step)

    def evaluation(self, metrics: EvalMetrics) -> None:
        """Record an evaluation and print its line."""
        if not self._enabled:
            return
        self._record("validation", asdict(metrics) | {"perplexity": metrics.perplexity})
        self._console.print(evaluation_line(metrics))

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._enabled:
            self._console.print(text, markup=False)

    def _open(self, stack: ExitStack) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "metrics.jsonl"
        _keep_steps(path, self._first_step)
        self._file = stack.enter_context(path.open("a", encoding="utf-8", buffering=1))
        self._board = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._folder), purge_step=self._first_step + 1)
            stack.callback(self._board.close)
        self._bar = None
        if self._console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._bar = stack.enter_context(Progress(*columns, console=self._console, transient=True))
            self._task = self._bar.add_task("train", total=self._total_steps, completed=self._first_step)

    def _record(self, kind: str, values: Mapping[str, Any]) -> None:
        # NaN and infinity are no JSON.
        plain = {key: value if _is_plain(value) else str(value) for key, value in values.items()}
        self._file.write(json.dumps({"kind": kind, **plain}) + "\n")
        if self._board is not None:
            for key, value in _scalars(values):
                self._board.add_scalar(f"{kind}/{key}", value, values["step"])


def step_line(metrics: StepMetrics, total_steps: int) -> str:
    """The console's line for one step, of the same width every time."""
    width = len(str(total_steps))
    text = (
        f"step {metrics.step:>{width}}/{total_steps}  loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:<8.4g}  "
        f"lr {metrics.lr:.2e}  {_short(metrics.tokens_per_s)} tok/s  {metrics.tflops_per_s:.3g} TFLOP/s  "
        f"{metrics.iteration_ms:.0f} ms  exposed {metrics.exposed_ms:.0f} ms  {metrics.memory_gib:.2f} GiB  "
        f"{metrics.path}"
    )
    if len(metrics.pipeline_idle) > 1:
        text += f"  idle {mean(metrics.pipeline_idle):.0%} (schedule {mean(metrics.pipeline_ideal_idle):.0%})"
    if metrics.loss_scale is not None:
        text += f"  scale {metrics.loss_scale:g}"
    if metrics.skipped:
        # Without a scale an overflow is an error.
        text += "  skipped: overflow" if metrics.loss_scale is not None else "  skipped: gradients come a step late"
    return text


def evaluation_line(metrics: EvalMetrics) -> str:
    """The console's line for an evaluation."""
    return (
        f"validation after step {metrics.step}: loss {metrics.loss:.4f} nats a {metrics.unit}, perplexity "
        f"{metrics.perplexity:.2f}, accuracy {metrics.accuracy:.1%} ({metrics.num_tokens} {metrics.unit}s)"
    )


def path_summary(paths: Mapping[str, int]) -> str:
    """A `Recording`'s counts of `op:method` for the console: the method, or each with its count if several."""
    methods: dict[str, int] = {}
    for path, count in paths.items():
        method = path.rpartition(":")[2]
        methods[method] = methods.get(method, 0) + count
    if len(methods) <= 1:
        return next(iter(methods), "no op")
    return " ".join(f"{method} x{count}" for method, count in sorted(methods.items()))


def memory_gib(device: torch.device) -> float:
    """The most memory that this rank has held so far: of its GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Kibibytes, but bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """All numbers but the step's; those of a list, which has one a pipeline rank, by their place in it."""
    for key, value in values.items():
        if isinstance(value, list):
            yield from ((f"{key}/{rank}", entry) for rank, entry in enumerate(value))
        elif key != "step" and isinstance(value, int | float):
            yield key, value


def _is_plain(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _short(number: float) -> str:
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return f"{number:.0f}"


def _keep_steps(path: Path, last_step: int) -> None:
    """Drop the lines that were written after `last_step`, a torn last one as well."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["step"] <= last_step:
            kept.append(line + "\n")
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("".join(kept), encoding="utf-8")
    unfinished.replace(path)
