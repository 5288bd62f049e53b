"""A whole run: it learns, it goes on where it stopped, and its checkpoints load under another layout."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import time
from pathlib import Path

import pytest
import torch
from helpers import run_ranks
from test_verify import tiny
from torch.distributed.distributed_c10d import _world

from fusedcomm import PeerError
from fusedcomm.comm import transport
from fusedcomm.comm.channel import channel_of
from fusedcomm.train import checkpoint, loop
from fusedcomm.train.checkpoint import latest_checkpoint
from fusedcomm.train.config import parse_config
from fusedcomm.train.data import open_data
from fusedcomm.train.loop import mesh_of, train
from fusedcomm.train.trace import trace
from fusedcomm.train.trainer import Trainer, _idle_shares

STEPS = 6


def run_train(rank, world, raw, resume, steps):
    config = parse_config(raw)
    if steps is not None:
        # As if it were ended: the learning rate still follows the configured number of steps.
        loop.range = lambda first, last: range(first, min(last, steps))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(config, resume=resume, device=torch.device("cpu"))
    finally:
        if steps is not None:
            del loop.range


def run(raw: dict, *, resume: str | None = None, steps: int | None = None) -> None:
    world = parse_config(raw).parallel_config.world
    run_ranks(world, run_train, raw, resume, steps, timeout_s=120)


def records(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in records(folder, "train")]


def config(folder: Path, pp: int, dp: int, tp: int, **overrides) -> dict:
    raw = tiny(pp, dp, tp, **overrides)
    raw["train"] |= {"steps": STEPS, "output_dir": str(folder), "checkpoint_every": 3, "eval_batches": 1}
    raw["model"]["dropout"] = 0.1
    return raw


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, precision):
    whole = config(tmp_path / "whole", 2, 1, 2, train__precision=precision)
    broken = config(tmp_path / "broken", 2, 1, 2, train__precision=precision)
    run(whole)
    # Ended after step 4, one step past its checkpoint.
    run(broken, steps=4)
    assert latest_checkpoint(tmp_path / "broken").name == "step-00000003"
    run(broken, resume="auto")
    assert len(losses(tmp_path / "whole")) == STEPS
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    for record in records(tmp_path / "whole", "train"):
        # One for each pipeline rank; two micro-batches on two stages leave a third of the step.
        assert all(0 <= idle < 1 for idle in record["pipeline_idle"])
        assert len(record["pipeline_idle"]) == 2
        assert record["pipeline_ideal_idle"] == pytest.approx([1 / 3, 1 / 3])
    assert records(tmp_path / "broken", "validation")[-1] == records(tmp_path / "whole", "validation")[-1]


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_loads_under_another_layout(tmp_path, tied):
    overrides = {"model__tied_embeddings": tied}
    run(config(tmp_path / "first", 2, 1, 2, **overrides))
    expected = losses(tmp_path / "first")
    checkpoint = str(tmp_path / "first" / "step-00000003")
    for layout in [(1, 1, 1), (1, 2, 2), (2, 2, 1)]:
        folder = tmp_path / "x".join(map(str, layout))
        run(config(folder, *layout, **overrides), resume=checkpoint)
        # Wrong or missing moments would show in the steps after the first.
        assert losses(folder) == pytest.approx(expected[3:], rel=1e-4)


def test_tied_copies_on_one_rank_load_too(tmp_path):
    overrides = {"model__tied_embeddings": True, "pipeline_parallel__schedule": "zbv"}
    run(config(tmp_path / "first", 2, 1, 1, **overrides))
    run(config(tmp_path / "again", 2, 1, 1, **overrides), resume=str(tmp_path / "first" / "step-00000003"))
    assert losses(tmp_path / "again") == losses(tmp_path / "first")[3:]


def run_late(rank, world, raw):
    """The limits of all groups, once training has begun."""
    open_data = loop.open_data

    def open_late(config):
        time.sleep(7 * rank)
        return open_data(config)

    loop.open_data = open_late
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(parse_config(raw), resume=None, device=torch.device("cpu"))
    finally:
        loop.open_data = open_data
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in _world.pg_map}


def test_a_rank_may_be_late_while_everything_starts(tmp_path):
    # Data-parallel ranks, whose axis is the default group, and who have a bulk group.
    raw = config(tmp_path, 1, 2, 1, train__timeout_s=5.0, train__startup_timeout_s=60.0)
    assert run_ranks(2, run_late, raw, fresh_timeout_s=60, timeout_s=120) == [{5.0}, {5.0}]


def run_refused(rank, world, raw, resume, message):
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(ValueError, match=message):
        train(parse_config(raw), resume=resume, device=torch.device("cpu"))


def test_what_is_no_checkpoint_of_this_run_is_refused(tmp_path):
    run(config(tmp_path / "run", 1, 1, 1))
    checkpoint = str(tmp_path / "run" / "step-00000003")
    (tmp_path / "half").mkdir()
    short = config(tmp_path / "other", 1, 1, 1)["train"] | {"steps": 2}
    refused = [
        (config(tmp_path / "other", 1, 1, 1, model__ffn_hidden=64), checkpoint, "does not fit this model: .*48.*64"),
        (config(tmp_path / "other", 1, 1, 1, data__seq_len=16), checkpoint, "was .* when the checkpoint was written"),
        (config(tmp_path / "other", 1, 1, 1), str(tmp_path / "half"), "no progress.json"),
        # The same names and shapes, but other functions.
        (config(tmp_path / "other", 1, 1, 1, model__heads=8, model__kv_heads=4), checkpoint, "heads was 4 and is 8"),
        (config(tmp_path / "other", 1, 1, 1, tensor_parallel__tp_sync="ladder"), checkpoint, "ladder was False"),
        (config(tmp_path / "other", 1, 1, 1) | {"train": short}, checkpoint, "after 3 steps, more than train.steps 2"),
    ]
    for raw, resume, message in refused:
        run_ranks(1, run_refused, raw, resume, message)
    (tmp_path / "run" / "step-00000003" / "__0_0.distcp").unlink()
    run_ranks(1, run_refused, config(tmp_path / "other", 1, 1, 1), checkpoint, "is not whole, .*No such file")


def test_an_interrupted_save_is_not_resumed_from(tmp_path):
    (tmp_path / "step-00000009.partial").mkdir()
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000012.old").mkdir()
    assert latest_checkpoint(tmp_path).name == "step-00000003"
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_the_newest_checkpoint_is_that_of_the_last_run(tmp_path):
    raw = config(tmp_path, 1, 1, 1)
    run(raw)
    # Another run in the same folder, which ends after its second step.
    run(raw | {"train": raw["train"] | {"checkpoint_every": 1}}, steps=2)
    assert {path.name[-1] for path in tmp_path.glob("step-*")} == {"1", "2", "3", "6"}
    assert latest_checkpoint(tmp_path).name == "step-00000002"


def run_killed_while_replacing(rank, world, raw):
    remove = checkpoint.shutil.rmtree

    def begin_to_remove(path, **options):
        if path.suffix == ".partial" or not path.exists():
            remove(path, **options)
        else:
            (path / ".metadata").unlink()
            raise KeyboardInterrupt

    checkpoint.shutil.rmtree = begin_to_remove
    try:
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(KeyboardInterrupt):
            train(parse_config(raw), resume=None, device=torch.device("cpu"))
    finally:
        checkpoint.shutil.rmtree = remove


def test_a_checkpoint_that_is_being_replaced_is_never_torn(tmp_path):
    raw = config(tmp_path, 1, 1, 1)
    run(raw)
    run_ranks(1, run_killed_while_replacing, raw)
    assert (tmp_path / "step-00000003" / ".metadata").exists()
    run(raw, resume=str(tmp_path / "step-00000003"))


def run_on_a_full_disk(rank, world, raw):
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, resource.RLIM_INFINITY))
    message = "step-00000003 cannot be written .* MiB are free there"
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(OSError, match=message):
        train(parse_config(raw), resume=None, device=torch.device("cpu"))


def test_a_disk_that_is_full_for_one_rank_is_named_on_all(tmp_path):
    run_ranks(2, run_on_a_full_disk, config(tmp_path, 2, 1, 1))
    assert latest_checkpoint(tmp_path) is None


def run_trace(rank, world, raw, folder):
    folder = Path(folder)
    trace(
        parse_config(raw),
        steps=2,
        json_path=folder / "trace.json",
        plot_path=folder / "timeline.png",
        device=torch.device("cpu"),
    )


def test_a_step_can_be_drawn(tmp_path):
    run_ranks(4, run_trace, config(tmp_path, 2, 1, 2), str(tmp_path), timeout_s=120)
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {row["pid"] for row in rows} == {0, 1, 2, 3}
    assert {row["cat"] for row in rows if row["ph"] == "X"} == {"compute", "transfer", "wait", "stage"}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


class Failed:
    """A transport whose latest call has failed."""

    def refuse_if_failed(self, op):
        raise PeerError(op, 1, 0, "rank 1 of the group did not deliver chunk 0")


def step_with_a_failure(rank, world, raw):
    config = parse_config(raw)
    trainer = Trainer(config, mesh_of(config, torch.device("cpu")))
    batches = open_data(config).train.batch(0, 0).pieces(1)
    trainer.gradients(0, batches)
    group = trainer.mesh.tp_group
    transport._carriers[group] = carriers = transport._Carriers(channel_of(group))
    carriers._by_name["cuda", "symmetric"] = Failed()
    try:
        with pytest.raises(PeerError, match=r"^train: rank 1 of the group did not deliver"):
            trainer.gradients(1, batches)
        with pytest.raises(PeerError, match=r"^train: rank 1 of the group did not deliver"):
            trainer.evaluate([batches[0]])
    finally:
        # The group is that of later tests.
        del transport._carriers[group]


def test_a_fused_call_that_failed_on_the_gpu_ends_the_step_before_its_gradients_are_used(tmp_path):
    run_ranks(2, step_with_a_failure, config(tmp_path, 1, 1, 2))


def parked_bytes(rank, world, raw):
    config = parse_config(raw)
    mesh = mesh_of(config, torch.device("cpu"))
    trainer = Trainer(config, mesh)
    trainer.gradients(0, open_data(config).train.batch(0, mesh.dp_rank).pieces(1))
    return trainer.pipeline._parking.num_written_bytes


def test_a_run_on_disk_is_the_one_in_memory(tmp_path):
    overrides = {"model__ffn_hidden": 512, "data__seq_len": 96, "train__activation_checkpointing": {"full": [1]}}
    run(config(tmp_path / "memory", 2, 1, 2, **overrides))
    on_disk = config(tmp_path / "disk", 2, 1, 2, train__offload="disk", **overrides)
    run(on_disk)
    assert losses(tmp_path / "disk") == losses(tmp_path / "memory")
    # No file of it is left.
    kinds = [{path.name.partition(".")[0] for path in (tmp_path / name).iterdir()} for name in ("disk", "memory")]
    assert kinds[0] == kinds[1]
    # The last stage goes back at once.
    assert [written > 0 for written in run_ranks(4, parked_bytes, on_disk)] == [True, True, False, False]


def test_idle_is_what_was_waited_and_what_was_over_before_the_last_rank():
    assert _idle_shares([10.0, 8.0], [2.0, 3.0]) == pytest.approx([0.2, 0.5])
