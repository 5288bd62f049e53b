"""Metrics reach the console, metrics.jsonl and TensorBoard, and a resumed run continues the files."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path

import pytest
import torch

from fusedcomm.train.metrics import (
    EvalMetrics,
    MetricsLog,
    StepMetrics,
    evaluation_line,
    memory_gib,
    path_summary,
    step_line,
)


def _step(step: int, **changes) -> StepMetrics:
    values = {
        "step": step,
        "loss": 2.5,
        "grad_norm": 1.25,
        "lr": 1e-3,
        "tokens_per_s": 12345.0,
        "tflops_per_s": 0.0123,
        "iteration_ms": 98.7,
        "exposed_ms": 4.2,
        "memory_gib": 0.5,
        "pipeline_idle": [0.0],
        "pipeline_ideal_idle": [0.0],
        "path": "chunked",
    }
    return StepMetrics(**(values | changes))


def _records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_step_line_holds_every_number():
    assert step_line(_step(7), 150) == (
        "step   7/150  loss 2.5000  grad norm 1.25      lr 1.00e-03  12.3k tok/s  0.0123 TFLOP/s  99 ms  exposed 4 ms  "
        "0.50 GiB  chunked"
    )
    overflow = step_line(_step(7, skipped=True, loss_scale=1024.0, grad_norm=math.inf), 150)
    assert overflow.endswith("chunked  scale 1024  skipped: overflow")
    assert "grad norm inf" in overflow
    delayed = step_line(_step(1, skipped=True, grad_norm=0.0), 150)
    assert delayed.endswith("chunked  skipped: gradients come a step late")
    staged = step_line(_step(7, pipeline_idle=[0.25, 0.35], pipeline_ideal_idle=[0.2, 0.2]), 150)
    assert staged.endswith("chunked  idle 30% (schedule 20%)")


def test_evaluation_line_holds_loss_perplexity_and_accuracy():
    line = evaluation_line(EvalMetrics(step=7, loss=math.log(8), accuracy=0.5, num_tokens=100))
    assert line == "validation after step 7: loss 2.0794 nats a token, perplexity 8.00, accuracy 50.0% (100 tokens)"
    assert EvalMetrics(1, 1e6, 0.0, 1).perplexity == math.inf


def test_path_summary_names_what_ran():
    assert path_summary({}) == "no op"
    assert path_summary({"all_gather_matmul:chunked": 3, "matmul_reduce_scatter:chunked": 4}) == "chunked"
    assert path_summary({"a:chunked": 3, "b:serial": 1, "c:serial": 1}) == "chunked x3 serial x2"


def test_log_writes_lines_and_records(tmp_path, capsys):
    with MetricsLog(tmp_path, enabled=True, total_steps=10) as log:
        log.step(_step(1))
        log.step(_step(2, grad_norm=math.nan), console=False)
        log.evaluation(EvalMetrics(2, 1.0, 0.5, 64))
        log.say("[note] done")
    out = capsys.readouterr().out
    assert out.splitlines() == [step_line(_step(1), 10), evaluation_line(EvalMetrics(2, 1.0, 0.5, 64)), "[note] done"]
    first, second, evaluation = _records(tmp_path)
    assert first["kind"] == "train"
    assert first["tokens_per_s"] == 12345.0
    # JSON has no number for it.
    assert second["grad_norm"] == "nan"
    assert evaluation == {
        "kind": "validation",
        "step": 2,
        "loss": 1.0,
        "accuracy": 0.5,
        "num_tokens": 64,
        "perplexity": math.e,
        "unit": "token",
    }


def test_other_ranks_write_nothing(tmp_path, capsys):
    with MetricsLog(tmp_path / "run", enabled=False, total_steps=10) as log:
        log.step(_step(1))
        log.evaluation(EvalMetrics(1, 1.0, 0.5, 64))
        log.say("unheard")
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path):
    with MetricsLog(tmp_path, enabled=True, total_steps=10) as log:
        for step in range(1, 6):
            log.step(_step(step), console=False)
        log.evaluation(EvalMetrics(5, 1.0, 0.5, 64))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    with MetricsLog(tmp_path, enabled=True, total_steps=10, first_step=3) as log:
        log.step(_step(4, loss=9.0), console=False)
    assert [(record["step"], record["loss"]) for record in _records(tmp_path)] == [
        (1, 2.5),
        (2, 2.5),
        (3, 2.5),
        (4, 9.0),
    ]
    # And a run from the start replaces all.
    with MetricsLog(tmp_path, enabled=True, total_steps=10):
        pass
    assert _records(tmp_path) == []


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="lists this process's open files, which takes Linux's /proc"
)
def test_an_error_leaves_no_file_open(tmp_path):
    def open_files() -> list[str]:
        links = Path("/proc/self/fd").iterdir()
        return [target for link in links if link.exists() and (target := os.readlink(link)).startswith(str(tmp_path))]

    def fail() -> None:
        with MetricsLog(tmp_path, enabled=True, total_steps=10) as log:
            log.step(_step(1), console=False)
            assert open_files()
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert open_files() == []


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard")
def test_tensorboard_gets_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path, enabled=True, total_steps=10) as log:
        log.step(_step(1, pipeline_idle=[0.25, 0.5]), console=False)
        log.evaluation(EvalMetrics(1, 1.5, 0.5, 64))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("train/loss")[0].value == 2.5
    assert events.Scalars("train/pipeline_idle/1")[0].value == 0.5
    assert events.Scalars("validation/loss")[0].step == 1
    assert {"train/lr", "train/exposed_ms", "validation/perplexity"} <= set(events.Tags()["scalars"])


def test_memory_is_that_of_the_process():
    assert 0.05 < memory_gib(torch.device("cpu")) < 1000
