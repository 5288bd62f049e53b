"""`mode: fsdp`: torch's fully_shard on our layers trains as replicas do, and holds 1/dp of everything."""

from __future__ import annotations

import random
import time
import warnings
from pathlib import Path

import pytest
import torch
from helpers import run_ranks
from test_overlap_forward import TINY, changed
from test_train import config, losses, records, run
from test_verify import tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedcomm.comm.mesh import build_mesh
from fusedcomm.parallel import FullySharded, fully_shard_stage, main_grad_of
from fusedcomm.train.config import ConfigError, parse_config
from fusedcomm.train.data import open_data
from fusedcomm.train.layout import validate_for_world
from fusedcomm.train.loop import mesh_of
from fusedcomm.train.trainer import Trainer

MODE = "parallel_config.data_parallel.mode"


def in_mode(raw: dict, mode: str) -> dict:
    return changed(MODE, mode, changed("parallel_config.data_parallel.bucket_mb", None, raw))


def _train(rank: int, world: int, raw: dict, jitter_seed: int | None) -> tuple[list[float], float, dict[str, Tensor]]:
    """Losses, the validation loss in the middle, and whole weights at the end."""
    trained = parse_config(raw)
    validate_for_world(trained, world)
    trainer = Trainer(trained, mesh_of(trained, torch.device("cpu")))
    data = open_data(trained)
    jitter = None if jitter_seed is None else random.Random(jitter_seed + rank)
    found, validation = [], 0.0
    for step in range(trained.train.steps):
        if jitter is not None:
            time.sleep(jitter.random() * 0.05)
        batch = data.train.batch(step * trained.train.global_batch, trainer.mesh.dp_rank)
        found.append(trainer.gradients(step, batch.pieces(trained.train.accumulation)))
        trainer.update(step)
        if step == 2:
            validation = trainer.evaluate(list(data.validation.passes(trainer.mesh.dp_rank))[:1]).loss
    trainer.settle()
    params = {
        name: param.full_tensor() if isinstance(param, DTensor) else param for name, param in trainer.params.items()
    }
    return found, validation, {name: param.detach().to(trainer.dtype) for name, param in params.items()}


