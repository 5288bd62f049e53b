"""Our executor against torch's, and what the executor alone must hold: order, memory, bytes, late and lost ranks."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from pipeline_helpers import HIDDEN, MICRO_BATCHES, ROWS, SEQUENCE, Stage, data, make_pipeline, mean_loss
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, ScheduleGPipe

from fusedcomm.comm.pool import STAGING
from fusedcomm.comm.record import recording
from fusedcomm.errors import PeerError
from fusedcomm.ops.wgrad import DeferWgrad
from fusedcomm.parallel import SCHEDULES, ActivationParking, DiskFolder, Pipeline, WgradQueue, disk, executor

BYTES_PER_BORDER = 2 * MICRO_BATCHES * (ROWS // MICRO_BATCHES) * SEQUENCE * HIDDEN * 4


def gradients_of(pipeline: Pipeline) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in pipeline.named_parameters()}


def _put_off(queue: WgradQueue) -> Callable[[], None]:
    return partial(queue.compute, [queue.take()])


def _with_torchs_runtime(rank: int, world: int, schedule: str) -> tuple[float, dict[str, Tensor | None]]:
    # For its stages and their queues.
    pipeline = make_pipeline(schedule, dist.group.WORLD)
    rows = ROWS // MICRO_BATCHES
    hidden = torch.empty(rows, SEQUENCE, HIDDEN, device="meta", requires_grad=True)
    tokens = torch.empty(rows, SEQUENCE, dtype=torch.int64, device="meta")
    stages = [
        PipelineStage(
            module,
            stage,
            len(pipeline.layers_of_stage),
            torch.device("cpu"),
            input_args=tokens if stage == 0 else hidden,
            output_args=hidden,
            group=dist.group.WORLD,
            dw_builder=partial(_put_off, pipeline._queues[stage]) if pipeline._queues else None,
        )
        for stage, module in pipeline.stages.items()
    ]
    runtime = SCHEDULES[schedule].torchs or {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    given = stages[0] if issubclass(runtime, PipelineScheduleSingle) else stages
    losses: list[Tensor] = []
    batch = data(0)
    inputs, labels = batch.pop("inputs"), batch.pop("labels")
    runtime(given, MICRO_BATCHES, loss_fn=mean_loss, scale_grads=False).step(
        *((inputs,) if pipeline.holds_first_stage else ()),
        target=labels if pipeline.holds_last_stage else None,
        losses=losses,
        return_outputs=False,
        **batch,
    )
    return sum(loss.item() for loss in losses), gradients_of(pipeline)


class SlowStage(Stage):
    """Each forward takes another while on each rank."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        time.sleep(random.random() * 0.02)
        return super().forward(*args, **kwargs)


def _with_ours(rank: int, world: int, schedule: str, delayed: bool) -> tuple[float, dict[str, Tensor | None], int]:
    random.seed(rank)
    pipeline = make_pipeline(schedule, dist.group.WORLD, build_stage=SlowStage if delayed else Stage)
    if delayed:
        # Whatever lies in the pool's buffers must not matter.
        buffers = [STAGING.take((1024,), torch.empty(0)).fill_(torch.nan) for _ in range(8)]
        for buffer in buffers:
            STAGING.give(buffer)
    with recording() as record:
        loss = pipeline.train_step(**data(0), loss_fn=mean_loss).item()
    sent = sum(event.num_bytes for event in record.events if event.name.startswith("pipeline to"))
    assert 0 < record.exposed_s("pipeline") <= record.exposed_s()
    waits = {event.name for event in record.events if event.kind == "wait"}
    assert ("pipeline hidden states of micro-batch 0 at stage 1 from 0" in waits) == (rank == 1)
    stages = [event.name for event in record.events if event.kind == "stage"]
    together = [group for group in executor._performed_together(pipeline._actions) if group[0].kind in "FBIW"]
    assert len(set(stages)) == len(stages) == len(together)
    return loss, gradients_of(pipeline), sent


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_torchs_to_the_bit_with_or_without_delays(schedule):
    torchs = run_ranks(2, _with_torchs_runtime, schedule)
    for delayed in (False, True):
        ours = run_ranks(2, _with_ours, schedule, delayed)
        for (their_loss, their_grads), (loss, grads, _) in zip(torchs, ours):
            assert loss == pytest.approx(their_loss, rel=1e-6)
            assert grads.keys() == their_grads.keys()
            assert all(torch.equal(grads[name], grad) for name, grad in their_grads.items())
        # Hidden states there and gradients back, once each, over the borders between ranks.
        borders = {"gpipe": 1, "1f1b": 1, "zero_bubble": 1, "interleaved": 3}.get(schedule, 2)
        assert sum(sent for *_, sent in ours) == borders * BYTES_PER_BORDER


