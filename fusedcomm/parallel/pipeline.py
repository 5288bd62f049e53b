"""Pipeline parallelism: a model's layers over stages, micro-batches through them, on torch's schedules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from fusedcomm.comm.record import span
from fusedcomm.ops.wgrad import DeferWgrad
from fusedcomm.parallel.schedule import SCHEDULES, split_layers, stage_to_rank, stages_on_each_rank
from fusedcomm.parallel.wgrad import WgradQueue, add_to_grad

LossFunction = Callable[[Tensor, Tensor], Tensor]
# (what, stage, micro-batch); what is "receive", "forward" or "send".
_Action = tuple[str, int, int]
# (input, labels, sample_ids, step)
_MicroBatch = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class BuildStage(Protocol):
    """Makes one stage: these layers, with the embedding if it is the first and the output head if the last.

    `defer_wgrad` is what its layers must pass to the ops; None where backward is not split.
    """

    def __call__(self, layers: range, *, first: bool, last: bool, defer_wgrad: DeferWgrad | None) -> nn.Module: ...


class Pipeline:
    """Runs forward and backward of a batch in micro-batches, over the ranks of `group`.

    Shapes per rank: `input_like` and `hidden_like` (meta tensors will do) say what one micro-batch looks like
    as the first stage's input and between stages; a batch has `micro_batches` times the rows of `input_like`.

    What travels when: a `hidden_like` to the next stage after each forward, its gradient back after each
    backward, in the order of the schedule: `gpipe`, `1f1b`, `interleaved`, `zero_bubble` or `zbv`. With the
    last two, weight gradients that layers put off through `defer_wgrad` are computed when the schedule has
    time for them, each once. A group of one, or None, is a plain loop over micro-batches: nothing travels.

    Gradients add up over micro-batches and calls, and nothing is averaged: `loss_fn` divides by the global
    number of tokens. Put off gradients go to `param.grad`, or to `GradientBuckets` after `accumulate_into`.

    Errors: ValueError, before anything is sent, for layers, stages, micro-batches or a batch that do not fit
    the schedule; also from a stage whose output is not `hidden_like`.
    Source: the executors are torch.distributed.pipelining's; the schedules GPipe (Huang et al. 2019), 1F1B
    and interleaved (Narayanan et al. 2021), zero bubble and ZBV (Qi et al. 2023, 2024).
    """

    def __init__(
        self,
        build_stage: BuildStage,
        *,
        layer_costs: Sequence[float],
        group: ProcessGroup | None,
        micro_batches: int,
        input_like: Tensor,
        hidden_like: Tensor,
        device: torch.device | str = "cpu",
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        first_cost: float = 0.0,
        last_cost: float = 0.0,
        split: Sequence[int] | None = None,
    ) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        pp, rank = (1, 0) if self._group is None else (self._group.size(), self._group.rank())
        per_rank = stages_on_each_rank(
            schedule,
            pp=pp,
            micro_batches=micro_batches,
            num_layers=len(layer_costs),
            stages_per_rank=stages_per_rank,
        )
        self.layers_of_stage = split_layers(
            layer_costs, pp * per_rank, first_cost=first_cost, last_cost=last_cost, sizes=split
        )
        self.rank_of_stage = stage_to_rank(schedule, pp=pp, stages_per_rank=per_rank)
        self._last = len(self.layers_of_stage) - 1
        self._num_micro_batches = micro_batches
        self._input_like, self._hidden_like = input_like.to("meta"), hidden_like.to("meta")
        self._device = torch.device(device)
        self._queues: dict[int, WgradQueue] = {}
        self.stages: dict[int, nn.Module] = {}
        for stage, owner in enumerate(self.rank_of_stage):
            if owner == rank:
                splits_backward = SCHEDULES[schedule].splits_backward and self._group is not None
                self.stages[stage] = self._build(build_stage, stage, splits_backward)
        self._loss_fn: LossFunction | None = None
        self._schedule = None if self._group is None else self._make_schedule(schedule)
        self._forward_actions = self._plan_forward(rank)

    @property
    def holds_first_stage(self) -> bool:
        return 0 in self.stages

    @property
    def holds_last_stage(self) -> bool:
        return self._last in self.stages

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of all stages on this rank, in the order of the layers, under the stages' own names."""
        for module in self.stages.values():
            yield from module.named_parameters()

    def accumulate_into(self, accumulate: Callable[[Tensor, Tensor], None]) -> None:
        """Hand put off gradients to `accumulate(param, grad)`: that of `GradientBuckets`, which must see them all."""
        for queue in self._queues.values():
            queue.accumulate = accumulate

    def train_step(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        loss_fn: LossFunction,
        sample_ids: Tensor | None = None,
        step: Tensor | None = None,
    ) -> Tensor:
        """Forward and backward of one batch; every rank of the group calls it with the whole batch.

        `loss_fn(output, labels)` of a micro-batch returns a scalar. `sample_ids` and `step`, one entry per
        row, reach every stage's forward under these names. Returns the sum of the losses, 0 without the last
        stage.
        """
        self._check_batch({"inputs": inputs, "labels": labels, "sample_ids": sample_ids, "step": step})
        for module in self.stages.values():
            module.train()
        losses: list[Tensor] = []
        if self._schedule is None:
            for x, y, ids, steps in self._cut(inputs, labels, sample_ids, step):
                losses.append(loss_fn(_call(self.stages[0], x, ids, steps), y))
                losses[-1].backward()
        else:
            self._loss_fn = loss_fn
            with _plain_errors():
                self._schedule.step(
                    *((inputs,) if self.holds_first_stage else ()),
                    target=labels if self.holds_last_stage else None,
                    losses=losses,
                    return_outputs=False,
                    sample_ids=sample_ids,
                    step=step,
                )
            self._loss_fn = None
        if any(len(queue) for queue in self._queues.values()):
            raise RuntimeError("pipeline: the schedule ended with weight gradients still put off")
        if not losses:
            return torch.zeros((), device=self._device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    @torch.no_grad()
    def eval_step(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        loss_fn: LossFunction,
        sample_ids: Tensor | None = None,
        step: Tensor | None = None,
    ) -> Tensor | None:
        """Forward only, in eval mode. Here `loss_fn` may return any tensor (loss, hits, tokens, ...).

        Returns their sum over the micro-batches; None on ranks without the last stage.
        """
        self._check_batch({"inputs": inputs, "labels": labels, "sample_ids": sample_ids, "step": step})
        for module in self.stages.values():
            module.eval()
        batches = self._cut(inputs, labels, sample_ids, step)
        tensors = {(0, index): batch[0] for index, batch in enumerate(batches)}
        arriving: dict[tuple[int, int], dist.Work | None] = {}
        sends: list[tuple[dist.Work | None, Tensor]] = []
        results: list[Tensor] = []
        for what, stage, index in self._forward_actions:
            if what == "receive":
                x = tensors[stage, index] = torch.empty_like(self._hidden_like, device=self._device)
                peer = self.rank_of_stage[stage - 1]
                arriving[stage, index] = dist.irecv(x, group=self._group, group_src=peer)
            elif what == "send":
                x = tensors.pop((stage + 1, index))
                peer = self.rank_of_stage[stage + 1]
                sends.append((dist.isend(x, group=self._group, group_dst=peer), x))
            else:
                _wait(arriving.pop((stage, index), None))
                _, labels_part, ids, steps = batches[index]
                output = _call(self.stages[stage], tensors.pop((stage, index)), ids, steps)
                if stage == self._last:
                    results.append(loss_fn(output, labels_part))
                else:
                    tensors[stage + 1, index] = _as_announced(output, self._hidden_like)
        for work, _ in sends:
            _wait(work)
        return torch.stack(results).sum(dim=0) if results else None

    def _build(self, build_stage: BuildStage, stage: int, splits_backward: bool) -> nn.Module:
        defer_wgrad = None
        if splits_backward:
            self._queues[stage] = WgradQueue(add_to_grad)
            defer_wgrad = self._queues[stage].put
        return build_stage(
            self.layers_of_stage[stage],
            first=stage == 0,
            last=stage == self._last,
            defer_wgrad=defer_wgrad,
        )

    def _make_schedule(self, name: str) -> PipelineScheduleSingle | PipelineScheduleMulti:
        hidden = self._hidden_like.detach().requires_grad_()
        # All stages get static shapes: else torch runs each once on uninitialised inputs to find them. The
        # output of the last stage never travels, so any shape will do for it.
        stages = [
            PipelineStage(
                _Boundary(module, None if stage == self._last else self._hidden_like),
                stage,
                len(self.layers_of_stage),
                self._device,
                input_args=self._input_like if stage == 0 else hidden,
                output_args=hidden,
                group=self._group,
                dw_builder=self._queues[stage].take if self._queues else None,
            )
            for stage, module in self.stages.items()
        ]
        runtime = SCHEDULES[name].runtime
        if issubclass(runtime, PipelineScheduleSingle):
            return runtime(stages[0], self._num_micro_batches, loss_fn=self._loss, scale_grads=False)
        return runtime(list(stages), self._num_micro_batches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Tensor, labels: Tensor) -> Tensor:
        assert self._loss_fn is not None
        return self._loss_fn(output, labels)

    def _plan_forward(self, rank: int) -> list[_Action]:
        """The forward part of the schedule's table, whose sends and receives are in an order without deadlock."""
        if isinstance(self._schedule, PipelineScheduleMulti):
            names = {"RECV_F": "receive", "F": "forward", "SEND_F": "send"}
            table = self._schedule.pipeline_order_with_comms[rank]  # pyright: ignore[reportAttributeAccessIssue]
            return [
                (names[action.computation_type.value], action.stage_index, action.microbatch_index)
                for action in table
                if action.computation_type.value in names
            ]
        (stage,) = self.stages
        whats = ["receive"] * (stage > 0) + ["forward"] + ["send"] * (stage < self._last)
        return [(what, stage, index) for index in range(self._num_micro_batches) for what in whats]

    def _check_batch(self, given: dict[str, Tensor | None]) -> None:
        like = self._input_like
        rows = self._num_micro_batches * like.shape[0]
        for name, tensor in given.items():
            if tensor is not None and tensor.shape[0] != rows:
                raise ValueError(
                    f"pipeline: {name} has {tensor.shape[0]} rows but {self._num_micro_batches} micro-batches of "
                    f"{like.shape[0]} make {rows}; give batches of that size"
                )
        inputs = given["inputs"]
        if inputs is not None and (inputs.shape[1:] != like.shape[1:] or inputs.dtype != like.dtype):
            raise ValueError(
                f"pipeline: inputs are {list(inputs.shape)} {inputs.dtype} but a micro-batch was announced as "
                f"{list(like.shape)} {like.dtype}; build the pipeline with the input_like that it will be given"
            )

    def _cut(self, inputs: Tensor, labels: Tensor, sample_ids: Tensor | None, step: Tensor | None) -> list[_MicroBatch]:
        count = self._num_micro_batches
        nothing = [None] * count
        return list(
            zip(
                inputs.chunk(count),
                labels.chunk(count),
                nothing if sample_ids is None else sample_ids.chunk(count),
                nothing if step is None else step.chunk(count),
            )
        )


class _Boundary(nn.Module):
    """A stage as torch's executor calls it; it announces `output_like` to the next one."""

    def __init__(self, module: nn.Module, output_like: Tensor | None) -> None:
        super().__init__()
        self.module = module
        self._output_like = output_like

    def forward(self, x: Tensor, sample_ids: Tensor | None = None, step: Tensor | None = None) -> Tensor:
        output = _call(self.module, x, sample_ids, step)
        return output if self._output_like is None else _as_announced(output, self._output_like)


def _call(module: nn.Module, x: Tensor, sample_ids: Tensor | None, step: Tensor | None) -> Tensor:
    options = {"sample_ids": sample_ids, "step": step}
    return module(x, **{name: value for name, value in options.items() if value is not None})


def _as_announced(output: Tensor, like: Tensor) -> Tensor:
    # gloo would fill part of the receiver's buffer and say nothing.
    if output.shape != like.shape or output.dtype != like.dtype:
        raise ValueError(
            f"pipeline: a stage returned {list(output.shape)} {output.dtype} but hidden_like is {list(like.shape)} "
            f"{like.dtype}; announce what travels between stages"
        )
    return output.contiguous()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What a stage raised, without the text and the printed schedule that torch wraps around it on every rank."""
    log = logging.getLogger(schedules.__name__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None
    finally:
        log.setLevel(level)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        with span("wait", "pipeline"):
            work.wait()
