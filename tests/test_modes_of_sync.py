"""Runs whose gradients travel smaller, late or seldom go on where they stopped, to the bit, or say why not."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import run_ranks
from test_train import STEPS, config, losses, records, run, run_refused
from test_verify import tiny

from fusedcomm.comm.mesh import build_mesh
from fusedcomm.train.config import ConfigError, parse_config
from fusedcomm.train.data import open_data
from fusedcomm.train.layout import validate_for_world
from fusedcomm.train.trainer import Trainer

MODES = {
    "int8": {"compression": "int8", "bucket_mb": 0.01},
    "powersgd": {"compression": "powersgd", "bucket_mb": 0.01, "powersgd_rank": 1},
    "topk": {"compression": "topk", "bucket_mb": 0.01, "topk_fraction": 0.1, "algorithm": "tree"},
    "delayed": {"sync": "delayed", "algorithm": "hierarchical"},
    "local_sgd": {"sync": "local_sgd", "sync_every": 3},
    "diloco": {"sync": "diloco", "sync_every": 3, "compression": "int8"},
    # The first sync applies nothing yet.
    "overlapped diloco": {"sync": "diloco", "sync_every": 1, "outer_overlap": True},
}


def with_mode(raw: dict, **data_parallel) -> dict:
    raw["parallel_config"]["data_parallel"] |= data_parallel
    return raw


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    run(config(folder, 1, 2, 1))
    return losses(folder)


@pytest.mark.parametrize("name", MODES)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, plain_losses, name):
    tp = 2 if name in ("powersgd", "overlapped diloco") else 1
    whole = with_mode(config(tmp_path / "whole", 1, 2, tp), **MODES[name])
    broken = with_mode(config(tmp_path / "broken", 1, 2, tp), **MODES[name])
    run(whole)
    run(broken, steps=4)
    run(broken, resume="auto")
    assert len(losses(tmp_path / "whole")) == STEPS
    # What changes what is learned must show, and still be learning.
    assert losses(tmp_path / "whole")[-1] != pytest.approx(plain_losses[-1], rel=1e-7)
    assert losses(tmp_path / "whole")[-1] < plain_losses[0]
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert records(tmp_path / "broken", "validation")[-1] == records(tmp_path / "whole", "validation")[-1]


NODES = {
    "hierarchical": {"algorithm": "hierarchical"},
    "int8": {"compression": "int8"},
    "int8 across, bf16 in the node": {
        "compression": "int8",
        "compression_in_node": "bf16",
        "algorithm": "hierarchical",
    },
}


@pytest.mark.parametrize("name", NODES)
def test_a_run_on_several_nodes_resumes_bit_for_bit(tmp_path, name):
    mode = {"ranks_per_node": 2, "bucket_mb": 0.01, **NODES[name]}
    run(with_mode(config(tmp_path / "whole", 1, 4, 1), **mode))
    run(with_mode(config(tmp_path / "broken", 1, 4, 1), **mode), steps=4)
    run(with_mode(config(tmp_path / "broken", 1, 4, 1), **mode), resume="auto")
    run(with_mode(config(tmp_path / "ring", 1, 4, 1), bucket_mb=0.01))
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert records(tmp_path / "broken", "validation")[-1] == records(tmp_path / "whole", "validation")[-1]
    # The first loss is before any sum, and the last shows that what codecs round is made up for.
    ring, found = losses(tmp_path / "ring"), losses(tmp_path / "whole")
    assert found[0] == ring[0]
    assert found == pytest.approx(ring, rel=1e-5 if name == "hierarchical" else 1e-2)
    assert found != ring


def test_a_checkpoint_from_before_the_mode_was_written_is_one_of_every_step(tmp_path):
    run(config(tmp_path / "first", 1, 2, 1))
    path = tmp_path / "first" / "step-00000003"
    progress = json.loads((path / "progress.json").read_text())
    del progress["sync"], progress["has_sum"]
    (path / "progress.json").write_text(json.dumps(progress))
    run(config(tmp_path / "again", 1, 2, 1), resume=str(path))
    assert losses(tmp_path / "again") == losses(tmp_path / "first")[3:]
    local = with_mode(config(tmp_path / "local", 1, 2, 1), **MODES["local_sgd"])
    run_ranks(2, run_refused, local, str(path), "was written with data_parallel.sync: every_step")


def test_a_residual_is_begun_anew_under_another_layout_and_that_is_said(tmp_path, monkeypatch):
    run(with_mode(config(tmp_path / "first", 1, 2, 1), **MODES["int8"]))
    checkpoint = str(tmp_path / "first" / "step-00000003")
    said = run_ranks(2, _run_and_listen, with_mode(config(tmp_path / "again", 1, 1, 2), **MODES["int8"]), checkpoint)
    assert "begun anew" not in said[0]
    said = run_ranks(4, _run_and_listen, with_mode(config(tmp_path / "more", 1, 4, 1), **MODES["int8"]), checkpoint)
    assert "begun anew: " in said[0]
    assert "embedding.weight.residual" in said[0]


def _run_and_listen(rank, world, raw, resume) -> str:
    import contextlib
    import io

    from fusedcomm.train.loop import train

    heard = io.StringIO()
    with contextlib.redirect_stdout(heard):
        train(parse_config(raw), resume=resume, device=torch.device("cpu"))
    return " ".join(heard.getvalue().split())


def test_what_replicas_have_for_themselves_needs_the_same_layout(tmp_path):
    run(with_mode(config(tmp_path / "first", 1, 2, 1), **MODES["local_sgd"]))
    checkpoint = str(tmp_path / "first" / "step-00000003")
    other_mode = with_mode(config(tmp_path / "second", 1, 2, 1), **MODES["diloco"])
    run_ranks(2, run_refused, other_mode, checkpoint, "was written with data_parallel.sync: local_sgd")
    more = with_mode(config(tmp_path / "third", 1, 4, 1), **MODES["local_sgd"])
    run_ranks(4, run_refused, more, checkpoint, "holds no .* for data_parallel.size 4")
    alone = with_mode(config(tmp_path / "fourth", 1, 1, 1), **MODES["local_sgd"])
    run_ranks(1, run_refused, alone, checkpoint, "this run has every_step, as one data-parallel rank")


def test_a_single_replica_has_no_mode_to_go_on_with(tmp_path):
    run(with_mode(config(tmp_path / "one", 1, 1, 1), **MODES["delayed"]))
    expected = losses(tmp_path / "one")[3:]
    run(config(tmp_path / "two", 1, 2, 1), resume=str(tmp_path / "one" / "step-00000003"))
    assert losses(tmp_path / "two") == pytest.approx(expected, rel=1e-4)


def _train_apart(rank, world, raw) -> list[dict[str, torch.Tensor]]:
    """This replica's weights after each step."""
    mesh = build_mesh(pp=1, dp=world, tp=1, device="cpu", timeout_s=30)
    configured = parse_config(raw)
    trainer = Trainer(configured, mesh)
    data = open_data(configured)
    steps = []
    for step in range(2):
        trainer.gradients(step, [data.train.batch(step * configured.train.global_batch, mesh.dp_rank)])
        result = trainer.update(step)
        assert result.grad_norm > 0
        steps.append({name: param.detach().clone() for name, param in trainer.params.items()})
    return steps