def _parked(
    rank: int, world: int, schedule: str, weight_gradients: str, folder: str
) -> tuple[dict[str, Tensor | None], int]:
    disk._MIN_BYTES = 1
    parking = ActivationParking(DiskFolder(Path(folder)))
    pipeline = make_pipeline(schedule, dist.group.WORLD, parking=parking, weight_gradients=weight_gradients)
    try:
        pipeline.train_step(**data(0), loss_fn=mean_loss)
    finally:
        disk._MIN_BYTES = 64 * 1024
    return gradients_of(pipeline), parking.num_written_bytes


@pytest.mark.parametrize(
    ("schedule", "weight_gradients"),
    [("gpipe", "by_schedule"), ("1f1b", "by_schedule"), ("zbv", "by_schedule"), ("zbv", "at_end")],
)
def test_activations_on_disk_change_no_bit(schedule, weight_gradients, tmp_path):
    plain = run_ranks(2, _with_ours, schedule, False)
    parked = run_ranks(2, _parked, schedule, weight_gradients, str(tmp_path))
    for (_, expected, _), (grads, _) in zip(plain, parked):
        assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())
    # The last rank of 1F1B goes back at once, and writes nothing.
    assert [written > 0 for _, written in parked] == [True, schedule != "1f1b"]
    assert list(tmp_path.iterdir()) == []


class Counting(Stage):
    """Counts micro-batches whose graph on this rank is alive, by an object that only the graph holds."""

    alive = 0
    peak = 0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().forward(*args, **kwargs)
        return _Marked.apply(output) if torch.is_grad_enabled() else output


class _Mark:
    def __init__(self) -> None:
        Counting.alive += 1
        Counting.peak = max(Counting.peak, Counting.alive)

    def __del__(self) -> None:
        Counting.alive -= 1


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark = _Mark()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _peak(rank: int, world: int, schedule: str) -> tuple[int, int]:
    Counting.peak = 0
    pipeline = make_pipeline(schedule, dist.group.WORLD, build_stage=Counting)
    pipeline.train_step(**data(0), loss_fn=mean_loss)
    return Counting.peak, Counting.alive


@pytest.mark.parametrize(("schedule", "peak"), [("1f1b", [2, 1]), ("gpipe", [4, 4]), ("zbv", [4, 4])])
def test_activations_live_no_longer_than_the_schedule_needs(schedule, peak):
    assert run_ranks(2, _peak, schedule) == [(most, 0) for most in peak]


class Passing(nn.Module):
    """Stages whose output is their input, or a view of it: it lies in the buffer that it was received in."""

    def __init__(self, layers: range, *, first: bool, last: bool, defer_wgrad: DeferWgrad | None) -> None:
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.full((), 2.0)) if first else None

    def forward(self, x: Tensor, **_: Tensor) -> Tensor:
        return x.unsqueeze(-1).float() * self.weight if self.first else x.view_as(x)


def _pass_on(rank: int, world: int) -> float | None:
    pipeline = make_pipeline(
        "gpipe",
        dist.group.WORLD,
        build_stage=Passing,
        layer_costs=[1.0] * world,
        hidden_like=torch.empty(1, SEQUENCE, 1, device="meta"),
    )
    for step in range(3):
        pipeline.train_step(**data(step), loss_fn=lambda output, labels: output.sum())
    evaluated = pipeline.eval_step(**data(0), loss_fn=lambda output, labels: output.sum())
    grad = next((param.grad.item() for _, param in pipeline.named_parameters()), None)
    return grad if evaluated is None else evaluated.item()


def test_a_stage_may_return_its_input():
    first, *between, last = run_ranks(3, _pass_on)
    assert first == sum(data(step)["inputs"].sum() for step in range(3))
    assert between == [None]
    assert last == 2 * data(0)["inputs"].sum()


class Failing(Stage):
    """Rank 1 ends, or sleeps, in its second forward; rank 0 may find its connection closed in its third."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if not self.first and self.calls == 2:
            if self.how != "late":
                os._exit(1)
            time.sleep(4.0)
        if self.first and self.calls == 3 and self.how == "gone":
            time.sleep(1.0)
        return super().forward(*args, **kwargs)


def _fail(rank: int, world: int, how: str) -> None:
    Failing.how = how
    make_pipeline("1f1b", dist.group.WORLD, build_stage=Failing).train_step(**data(0), loss_fn=mean_loss)


@pytest.mark.parametrize("how", ["killed", "gone", "late"])
def test_a_lost_peer_is_named_with_stage_and_micro_batch(how):
    start_s = time.monotonic()
    error, _ = run_ranks(2, _fail, how, return_exceptions=True, fresh_timeout_s=2.0)
    assert isinstance(error, PeerError)
    assert (error.op, error.rank) == ("pipeline", 1)
    # What a killed rank had sent before may or may not have left it.
    assert error.chunk == 1 or (how != "late" and error.chunk == 0)
    assert f"rank 1 of the group did not deliver the gradient of micro-batch {error.chunk} at stage 0" in str(error)
    assert time.monotonic() - start_s < 30
