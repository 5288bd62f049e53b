"""ZeRO-1: each data-parallel rank steps its own rows, with the same result as if all stepped everything."""

from __future__ import annotations

import json
import random
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from test_overlap_forward import TINY, assert_same_trajectory, changed
from test_train import config, losses, records, run
from torch import Tensor, nn

from fusedcomm.comm.mesh import build_mesh
from fusedcomm.parallel import GradientBuckets, Optimizer, main_grad_of
from fusedcomm.train.config import parse_config
from fusedcomm.train.data import open_data
from fusedcomm.train.loop import mesh_of
from fusedcomm.train.trainer import Trainer

MODE = "parallel_config.data_parallel.mode"


def sharded(raw: dict) -> dict:
    return changed(MODE, "zero1", raw)


def test_shared_steps_change_no_bit_of_losses_evaluation_and_weights():
    assert_same_trajectory(TINY, sharded(TINY), 2, jitter_seed=1)


def test_shared_steps_change_no_bit_on_three_ranks_where_sums_have_the_same_order():
    # torch's ring starts each part of a sum at another rank; by levels the order is that of the ranks.
    raw = changed("train.global_batch", 6, changed("parallel_config.data_parallel.size", 3))
    assert_same_trajectory(changed("parallel_config.data_parallel.algorithm", "hierarchical", raw), sharded(raw), 3)


def test_shared_steps_change_no_bit_in_bf16_with_a_split_backward_and_adapting_buckets():
    raw = changed("parallel_config.pipeline_parallel", {"depth": 2, "micro_batches": 2, "schedule": "zbv"})
    raw = changed("model.layers", 4, changed("train.accumulation", 2, changed("train.precision", "bf16", raw)))
    raw = changed("parallel_config.data_parallel.bucket_mb", None, raw)
    assert_same_trajectory(raw, sharded(raw), 4, jitter_seed=3)


class Odd(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, two dtypes, and a layer without gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7, bias=False)
        self.middle = nn.Linear(7, 11).bfloat16()
        self.unused = nn.Linear(3, 5)
        self.last = nn.Linear(11, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)).bfloat16()).float()))


def _odd_steps(rank: int, world: int, shards: bool, bucket_mb: float, seed: int | None) -> dict[str, Tensor]:
    mesh = build_mesh(pp=1, dp=world, tp=1, timeout_s=30)
    model = Odd()
    jitter = None if seed is None else random.Random(seed + rank)
    buckets = GradientBuckets(
        model.named_parameters(),
        dp_group=mesh.dp_group,
        bucket_mb=bucket_mb,
        layers=model.children(),
        sharded=shards,
    )
    optimizer = Optimizer(model.named_parameters(), mesh=mesh, sharded=shards, clip_norm=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            if jitter is not None:
                time.sleep(jitter.random() * 0.03)
            for part in range(2):
                # Eighths, whose sums are exact in whatever order they are added.
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(16 * step + 2 * rank + part))
                model(x.mul(8).round().div(8)).square().sum().backward()
            buckets.finish(set_grad=False)
            optimizer.step(step, lr=0.1)
            buckets.gather_later()
            buckets.zero()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("bucket_mb", [0.0001, 1.0])
def test_odd_parameters_are_shared_too(world, bucket_mb):
    whole = run_ranks(world, _odd_steps, False, bucket_mb, None)
    shared = run_ranks(world, _odd_steps, True, bucket_mb, 5)
    for rank in range(world):
        # All ranks alike, from a state_dict that nobody has settled before.
        for name, weight in shared[0].items():
            assert torch.equal(shared[rank][name], weight), name
    for name, weight in whole[0].items():
        torch.testing.assert_close(
            shared[0][name], weight, rtol=1e-2 if weight.dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )
    if world == 2:
        assert all(torch.equal(shared[0][name], weight) for name, weight in whole[0].items())


def _counted(rank: int, world: int, raw: dict) -> tuple[int, int, int]:
    """Elements of the optimizer's state beside the parameters, of the gradients it is given, and of the parameters."""
    configured = parse_config(raw)
    trainer = Trainer(configured, mesh_of(configured, torch.device("cpu")))
    params = {param.untyped_storage().data_ptr() for param in trainer.params.values()}
    state = [
        tensor
        for tensors in trainer.optimizer.state_dict().values()
        for key, tensor in tensors.items()
        if key != "step" and tensor.untyped_storage().data_ptr() not in params
    ]
    grads = [main_grad_of(param) for param in trainer.params.values()]
    return tuple(sum(tensor.numel() for tensor in found) for found in (state, grads, trainer.params.values()))


@pytest.mark.parametrize(("precision", "copies"), [("fp32", 2), ("bf16", 3)])
def test_optimizer_state_is_shared_out(precision, copies):
    raw = sharded(changed("train.precision", precision, changed("parallel_config.data_parallel.size", 4)))
    raw = changed("train.global_batch", 8, raw)
    for state, grads, num_params in run_ranks(4, _counted, raw):
        # Two moments, and a master of what is not fp32; all rows of this model divide by 4.
        assert state == copies * num_params // 4
        assert grads == num_params // 4


