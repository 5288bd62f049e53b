"""The command: mistakes are one line each, exit code 2, before any process starts; what is right runs on all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from launch_driver import wait_until_session_ended
from typer.testing import CliRunner

from fusedcomm import cli
from fusedcomm.train import launch

_ROOT = Path(__file__).parent.parent
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """A tiny configuration on two tensor-parallel ranks, in a folder of its own; started by no launcher."""
    for name in _LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "text.txt").write_text("all work and no play\n" * 200)
    raw = {
        "model": {"layers": 2, "hidden": 32, "heads": 4},
        "data": {"seq_len": 16, "path": str(tmp_path / "text.txt")},
        "train": {"steps": 3, "global_batch": 4, "output_dir": str(tmp_path / "run"), "eval_batches": 1},
        "parallel_config": {"tensor_parallel": {"size": 2}},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """Instead of starting ranks, notes what would run on them; the exit code is 7."""
    calls = []

    def run_ranks(task, args, *, world, describe_rank):
        calls.append({"task": task, "args": args, "world": world, "last": describe_rank(world - 1)})
        return 7

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    monkeypatch.setattr(launch, "start_fork_server", lambda: None)
    return calls


def _invoke(*arguments: str | Path):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_train_starts_the_ranks_and_saves_the_resolved_configuration(config, started, tmp_path):
    result = _invoke("train", config, "--set", "train.lr=1e-2")
    assert result.exit_code == 7
    ((call),) = started
    assert call["task"] is cli._train_rank
    assert (call["world"], call["last"]) == (2, "pp 0, dp 0, tp 1")
    assert call["args"][0].train.lr == 1e-2
    assert result.stdout.splitlines()[0] == "2 ranks = pipeline 1 x data 1 x tensor 2"
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["train"]["lr"] == 1e-2
    assert saved["model"]["kv_heads"] == 4


def test_verify_starts_the_ranks(config, started):
    result = _invoke("verify", config, "--steps", "4", "--json", "x.json")
    assert result.exit_code == 7
    assert started[0]["task"] is cli._verify_rank
    assert started[0]["args"][1:] == (4, Path("x.json"))


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["--set", "parallel_config.tensor_paralel={size: 2}", "--set", "model.layers=x"],
            [
                "model.layers: must be a whole number, not 'x'",
                "parallel_config.tensor_paralel: unknown key; did you mean tensor_parallel?",
            ],
        ),
        (
            ["--set", "model.heads=1", "--set", "train.global_batch=3", "--set", "train.accumulation=2"],
            ["model.heads: 1 does not divide by", "train.global_batch: 3 samples cannot be cut"],
        ),
        (["--set", "data.path=nowhere.txt"], ["data.path: there is no file at nowhere.txt"]),
        (["--set", "data.seq_len=100000"], ["data: the training part has"]),
        (
            ["--set", "parallel_config.data_parallel.size=4096", "--set", "train.global_batch=4096"],
            ["parallel_config: 8192 ranks are too many for the"],
        ),
    ],
)
@pytest.mark.parametrize("command", ["train", "verify"])
def test_mistakes_are_one_line_each_before_any_process_starts(config, started, command, arguments, lines):
    result = _invoke(command, config, *arguments)
    assert result.exit_code == 2
    found = result.stderr.splitlines()
    assert len(found) == len(lines)
    assert all(line.startswith(f"{config}: {expected}") for line, expected in zip(found, lines))
    assert not started


def test_verify_refuses_what_one_process_does_otherwise(config, started):
    data = "parallel_config.data_parallel={size: 2, bucket_mb: 1.0, compression: int8, sync: delayed}"
    result = _invoke("verify", config, "--set", data)
    assert result.exit_code == 2
    assert [line.partition(": ")[2].partition(": ")[0] for line in result.stderr.splitlines()] == [
        "parallel_config.data_parallel.sync",
        "parallel_config.data_parallel.compression",
    ]
    assert not started
    assert _invoke("train", config, "--set", data).exit_code == 7


def test_a_missing_configuration_or_checkpoint_is_one_line(config, started, tmp_path):
    result = _invoke("train", tmp_path / "none.yaml")
    assert (result.exit_code, result.stderr) == (
        2,
        f"{tmp_path}/none.yaml: cannot be read: No such file or directory\n",
    )
    result = _invoke("train", config, "--resume", tmp_path / "none")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"--resume {tmp_path}/none: there is no such folder")
    # The run's own folder, in which the checkpoints lie.
    (tmp_path / "run" / "step-00000003").mkdir(parents=True)
    result = _invoke("train", config, "--resume", tmp_path / "run")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.startswith(f"--resume {tmp_path}/run: holds no complete checkpoint")
    assert not started


def test_an_output_folder_that_cannot_be_written_is_one_line(config, started, tmp_path):
    (tmp_path / "file").write_text("")
    result = _invoke("train", config, "--set", f"train.output_dir={tmp_path}/file/run")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"train.output_dir: {tmp_path}/file/run cannot be written")
    assert not started


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["verify", "--json", "/no/such/x.json"], "--json /no/such/x.json: there is no folder /no/such"),
        (["trace", "--json", "/tmp"], "--json /tmp: is a folder"),
        (["trace", "--plot", "/no/such/x.png"], "--plot /no/such/x.png: there is no folder /no/such"),
        (["trace", "--plot", "x.jpgg"], "--plot x.jpgg: .jpgg is no kind of picture"),
    ],
)
def test_what_cannot_be_written_at_the_end_is_one_line_before_the_start(config, started, arguments, line):
    result = _invoke(arguments[0], config, *arguments[1:])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.startswith(line)
    assert not started


def test_a_picture_needs_matplotlib_before_the_start(config, started, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = _invoke("trace", config, "--plot", "x.png")
    assert result.exit_code == 2
    assert result.stderr.startswith("--plot needs matplotlib: pip install 'fusedcomm[plots]'")
    assert not started


def _pretend_gpus(monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_fit_takes_a_layout_for_the_gpus(config, started, monkeypatch):
    _pretend_gpus(monkeypatch, 4)
    result = _invoke("train", config, "--fit")
    assert result.stdout.splitlines()[0] == "4 ranks = pipeline 1 x data 1 x tensor 4 (fitted to 4 GPUs)"
    assert started[0]["world"] == 4


def test_more_ranks_than_gpus_are_refused(config, started, monkeypatch):
    _pretend_gpus(monkeypatch, 1)
    result = _invoke("train", config)
    assert result.exit_code == 2
    assert "2 ranks but this machine has 1 GPUs; use --fit" in result.stderr
    assert not started


def test_fit_changes_nothing_without_gpus_or_launcher(config, started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = _invoke("train", config, "--fit")
    assert result.stdout.splitlines()[0] == "2 ranks = pipeline 1 x data 1 x tensor 2"


def _under_torchrun(monkeypatch, rank: int, world: int) -> None:
    for name, value in zip(_LAUNCHER_VARIABLES, (rank, world, rank, world, "127.0.0.1", 29500)):
        monkeypatch.setenv(name, str(value))


def test_under_a_launcher_the_task_runs_here(config, started, monkeypatch, tmp_path):
    _under_torchrun(monkeypatch, 1, 4)
    called = []
    monkeypatch.setattr(cli, "_train_rank", lambda config, resume: called.append((config, resume)))
    result = _invoke("train", config, "--fit", "--resume", "auto")
    assert (result.exit_code, result.output) == (0, "")
    ((fitted, resume),) = called
    assert (fitted.parallel_config.world, resume) == (4, "auto")
    assert not started
    # The first rank's to write.
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("rank", "num_lines"), [(0, 1), (1, 0)])
def test_under_a_launcher_the_first_rank_alone_complains(config, monkeypatch, rank, num_lines):
    _under_torchrun(monkeypatch, rank, 3)
    result = _invoke("train", config)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == num_lines
    assert not num_lines or "= 2 ranks, but 3 are running" in result.stderr


def test_incomplete_launcher_variables_are_one_line(config, started, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    result = _invoke("train", config)
    assert result.exit_code == 2
    assert result.stderr.startswith("launch: torchrun has set RANK but not WORLD_SIZE")


def _start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fusedcomm", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def test_a_model_is_trained_from_the_command_line(config, tmp_path):
    output, errors = _start("train", config).communicate(timeout=120)
    lines = output.splitlines()
    assert lines[0] == "2 ranks = pipeline 1 x data 1 x tensor 2"
    assert [line[:8] for line in lines if line.startswith("step ")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert any(line.startswith("validation after step 3: loss ") for line in lines), errors
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_ctrl_c_ends_training_without_a_trace(config):
    process = _start("train", config, "--set", "train.steps=100000")
    try:
        assert any(" 2/100000 " in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 128 + signal.SIGINT
    assert errors == "fusedcomm: SIGINT: all 2 ranks ended\n"
    wait_until_session_ended(process.pid)