def test_replicas_differ_between_syncs_and_agree_after_one(tmp_path):
    raw = with_mode(tiny(1, 2, 1), sync="local_sgd", sync_every=2)
    raw["train"] |= {"steps": 4, "clip_norm": 0.01}
    first, second = run_ranks(2, _train_apart, raw)
    for name in first[0]:
        assert torch.equal(first[1][name], second[1][name])
    assert any(not torch.equal(first[0][name], second[0][name]) for name in first[0])


REFUSED = [
    ({"sync": "diloco", "overlap": "backward+forward"}, {"clip_norm": None}, "does not go with overlap: backward"),
    ({"sync": "delayed"}, {"precision": "fp16"}, "the loss scale of a late gradient"),
    ({"sync": "local_sgd", "compression": "int8"}, {}, "of which too much would be lost"),
    ({"compression": "topk", "bucket_mb": 4.0}, {"precision": "fp16"}, "leaves its infinities"),
    ({"compression": "int8"}, {}, "would round otherwise in each run"),
    ({"compression_in_node": "bf16"}, {}, "they know no nodes"),
    (
        {"compression_in_node": "bf16", "compression": "powersgd", "algorithm": "hierarchical", "bucket_mb": 4.0},
        {},
        "must be summed exactly",
    ),
    ({"mode": "zero1", "overlap": "backward+forward"}, {"clip_norm": None}, "which sums must have come before"),
    ({"mode": "zero1", "sync": "diloco"}, {}, "weights and moments of their own"),
    ({"mode": "zero1", "compression": "int8", "bucket_mb": 4.0}, {}, "shares are reduce-scattered"),
    ({"mode": "zero1", "algorithm": "tree"}, {}, "straight to the owner of their share"),
    ({"sync": "local_sgd", "sync_every": 5}, {"steps": 12}, "train.steps: 12 is no multiple of"),
]


@pytest.mark.parametrize(("data_parallel", "train", "words"), REFUSED)
def test_what_does_not_go_together_is_refused(data_parallel, train, words):
    raw = with_mode(tiny(1, 2, 1), **data_parallel)
    raw["train"] |= train
    with pytest.raises(ConfigError, match=words):
        validate_for_world(parse_config(raw), 2)


def test_tied_embeddings_over_stages_do_not_train_apart():
    raw = with_mode(tiny(2, 2, 1, model__tied_embeddings=True), sync="diloco", sync_every=1)
    with pytest.raises(ConfigError, match="would drift apart by rounding"):
        validate_for_world(parse_config(raw), 4)


def test_the_mode_is_in_the_checkpoint(tmp_path):
    run(with_mode(config(tmp_path, 1, 2, 1), **MODES["overlapped diloco"]))
    progress = json.loads((tmp_path / "step-00000003" / "progress.json").read_text())
    assert (progress["sync"], progress["has_sum"]) == ("diloco", True)
    # In the last step everything is applied.
    assert json.loads((tmp_path / "step-00000006" / "progress.json").read_text())["has_sum"] is False