def _stale(rank: int, world: int) -> tuple[str, str]:
    mesh = build_mesh(pp=1, dp=world, tp=1, timeout_s=30)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    buckets = GradientBuckets(
        model.named_parameters(), dp_group=mesh.dp_group, bucket_mb=0.0001, layers=model[:1], sharded=True
    )
    optimizer = Optimizer(model.named_parameters(), mesh=mesh, sharded=True)
    model(torch.ones(1, 4)).sum().backward()
    try:
        buckets.finish()
    except ValueError as error:
        refused = str(error)
    buckets.finish(set_grad=False)
    optimizer.step(0, lr=0.1)
    buckets.gather_later()
    buckets.zero()
    try:
        model(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        buckets.settle()
        return refused, str(error)
    return refused, ""


def test_a_weight_that_nothing_waited_for_and_an_optimizer_that_needs_whole_gradients_are_refused():
    for refused, stale in run_ranks(2, _stale):
        assert "gradients of its own rows only" in refused
        assert "was used before its update" in stale


def _saved_by_one(rank: int, world: int) -> bool:
    mesh = build_mesh(pp=1, dp=world, tp=1, timeout_s=10)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    buckets = GradientBuckets(model.named_parameters(), dp_group=mesh.dp_group, layers=model, sharded=True)
    optimizer = Optimizer(model.named_parameters(), mesh=mesh, sharded=True)
    for step in range(3):
        model(torch.ones(1, 4)).sum().backward()
        buckets.finish(set_grad=False)
        optimizer.step(step, lr=0.1)
        buckets.gather_later()
        buckets.zero()
        saved = {name: weight.clone() for name, weight in model.state_dict().items()} if rank == 0 else None
        dist.barrier()
        buckets.settle()
        if saved is not None:
            assert all(torch.equal(saved[name], param) for name, param in model.named_parameters())
    return True


def test_one_rank_alone_may_take_a_state_dict():
    assert all(run_ranks(2, _saved_by_one))


def mode_of(folder: Path, dp: int, tp: int, mode: str, **overrides) -> dict:
    raw = config(folder, 1, dp, tp, **overrides)
    raw["parallel_config"]["data_parallel"]["mode"] = mode
    return raw


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    run(mode_of(tmp_path / "whole", 2, 2, "zero1"))
    run(mode_of(tmp_path / "broken", 2, 2, "zero1"), steps=4)
    run(mode_of(tmp_path / "broken", 2, 2, "zero1"), resume="auto")
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert records(tmp_path / "broken", "validation")[-1] == records(tmp_path / "whole", "validation")[-1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoints_load_in_another_mode_and_on_other_ranks(tmp_path, precision):
    overrides = {"train__precision": precision, "train__global_batch": 12, "model__tied_embeddings": True}
    run(mode_of(tmp_path / "shared", 3, 1, "zero1", **overrides))
    run(mode_of(tmp_path / "whole", 2, 1, "replicate", **overrides))
    checkpoints = {name: str(tmp_path / name / "step-00000003") for name in ("shared", "whole")}
    cases = [
        ("shared", 2, 2, "zero1"),
        ("shared", 1, 2, "replicate"),
        ("shared", 1, 1, "zero1"),
        ("whole", 4, 1, "zero1"),
    ]
    for name, dp, tp, mode in cases:
        folder = tmp_path / f"{name} to {mode} {dp} {tp}"
        run(mode_of(folder, dp, tp, mode, **overrides), resume=checkpoints[name])
        # Wrong or missing moments would show in the steps after the first.
        assert losses(folder) == pytest.approx(losses(tmp_path / name)[3:], rel=1e-4 if precision == "fp32" else 5e-3)
    stored = json.loads((tmp_path / "shared" / "step-00000003" / "progress.json").read_text())
    assert stored["step"] == 3


def _norms(rank: int, world: int, raw: dict) -> list[float]:
    configured = parse_config(raw)
    trainer = Trainer(configured, mesh_of(configured, torch.device("cpu")))
    data = open_data(configured)
    found = []
    for step in range(3):
        batch = data.train.batch(step * configured.train.global_batch, trainer.mesh.dp_rank)
        trainer.gradients(step, batch.pieces(1))
        found.append(trainer.update(step).grad_norm)
    return found


def test_the_norm_counts_each_share_once():
    raw = changed("train.clip_norm", 0.1, changed("parallel_config.tensor_parallel.size", 2))
    raw = changed("parallel_config.pipeline_parallel.depth", 2, changed("model.tied_embeddings", True, raw))
    whole, shared = run_ranks(8, _norms, raw, timeout_s=120), run_ranks(8, _norms, sharded(raw), timeout_s=120)
    # fp64 sums of other parts: equal but for their last bits.
    assert shared[0] == pytest.approx(whole[0], rel=1e-6)
    assert all(norms == shared[0] for norms in shared)
