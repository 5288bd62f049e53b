"""Pipeline parallelism: a model's layers over stages, micro-batches through them, as a schedule's table says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import channel_of
from fusedcomm.ops.wgrad import DeferWgrad
from fusedcomm.parallel.courier import Courier
from fusedcomm.parallel.disk import ActivationParking
from fusedcomm.parallel.executor import EndsStep, LossFunction, MicroBatch, Pass
from fusedcomm.parallel.schedule import SCHEDULES, split_layers, stage_to_rank, stages_on_each_rank
from fusedcomm.parallel.table import Action, WeightGradients, build_table, forward_only, simulate
from fusedcomm.parallel.wgrad import WgradQueue, add_to_grad


class BuildStage(Protocol):
    """Makes one stage: these layers, with the embedding if it is the first and the output head if the last.

    `defer_wgrad` is what its layers must pass to the ops; None where backward is not split.
    """

    def __call__(self, layers: range, *, first: bool, last: bool, defer_wgrad: DeferWgrad | None) -> nn.Module: ...


class Pipeline:
    """Runs forward and backward of a batch in micro-batches, over the ranks of `group`.

    Shapes per rank: `input_like` and `hidden_like` (meta tensors will do) say what the first stage takes and what lies
    between stages, for any number of samples: these are the first dimension of the former and `batch_dim` of the
    latter. A batch of at least `micro_batches` samples is cut into so many micro-batches; where it does not divide, the
    last ones are a sample shorter.

    What travels when: the hidden states to the next stage after each forward, their gradient back after each backward,
    in the order of the schedule (`SCHEDULES`). Receives are posted ahead, sends are not waited for; between two stages
    of one rank nothing travels. With `zero_bubble`, `zbv` and `dualpipev`, weight gradients that layers put off through
    `defer_wgrad` are computed when the schedule has time for them, each once. A group of one, or None, is a plain loop
    over micro-batches.

    With `weight_gradients="at_end"` every schedule puts them off until its last gradient of an input, and computes them
    weight by weight over all micro-batches: those that the next forward uses first are complete first, and their sums
    over data-parallel ranks travel while the others are computed. (The first stage computes them in its last backward,
    for which no other waits.) The way back through the stages is shorter too, and so is the bubble of `gpipe`, `1f1b`
    and `interleaved`. The price is memory: each weight's input and the gradient of its output are kept for all
    micro-batches until then.

    A stage must not keep its input beyond backward: its memory is used again. With `parking`, activations that wait for
    their backward do so on disk.

    Gradients add up over micro-batches and calls, and nothing is averaged: `loss_fn` divides by the global
    number of tokens. Put off gradients go to `param.grad`, or to `GradientBuckets` after `accumulate_into`.

    Errors: ValueError, before anything is sent, for layers, stages, micro-batches or a batch that do not fit
    the schedule; also from a stage whose output is not `hidden_like`. PeerError naming peer, stage and micro-batch on
    ranks whose peer was late beyond the group's time-out, is gone, or was given another batch.
    Source: GPipe (Huang et al. 2019), 1F1B and interleaved (Narayanan et al. 2021), zero bubble and ZBV (Qi et al.
    2023, 2024), DualPipeV (DeepSeek 2024, cut in half by Sea AI Lab); weight gradients in the order of the next forward
    are OOO BackProp's (Oh et al. 2022).

    Attributes:
        stages: those of this rank, by number.
        ideal_idle: each pipeline rank's share of a step without work where all stages take the same time and nothing
            takes time to travel: the schedule's bubble.
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
        batch_dim: int = 0,
        device: torch.device | str = "cpu",
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        weight_gradients: WeightGradients = "by_schedule",
        first_cost: float = 0.0,
        last_cost: float = 0.0,
        split: Sequence[int] | None = None,
        parking: ActivationParking | None = None,
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
        self._schedule = f"{schedule}, weight gradients {weight_gradients}"
        self._input_like, self._hidden_like, self._batch_dim = input_like, hidden_like.to("meta"), batch_dim
        self._device = torch.device(device)
        self._parking = parking
        self._queues: dict[int, WgradQueue] = {}
        self.stages: dict[int, nn.Module] = {}
        for stage, owner in enumerate(self.rank_of_stage):
            if owner == rank:
                in_bubbles = SCHEDULES[schedule].splits_backward and self._group is not None
                self.stages[stage] = self._build(build_stage, stage, in_bubbles or weight_gradients == "at_end")
        table = build_table(
            schedule,
            pp=pp,
            micro_batches=micro_batches,
            stages_per_rank=per_rank,
            weight_gradients=weight_gradients,
        )
        self.ideal_idle = simulate(table).idle
        self._actions = table[rank]

    @property
    def holds_first_stage(self) -> bool:
        return 0 in self.stages

    @property
    def holds_last_stage(self) -> bool:
        return self._last in self.stages

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are put off."""
        return bool(self._queues)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of all stages on this rank, in the order of the layers, under the stages' own names."""
        for module in self.stages.values():
            yield from module.named_parameters()

    def accumulate_into(self, accumulate: DeferWgrad) -> None:
        """Hand put off gradients to `accumulate`: that of `GradientBuckets`, which must see them all."""
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
        ends_step: EndsStep | None = None,
    ) -> Tensor:
        """Forward and backward of one batch; every rank of the group calls it with the whole batch.

        `loss_fn(output, labels)` of a micro-batch returns a scalar. `sample_ids` and `step`, one entry per
        row, reach every stage's forward under these names. `ends_step`, given with the last batch of an optimizer step,
        is told of each stage's last backward. Returns the sum of the losses, 0 without the last stage.
        """
        sizes = self._sizes({"inputs": inputs, "labels": labels, "sample_ids": sample_ids, "step": step})
        for module in self.stages.values():
            module.train()
        batch = _cut(sizes, inputs, labels, sample_ids, step)
        opened = self._open_pass(sizes, batch, loss_fn, self._actions, backward=True, ends_step=ends_step)
        losses = opened.run(self._actions)
        if any(len(queue) for queue in self._queues.values()):
            raise RuntimeError("pipeline: the schedule ended with weight gradients still put off")
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

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
        sizes = self._sizes({"inputs": inputs, "labels": labels, "sample_ids": sample_ids, "step": step})
        for module in self.stages.values():
            module.eval()
        batch = _cut(sizes, inputs, labels, sample_ids, step)
        actions = forward_only(self._actions)
        results = self._open_pass(sizes, batch, loss_fn, actions, backward=False).run(actions)
        return torch.stack(results).sum(dim=0) if results else None

    def _build(self, build_stage: BuildStage, stage: int, splits_backward: bool) -> nn.Module:
        defer_wgrad = None
        if splits_backward:
            self._queues[stage] = WgradQueue(add_to_grad)
            defer_wgrad = self._queues[stage]
        return build_stage(
            self.layers_of_stage[stage],
            first=stage == 0,
            last=stage == self._last,
            defer_wgrad=defer_wgrad,
        )

    def _open_pass(
        self,
        sizes: Sequence[int],
        batch: Sequence[MicroBatch],
        loss_fn: LossFunction,
        actions: Sequence[Action],
        *,
        backward: bool,
        ends_step: EndsStep | None = None,
    ) -> Pass:
        like = self._hidden_like
        shapes = [(*like.shape[: self._batch_dim], size, *like.shape[self._batch_dim + 1 :]) for size in sizes]
        courier = None
        if self._group is not None:
            what = "train" if backward else "evaluate"
            courier = Courier(
                self._group,
                signature=f"{what} {self._schedule} samples {sum(sizes)} in {len(sizes)} {like.dtype}",
                actions=actions,
                rank_of_stage=self.rank_of_stage,
                shapes=shapes,
                like=torch.empty(0, dtype=like.dtype, device=self._device),
            )
        return Pass(
            stages=self.stages,
            queues=self._queues,
            last=self._last,
            courier=courier,
            parking=self._parking,
            shapes=shapes,
            dtype=like.dtype,
            micro_batches=batch,
            loss_fn=loss_fn,
            backward=backward,
            ends_step=ends_step,
        )

    def _sizes(self, given: dict[str, Tensor | None]) -> list[int]:
        """Samples of each micro-batch; ValueError, of which the other ranks hear, for a batch that does not fit."""
        problem = self._problem(given)
        if problem is not None:
            if self._group is not None:
                channel_of(self._group).refuse("pipeline", problem)
            raise ValueError(f"pipeline: {problem}")
        inputs = given["inputs"]
        assert inputs is not None
        least, longer = divmod(inputs.shape[0], self._num_micro_batches)
        return [least + (index < longer) for index in range(self._num_micro_batches)]

    def _problem(self, given: dict[str, Tensor | None]) -> str | None:
        inputs, like = given["inputs"], self._input_like
        assert inputs is not None
        rows = inputs.shape[0]
        if rows < self._num_micro_batches:
            return (
                f"inputs have {rows} samples, which cannot be cut into {self._num_micro_batches} micro-batches of at "
                "least one; give a larger batch or use fewer micro-batches"
            )
        for name, tensor in given.items():
            if tensor is not None and tensor.shape[0] != rows:
                return f"{name} has {tensor.shape[0]} rows but inputs have {rows}; give one row per sample"
        if inputs.shape[1:] != like.shape[1:] or inputs.dtype != like.dtype:
            return (
                f"inputs are {list(inputs.shape)} {inputs.dtype} but were announced as [any, "
                f"{str(list(like.shape[1:]))[1:-1]}] {like.dtype}; build the pipeline with the input_like that it will "
                "be given"
            )
        return None


def _cut(
    sizes: Sequence[int], inputs: Tensor, labels: Tensor, sample_ids: Tensor | None, step: Tensor | None
) -> list[MicroBatch]:
    parts = [inputs.split(sizes), labels.split(sizes)]
    for optional in (sample_ids, step):
        parts.append([None] * len(sizes) if optional is None else optional.split(sizes))
    return [MicroBatch(*values) for values in zip(*parts)]
