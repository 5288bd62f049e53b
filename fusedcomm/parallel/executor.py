"""One pass of a batch through this rank's pipeline stages, action by action as the table says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusedcomm.comm.pool import STAGING
from fusedcomm.comm.record import span
from fusedcomm.parallel.courier import Courier
from fusedcomm.parallel.disk import ActivationParking, ParkedActivations
from fusedcomm.parallel.table import Action, received_by
from fusedcomm.parallel.wgrad import PutOff, WgradQueue

LossFunction = Callable[[Tensor, Tensor], Tensor]


class EndsStep(Protocol):
    """Hears of each stage's last backward of a step."""

    def before_last_backward(self, stage: int) -> None: ...

    def after_last_backward(self, stage: int) -> None:
        """All its gradients are in, those that were put off included."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """Its rows of the batch: what enters the first stage, what the loss compares with, what reaches every stage."""

    inputs: Tensor
    labels: Tensor
    sample_ids: Tensor | None
    step: Tensor | None


@dataclass(eq=False)
class _Live:
    """What the backward of one micro-batch on one stage needs."""

    x: Tensor
    # None where nothing on the way to the output is trained.
    output: GradientEdge | None
    # Buffers of the pool that the graph and the weight gradients put off read.
    buffers: list[Tensor]
    parked: ParkedActivations | None
    put_off: PutOff = field(default_factory=list)


class Pass:
    """Walks over a rank's actions once: forward and backward, or in evaluation forward alone.

    Activations live from the forward of a micro-batch to the end of its backward. A stage's output itself is let go as
    soon as the next stage has it: backward starts at its place in the graph. What travels to a stage of another rank is
    the `courier`'s; to one of this rank it is handed on. With `parking` activations wait on disk, unless their backward
    comes next, and are read ahead while the action before it runs.

    Weight gradients of one stage that follow each other in the list are computed weight by weight over all their
    micro-batches, so that the first is complete early: those first that the next forward needs first. The first stage,
    whose last backward no other waits for, has them even earlier: as that comes to each weight.
    """

    def __init__(
        self,
        *,
        stages: Mapping[int, nn.Module],
        queues: Mapping[int, WgradQueue],
        last: int,
        courier: Courier | None,
        parking: ActivationParking | None,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        micro_batches: Sequence[MicroBatch],
        loss_fn: LossFunction,
        backward: bool,
        ends_step: EndsStep | None = None,
    ) -> None:
        self._stages, self._queues, self._last = stages, queues, last
        self._courier, self._shapes, self._dtype = courier, shapes, dtype
        self._micro_batches, self._loss_fn, self._backward = micro_batches, loss_fn, backward
        self._live: dict[tuple[int, int], _Live] = {}
        # By what it would be if it travelled: results for a stage of this rank, and those that are about to leave.
        self._here: dict[Action, Tensor] = {}
        self._outgoing: dict[Action, Tensor] = {}
        self._results: list[Tensor] = []
        self._parking = parking
        # Still to come, from the next one on.
        self._backwards: deque[Action] = deque()
        self._ends_step = ends_step

    def run(self, actions: Sequence[Action]) -> list[Tensor]:
        """What `loss_fn` returned for each micro-batch, without its graph; nothing on ranks without the last stage."""
        self._backwards.extend(action for action in actions if action.kind in ("B", "I"))
        last_backward = {action.stage: action for action in self._backwards}
        last_gradient = {action.stage: action for action in actions if action.kind in ("B", "W")}
        try:
            for together in _performed_together(actions):
                action = together[0]
                if self._backwards and action == self._backwards[0]:
                    self._backwards.popleft()
                self._read_ahead()
                if self._ends_step is not None and last_backward.get(action.stage) == action:
                    self._ends_step.before_last_backward(action.stage)
                self._perform(together)
                if self._ends_step is not None and last_gradient.get(action.stage) == together[-1]:
                    self._ends_step.after_last_backward(action.stage)
            if self._courier is not None:
                self._courier.finish()
        except BaseException:
            if self._courier is not None:
                self._courier.abandon()
            raise
        return self._results

    def _perform(self, together: Sequence[Action]) -> None:
        action = together[0]
        kind, stage, index = action
        if kind in ("RECV_F", "RECV_B"):
            assert self._courier is not None
            self._courier.post_receive(action)
        elif kind in ("SEND_F", "SEND_B"):
            assert self._courier is not None
            self._courier.send(action, self._outgoing.pop(action))
        elif kind == "F":
            self._forward(stage, index)
        elif kind == "W":
            indices = [each.micro_batch for each in together]
            with span("stage", f"weight gradients of micro-batches {', '.join(map(str, indices))} at stage {stage}"):
                self._finish_backward(stage, indices)
        elif len(together) > 1:
            earlier = [each.micro_batch for each in together[1:] if each.micro_batch != index]
            with self._queues[stage].computing_with([self._live[stage, each].put_off for each in earlier]):
                self._compute_backward(stage, index)
            self._finish_backward(stage, [*earlier, index])
        else:
            self._compute_backward(stage, index)
            if kind == "B":
                self._finish_backward(stage, [index])

    def _forward(self, stage: int, index: int) -> None:
        part = self._micro_batches[index]
        buffers: list[Tensor] = []
        x = part.inputs if stage == 0 else self._take(Action("RECV_F", stage, index), buffers)
        if stage > 0 and self._backward:
            x = x.detach().requires_grad_()
        parked = self._park(stage, index, x)
        saving = nullcontext() if parked is None else parked.saving()
        with span("stage", f"forward of micro-batch {index} at stage {stage}"), saving:
            output = _call(self._stages[stage], x, part)
            if stage == self._last:
                output = self._loss_fn(output, part.labels)
                self._results.append(output.detach())
            else:
                self._check_hidden(stage, output, index)
        if self._backward:
            edge = get_gradient_edge(output) if output.requires_grad else None
            self._live[stage, index] = _Live(x, edge, buffers, parked)
        if stage != self._last:
            self._hand_on(Action("SEND_F", stage, index), output.detach(), buffers)
        if not self._backward:
            _give_back(buffers)

    def _compute_backward(self, stage: int, index: int) -> None:
        live = self._live[stage, index]
        gradient = None if stage == self._last else self._take(Action("RECV_B", stage, index), live.buffers)
        with span("stage", f"backward of micro-batch {index} at stage {stage}"):
            if live.output is not None:
                torch.autograd.backward(live.output, gradient)
                live.output = None
        if stage in self._queues:
            live.put_off = self._queues[stage].take()
        if stage > 0:
            dx = torch.zeros_like(live.x) if live.x.grad is None else live.x.grad
            live.x.grad = None
            self._hand_on(Action("SEND_B", stage, index), dx, live.buffers)

    def _finish_backward(self, stage: int, indices: Sequence[int]) -> None:
        ended = [self._live.pop((stage, index)) for index in indices]
        if stage in self._queues:
            self._queues[stage].compute([live.put_off for live in ended])
        for live in ended:
            _give_back(live.buffers)

    def _take(self, receive: Action, buffers: list[Tensor]) -> Tensor:
        """From a stage of this rank, or received into a buffer of the pool, which is added to `buffers`."""
        if receive in self._here:
            return self._here.pop(receive)
        assert self._courier is not None
        buffers.append(self._courier.receive(receive))
        return buffers[-1]

    def _hand_on(self, send: Action, tensor: Tensor, buffers: list[Tensor]) -> None:
        """Leave `tensor` for a stage of this rank, or for its send; in none of `buffers`, which others will have."""
        tensor = tensor.contiguous()
        if tensor.untyped_storage().data_ptr() in {buffer.untyped_storage().data_ptr() for buffer in buffers}:
            tensor = tensor.clone()
        receive = received_by(send)
        if receive.stage in self._stages:
            self._here[receive] = tensor
        else:
            self._outgoing[send] = tensor

    def _park(self, stage: int, index: int, x: Tensor) -> ParkedActivations | None:
        is_next = bool(self._backwards) and self._backwards[0][1:] == (stage, index)
        if self._parking is None or not self._backward or is_next:
            return None
        kept = (x, *self._stages[stage].parameters(), *self._stages[stage].buffers())
        return self._parking.open({tensor.untyped_storage().data_ptr() for tensor in kept})

    def _read_ahead(self) -> None:
        if self._backwards:
            live = self._live.get(self._backwards[0][1:])
            if live is not None and live.parked is not None:
                live.parked.fetch()

    def _check_hidden(self, stage: int, output: Tensor, index: int) -> None:
        # gloo would fill part of the receiver's buffer and say nothing.
        shape = self._shapes[index]
        if output.shape != shape or output.dtype != self._dtype:
            raise ValueError(
                f"pipeline: stage {stage} returned {list(output.shape)} {output.dtype} but what was announced for "
                f"micro-batch {index} is {list(shape)} {self._dtype}; announce what travels between stages"
            )


def _performed_together(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Weight gradients of one stage that follow each other, and all else one by one.

    With them goes the backward right before them of the first stage, if its own are among them: nobody waits for it.
    """
    groups = deque(list(group) for _, group in groupby(actions, lambda each: each[:2] if each.kind == "W" else each))
    while groups:
        together = groups.popleft()
        if together[0][:2] == ("I", 0) and groups and together[0]._replace(kind="W") in groups[0]:
            together += groups.popleft()
        yield together


def _call(module: nn.Module, x: Tensor, part: MicroBatch) -> Tensor:
    options = {"sample_ids": part.sample_ids, "step": part.step}
    return module(x, **{name: value for name, value in options.items() if value is not None})


def _give_back(buffers: list[Tensor]) -> None:
    while buffers:
        STAGING.give(buffers.pop())
