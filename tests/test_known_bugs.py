"""Bugs that other trainers have had, by the number of their report, where no other test here is about them."""

from __future__ import annotations

import math
import time
from datetime import timedelta

import pytest
import torch
from helpers import run_ranks
from test_verify import tiny
from torch import nn

from fusedcomm import PeerError, all_gather_matmul
from fusedcomm.comm.collective import bulk_group
from fusedcomm.comm.hierarchical import level_groups
from fusedcomm.comm.mesh import build_mesh
from fusedcomm.parallel import Optimizer
from fusedcomm.train.config import parse_config
from fusedcomm.train.data import IGNORE_INDEX, Batch, open_data
from fusedcomm.train.trainer import Trainer

CPU = torch.device("cpu")


def _huge_norm(rank: int, world: int) -> float:
    mesh = build_mesh(pp=world, dp=1, tp=1, timeout_s=30)
    weight = nn.Parameter(torch.zeros(4))
    optimizer = Optimizer([(f"{rank}.weight", weight)], mesh=mesh, clip_norm=1.0)
    weight.grad = torch.full_like(weight, 1e30)
    return optimizer.step(0, lr=0.1).grad_norm


def test_norms_that_overflow_narrow_types_are_right_over_stages():
    """NeMo Automodel#825: the sum of squares over pipeline stages overflowed."""
    for norm in run_ranks(2, _huge_norm):
        assert norm == pytest.approx(math.sqrt(8) * 1e30)


def _with_few_labels(batch: Batch, dp_rank: int) -> Batch:
    """Of the first replica's samples all but one label each are ignored, of the others' every fifth."""
    labels = batch.labels.clone()
    if dp_rank == 0:
        labels[:, 1:] = IGNORE_INDEX
    else:
        labels[:, ::5] = IGNORE_INDEX
    return Batch(batch.tokens, labels, batch.sample_ids)


def _uneven_gradients(rank: int, world: int, raw: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and this rank's gradients of one global batch, whose halves differ in their number of labels."""
    config = parse_config(raw)
    parallel, train = config.parallel_config, config.train
    mesh = build_mesh(pp=parallel.pipeline_parallel.depth, dp=parallel.data_parallel.size, tp=1, timeout_s=30)
    trainer, data = Trainer(config, mesh), open_data(config).train
    if mesh.dp > 1:
        batch = _with_few_labels(data.batch(0, mesh.dp_rank), mesh.dp_rank)
    else:
        whole = data.batch(0, 0)
        rows = train.global_batch // 2
        halves = [
            _with_few_labels(
                Batch(*(part[half * rows :][:rows] for part in (whole.tokens, whole.labels, whole.sample_ids))), half
            )
            for half in range(2)
        ]
        batch = Batch(*(torch.cat(parts) for parts in zip(*((h.tokens, h.labels, h.sample_ids) for h in halves))))
    loss = trainer.gradients(0, batch.pieces(train.accumulation))
    return loss, {name: param.main_grad.clone() for name, param in trainer.params.items()}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 2)])
def test_every_label_counts_once_wherever_they_are_few(pp, dp, accumulation):
    """Megatron-LM#673, DeepSpeed#7773, torchtitan#1733, #2972: means of means, or a scale applied more than once.

    The loss, on every rank of every stage (torchtitan#550), is the sum over labels divided by their number.
    """
    raw = tiny(pp, dp, 1, train__accumulation=accumulation, train__clip_norm=None)
    ((expected, gradients),) = run_ranks(1, _uneven_gradients, tiny(1, 1, 1, train__accumulation=accumulation))
    for loss, own in run_ranks(pp * dp, _uneven_gradients, raw):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert own
        for name, grad in own.items():
            torch.testing.assert_close(grad, gradients[name], rtol=1e-4, atol=1e-6)


def _limits(rank: int, world: int) -> list[timedelta]:
    mesh = build_mesh(pp=1, dp=world, tp=1, timeout_s=7)
    groups = [mesh.pp_group, mesh.dp_group, mesh.tp_group, bulk_group(mesh.dp_group, CPU, mesh)]
    groups += level_groups(mesh.dp_group, [0, 0, 1, 1], timeout_s=7)
    return [group._get_backend(CPU).options._timeout for group in groups if group is not None]


def test_no_group_waits_longer_than_it_may():
    """pytorch#121676: sub-groups have torch's default of half an hour."""
    for limits in run_ranks(4, _limits):
        assert limits == [timedelta(seconds=7)] * 6


def _wait_on_an_axis(rank: int, world: int) -> float:
    mesh = build_mesh(pp=1, dp=1, tp=world, timeout_s=1)
    start_s = time.monotonic()
    if rank == 0:
        with pytest.raises(PeerError, match="rank 1 of the group did not call the operation"):
            all_gather_matmul(torch.ones(2, 4), torch.ones(3, 4), group=mesh.tp_group, method="serial")
    return time.monotonic() - start_s


def test_messages_wait_no_longer_than_an_axis_may():
    """gloo's messages, unlike its collectives, heed only the time-out that a group was made with (torch 2.13)."""
    assert run_ranks(2, _wait_on_an_axis, fresh_timeout_s=20)[0] < 10