LAYOUTS = {
    "dp": (2, TINY),
    "bf16": (2, changed("train.precision", "bf16", TINY)),
    "zbv, accumulation": (
        4,
        changed(
            "train.accumulation",
            2,
            changed(
                "model.layers",
                4,
                changed("parallel_config.pipeline_parallel", {"depth": 2, "micro_batches": 2, "schedule": "zbv"}, TINY),
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_sharded_weights_train_as_replicas_do(name):
    world, raw = LAYOUTS[name]
    whole = run_ranks(world, _train, in_mode(raw, "replicate"), None, timeout_s=300)
    shared = run_ranks(world, _train, in_mode(raw, "fsdp"), 1, timeout_s=300)
    for expected, found in zip(whole, shared):
        # Two summands, unclipped: there is one order only.
        assert found[:2] == expected[:2]
        for weight, values in expected[2].items():
            assert torch.equal(found[2][weight], values), weight


def _counted(rank: int, world: int, raw: dict) -> tuple[int, int, int, int]:
    """Elements of the parameters held after a step, of gradients and moments; and of the whole model."""
    trained = parse_config(raw)
    trainer = Trainer(trained, mesh_of(trained, torch.device("cpu")))
    trainer.gradients(0, open_data(trained).train.batch(0, trainer.mesh.dp_rank).pieces(1))
    trainer.update(0)
    local = [param.to_local() for param in trainer.params.values()]
    grads = [main_grad_of(param) for param in trainer.params.values()]
    moments = [
        state[key] for state in trainer.optimizer.state_dict().values() for key in ("exp_avg", "exp_avg_sq", "master")
    ]
    own = {tensor.untyped_storage().data_ptr() for tensor in local}
    moments = [tensor for tensor in moments if tensor.untyped_storage().data_ptr() not in own]
    gathered = [module for module in trainer.pipeline.stages[0].modules() for param in module.parameters(recurse=False)]
    assert all(isinstance(param, DTensor) for module in gathered for param in module.parameters(recurse=False))
    return tuple(sum(tensor.numel() for tensor in held) for held in (local, grads, moments, trainer.params.values()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_everything_is_shared_out(precision):
    raw = changed("train.precision", precision, changed("parallel_config.data_parallel.size", 4, TINY))
    for weights, grads, moments, whole in run_ranks(4, _counted, in_mode(raw, "fsdp"), timeout_s=300):
        # All rows of this model divide by 4; the weights are their own masters.
        assert (weights, grads, moments) == (whole // 4, whole // 4, whole // 2)


def mode_of(folder: Path, layout: tuple[int, int, int], mode: str, **overrides) -> dict:
    raw = config(folder, *layout, **overrides)
    raw["parallel_config"]["data_parallel"]["mode"] = mode
    return raw


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    run(mode_of(tmp_path / "whole", (1, 2, 2), "fsdp"))
    run(mode_of(tmp_path / "broken", (1, 2, 2), "fsdp"), steps=4)
    run(mode_of(tmp_path / "broken", (1, 2, 2), "fsdp"), resume="auto")
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert records(tmp_path / "broken", "validation")[-1] == records(tmp_path / "whole", "validation")[-1]


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_load_in_another_mode_and_layout(tmp_path, tied):
    overrides = {"model__tied_embeddings": tied, "train__global_batch": 12}
    run(mode_of(tmp_path / "fsdp", (2, 2, 1), "fsdp", **overrides))
    run(mode_of(tmp_path / "zero1", (1, 2, 1), "zero1", **overrides))
    for name, layout, mode in [
        ("fsdp", (1, 3, 1), "fsdp"),
        ("fsdp", (1, 1, 2), "replicate"),
        ("fsdp", (2, 2, 1), "zero1"),
        ("zero1", (1, 2, 2), "fsdp"),
    ]:
        folder = tmp_path / f"{name} to {mode} {layout}"
        run(mode_of(folder, layout, mode, **overrides), resume=str(tmp_path / name / "step-00000003"))
        # Wrong or missing moments would show in the steps after the first.
        assert losses(folder) == pytest.approx(losses(tmp_path / name)[3:], rel=1e-4)


def _with_unused(rank: int, world: int) -> list[str]:
    mesh = build_mesh(pp=1, dp=world, tp=1, timeout_s=30)
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stage.unused = nn.Linear(3, 5)
    stage.forward = lambda x: stage[1](stage[0](x))
    fully_shard_stage(
        stage,
        (),
        dp_mesh=mesh.device_mesh["dp"],
        tp_group=mesh.tp_group,
        dtype=torch.float32,
        keep_gathered=True,
    )
    sharded = FullySharded(
        {0: stage}, dp_group=mesh.dp_group, tp_group=mesh.tp_group, keep_gathered=True, split_backward=False
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            sharded.zero()
            sharded.before_last_backward(0)
            stage(torch.ones(1, 4)).sum().backward()
            sharded.finish()
            assert not main_grad_of(stage.unused.weight).any()
    return [str(warning.message) for warning in said]


def test_a_parameter_without_a_gradient_counts_as_zero_and_is_named_once():
    for said in run_ranks(2, _with_unused):
        assert [words for words in said if "gradient" in words] == [
            "FullySharded: no gradient came in for unused.bias, unused.weight; it counts as zero"
        ]


def _too_fine(rank: int, world: int) -> None:
    mesh = build_mesh(pp=1, dp=world, tp=1, timeout_s=30)
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard_stage(
        stage,
        [stage[0]],
        dp_mesh=mesh.device_mesh["dp"],
        tp_group=mesh.tp_group,
        dtype=torch.float32,
        keep_gathered=True,
    )
    FullySharded({0: stage}, dp_group=mesh.dp_group, tp_group=mesh.tp_group, keep_gathered=True, split_backward=True)


def test_units_within_a_stage_whose_backward_is_split_are_refused_on_every_rank():
    for error in run_ranks(2, _too_fine, return_exceptions=True):
        assert isinstance(error, ValueError)
        assert "would lack the weight gradients that are put off; shard it as a whole" in str(error)


REFUSED = [
    ({"overlap": "backward+forward"}, {"clip_norm": None}, "which sums must have come before"),
    ({"sync": "local_sgd"}, {}, "weights and moments of their own"),
    ({"compression": "int8", "bucket_mb": 4.0}, {}, "shares are reduce-scattered"),
    ({"algorithm": "auto"}, {}, "straight to the owner of their share"),
    ({"window_mb": 4.0}, {}, "its buckets are the layers"),
    ({}, {"offload": "disk"}, "gathered weights, which would be written as well"),
]


@pytest.mark.parametrize(("data_parallel", "train", "words"), REFUSED)
def test_what_does_not_go_together_is_refused(data_parallel, train, words):
    raw = tiny(1, 2, 1)
    raw["parallel_config"]["data_parallel"] |= {"mode": "fsdp", **data_parallel}
    raw["train"] |= train
    with pytest.raises(ConfigError, match=words):
        validate_for_world(parse_config(raw), 2)


def test_the_optimizer_state_of_shares_may_lie_on_disk(tmp_path):
    plain = mode_of(tmp_path / "plain", (1, 2, 1), "fsdp")
    offloaded = mode_of(tmp_path / "disk", (1, 2, 1), "fsdp", train__offload={"optimizer": "disk"})
    run(plain)
    run(offloaded)
    assert losses(tmp_path / "disk") == losses(tmp_path / "plain")
