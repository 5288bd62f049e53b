"""Data parallelism: gradients in flat fp32 buckets, summed over the ranks while backward and forward still run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fusedcomm.comm.collective import AllReduce, Collective
from fusedcomm.comm.compress import Layout, Place
from fusedcomm.comm.record import span
from fusedcomm.ops.wgrad import WeightGradient
from fusedcomm.parallel.buckets import Bucket, Slot, allocate_gradients, arrange, cut_into_buckets
from fusedcomm.parallel.timing import Planner
from fusedcomm.parallel.transfers import Transfers


def _all_reduce(group: ProcessGroup, layout: Layout) -> Collective:
    return AllReduce(group)


class GradientBuckets:
    """Sum each parameter's gradient in fp32 over micro-batches, then over tensor- and data-parallel ranks.

        buckets = GradientBuckets(model.named_parameters(), dp_group=mesh.dp_group, tp_group=mesh.tp_group)
        loss.backward()
        buckets.finish()
        optimizer.step()
        buckets.zero()

    Shapes per rank: `param.main_grad` is fp32, shaped as the parameter, a view into one flat buffer in the reverse
    order of `named_params`, which should be the order of use. The buffer is cut into buckets of whole gradients.

    What travels when: backward adds each gradient to `main_grad` and frees `param.grad`; an op that was given
    `defer_wgrad=buckets.accumulate` computes it there: before the gradient of its input, or beside it where
    tensor-parallel ranks exchange something meanwhile. The first step counts how often each parameter contributes until
    `finish()` (micro-batches, modules used twice and deferred weight gradients included) and measures when each is
    complete and what the link carries. From the second step on a bucket is summed over `dp_group` in the background as
    soon as the last contribution to it is in, in the order and the pieces of `comm.plan`, which the group agrees on
    after steps 1, 4 and every 256th. Parameters of which each tensor-parallel rank holds a part of the gradient
    (`ParamLayout.partial_grad`) share one more bucket, which the end of the step sums over `tp_group` first. A group of
    one, or None, sends nothing.

    Size: `bucket_mb` fixes that of buckets and pieces; None adapts both to rate and computing (`comm.plan.pace_of`).
    `window_mb` fixes what may be under way; None is three pieces.

    It is a sum, not a mean: divide the loss by the global number of tokens (or samples).

    After `finish()` any torch optimizer can step: `param.grad` is the view itself where the parameter is
    fp32, and elsewhere a copy rounded to its dtype. (`finish(set_grad=False)` saves that copy for
    `fusedcomm.parallel.Optimizer`, which reads `main_grad`.) Then `zero()`, not `optimizer.zero_grad()`,
    prepares the next step.

    With `finish_later(update)` in place of `finish()` the step ends at once: each of `layers` waits, in its next
    forward, for the sums of its own parameters, and `update` is called on them first. `settle()` waits for all: whoever
    reads parameters by other ways than the forward of a layer must call it. Some gradients may then be computed after
    all others, in `finish_later`, while sums travel that are needed first (`Planner.last_gradients`), unless `puts_off`
    is False: where what they are made of does not last until then.

    With `sharded` (ZeRO-1) each data-parallel rank steps its own rows of each parameter, `share_of(param)`, alone: a
    bucket is reduce-scattered, `main_grad` is the sum of those rows' gradients, and torch's optimizers have none.
    `gather_later()` after the update hands the rows to all; each layer waits for its own parameters as above.

    Errors: ValueError on all ranks of a group if they hold different parameters; RuntimeError for a gradient
    that comes in after its bucket was sent or before its parameter was updated, and at the end of a step for one that
    did not pass through the buckets.
    Source: counting contributions in the first step is Megatron-LM's, the buckets are PyTorch DDP's (Li et
    al. 2020), sums that arrive during the next forward ByteScheduler's (Peng et al. 2019).
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        *,
        dp_group: ProcessGroup | None,
        tp_group: ProcessGroup | None = None,
        bucket_mb: float | None = None,
        window_mb: float | None = None,
        layers: Iterable[nn.Module] = (),
        collective: Callable[[ProcessGroup, Layout], Collective] = _all_reduce,
        sharded: bool = False,
        puts_off: bool = True,
    ) -> None:
        dp_group, self._tp_group = _unless_alone(dp_group), _unless_alone(tp_group)
        whole, merged = arrange(named_params, dp_group, self._tp_group)
        self._flat, slots = allocate_gradients([*whole, *merged])
        self._slots: dict[Tensor, Slot] = {slot.param: slot for slot in slots}
        self._num_whole = len(whole)
        self._planner = Planner(bucket_mb, window_mb)
        self._puts_off = puts_off
        self._cut()
        layers = list(layers)
        self._transfers: Transfers | None = None
        if dp_group is not None:
            self._transfers = Transfers(
                dp_group,
                slots,
                self.layout,
                self._planner,
                collective=collective,
                sharded=sharded,
                in_forward=bool(layers),
            )
        for slot in slots:
            slot.param.register_post_accumulate_grad_hook(self._collect)
        for layer in layers:
            own = [self._slots[param] for param in layer.parameters() if param in self._slots]
            layer.register_forward_pre_hook(partial(self._before_forward, own))
            layer.register_state_dict_pre_hook(lambda *_: self.settle())
        self._counted = False
        self._finished = False
        self._num_steps = self._num_pending = 0
        self._named_without_gradient: set[str] = set()
        # Gradients that are computed after all others.
        self._put_off: list[tuple[Slot, WeightGradient]] = []
        self.zero()

    def accumulate(self, param: Tensor, grad: Tensor | WeightGradient) -> None:
        """Add one contribution to `param.main_grad`, or compute it there: the `defer_wgrad` of ops and layers.

        What autograd computes comes in by itself.
        """
        slot = self._slots.get(param)
        if slot is None:
            raise ValueError(
                f"GradientBuckets: no bucket holds the parameter of shape {list(param.shape)}; "
                "give every trained parameter to the constructor"
            )
        if self._num_pending:
            self._check_settled(slot)
        if not self._begun:
            self._begin()
        if slot.bucket.launched or (slot.is_last and self._has_all(slot)):
            raise RuntimeError(
                f"GradientBuckets: contribution {slot.num_contributions + 1} to the gradient of {slot.name} came "
                f"after its bucket was sent with {slot.num_contributions}; call zero() after each optimizer step, and "
                "count_again() before a step with more micro-batches or other uses of a module"
            )
        slot.num_contributions += 1
        slot.ready_s = time.perf_counter()
        slot.was_last = slot.is_last and self._has_all(slot) and isinstance(grad, WeightGradient)
        if isinstance(grad, WeightGradient):
            if slot.was_last:
                self._put_off.append((slot, grad.kept()))
                return
            self._compute(slot, grad)
            slot.ready_s = time.perf_counter()
        else:
            with torch.no_grad():
                slot.grad.copy_(grad) if slot.num_contributions == 1 else slot.grad.add_(grad)
            slot.compute_s = 0.0
        self._note_contribution(slot)

    def _has_all(self, slot: Slot) -> bool:
        """Whether the step's last contribution has come in; not known in a step that counts."""
        return self._counted and slot.num_contributions == slot.num_expected

    def _compute(self, slot: Slot, grad: WeightGradient) -> None:
        """The latest contribution; the first one overwrites what the step before left."""
        start_s = time.perf_counter()
        grad.add_to(slot.grad, overwrite=slot.num_contributions == 1)
        # What hides a transfer is not put off; nor is anything on a GPU, where the host's clock does not tell.
        can_wait = slot.grad.device.type == "cpu" and not grad.hides_transfer
        slot.compute_s = time.perf_counter() - start_s if can_wait else 0.0

    def _note_contribution(self, slot: Slot) -> None:
        """Launch the bucket if that was the last one to it."""
        bucket = slot.bucket
        if self._has_all(slot):
            bucket.num_waiting -= 1
            if bucket.num_waiting == 0 and bucket is not self._merged:
                self._launch(bucket)

    def finish(self, *, set_grad: bool = True) -> None:
        """Wait until every gradient is the sum over all ranks; every rank calls it once a step."""
        if set_grad and self._is_sharded:
            raise ValueError(
                "GradientBuckets: with sharded=True a rank has the gradients of its own rows only, so there is no "
                "param.grad to set; use finish(set_grad=False) and fusedcomm.parallel.Optimizer(sharded=True)"
            )
        self._close()
        for bucket in self._buckets:
            self._wait(bucket)
        if set_grad:
            for slot in self._slots.values():
                slot.param.grad = slot.grad.to(slot.param.dtype)

    def finish_later(self, update: Callable[[list[str]], None]) -> None:
        """End the step without waiting; `update(names)` is called when those sums are in, before they are needed.

        Buckets of which a layer's forward needs a parameter are updated in that forward, others at the latest by
        `settle()` or by the next step's first gradient.
        """
        self._close()

        def apply(bucket: Bucket) -> None:
            update([slot.name for slot in bucket.slots])

        self._await_later(self._buckets, apply)

    def gather_later(self) -> None:
        """Hand the rows that each rank has stepped to all others; returns at once. Not `sharded`: nothing is to do.

        Every rank calls it after each update, and after reading a checkpoint. First layers come first.
        """
        if self._transfers is None or not self._is_sharded:
            return
        self.settle()
        self._transfers.gather(self._buckets)
        self._await_later(self._buckets, lambda bucket: None)

    def settle(self) -> None:
        """Return when nothing is pending: all sums are in, all parameters updated and gathered. Without `finish_later`
        and `gather_later` it does nothing.
        """
        for bucket in self._buckets:
            self._settle(bucket)

    def zero(self) -> None:
        """Prepare the next step: what comes in next replaces the gradients. Pending updates stay so."""
        for bucket in self._buckets:
            if bucket.pending is None:
                self._open(bucket)
        for slot in self._slots.values():
            slot.forward_s = None
        self._waited_s = 0.0
        self._put_off.clear()
        self._begun = self._finished = False

    def count_again(self) -> None:
        """Let the next step count contributions anew: like the first, it sends nothing before `finish()`."""
        self._counted = False

    @property
    def flat(self) -> Tensor:
        """All gradients, `[elements]`, as `layout` says."""
        return self._flat

    @property
    def layout(self) -> Layout:
        """Where each gradient lies in the buffer of all."""
        places = [Place(slot.name, slot.start, tuple(slot.param.shape)) for slot in self._slots.values()]
        return Layout(places, self._flat.numel(), self._flat.device)

    @property
    def slots(self) -> list[Slot]:
        """Every gradient's name and place in the buffer, in its order."""
        return list(self._slots.values())

    @property
    def _is_sharded(self) -> bool:
        return self._transfers is not None and self._transfers.shares is not None

    def _cut(self) -> None:
        slots = self.slots
        self._buckets = cut_into_buckets(self._flat, slots[: self._num_whole], self._planner.pace().piece_bytes)
        # One bucket whatever its size: these parameters are vectors, and one latency beats many.
        merged = cut_into_buckets(
            self._flat, slots[self._num_whole :], self._flat.nbytes, first_index=len(self._buckets)
        )
        self._merged = merged[0] if merged else None
        self._buckets += merged

    def _collect(self, param: Tensor) -> None:
        grad, param.grad = param.grad, None
        # Autograd calls this too where a function gave no gradient: a deferred one is still to come.
        if grad is not None:
            self.accumulate(param, grad)

    def _launch(self, bucket: Bucket) -> None:
        bucket.launched = True
        for slot in bucket.slots:
            # It still holds what the step before left.
            if slot.num_contributions == 0:
                slot.grad.zero_()
        if bucket is self._merged:
            with span("wait", "gradients_tp", bucket.flat.nbytes):
                dist.all_reduce(bucket.flat, group=self._tp_group)
        if self._transfers is not None:
            self._transfers.sum(bucket)

    def _wait(self, bucket: Bucket, what: str = "gradients_dp") -> None:
        if self._transfers is not None:
            self._transfers.wait(bucket, what)

    def _close(self) -> None:
        """The end of the step's last backward: launch what still waits."""
        if self._finished:
            raise RuntimeError("GradientBuckets: finish() was called twice; call zero() after each optimizer step")
        self.settle()
        if not self._begun:
            self._begin()
        self._check_no_stray_gradient()
        while self._put_off:
            # Backward came first to what the next forward needs last.
            slot, grad = self._put_off.pop()
            self._compute(slot, grad)
            self._note_contribution(slot)
        for bucket in self._buckets:
            if not bucket.launched:
                self._launch(bucket)
        self._finished = True
        self._learn_counts()

    def _await_later(self, buckets: list[Bucket], then: Callable[[Bucket], None]) -> None:
        for bucket in buckets:
            bucket.pending = then
        self._num_pending = len(buckets)

    def _before_forward(self, slots: list[Slot], *_: object) -> None:
        for slot in slots:
            if slot.forward_s is None:
                slot.forward_s = time.perf_counter() - self._waited_s
            self._settle(slot.bucket)

    def _settle(self, bucket: Bucket) -> None:
        then = bucket.pending
        if then is None:
            return
        start_s = time.perf_counter()
        self._wait(bucket, "parameters_dp" if self._is_sharded else "gradients_dp")
        self._waited_s += time.perf_counter() - start_s
        then(bucket)
        bucket.pending = None
        self._num_pending -= 1
        self._open(bucket)

    def _check_settled(self, slot: Slot) -> None:
        """The first gradient of a step: what is pending must belong to parameters that it did not use."""
        if slot.bucket.pending is not None:
            raise RuntimeError(
                f"GradientBuckets: {slot.name} was used before its update of the step before; give the module whose "
                "forward uses it to GradientBuckets(layers=...), or call settle() before the forward"
            )
        self.settle()

    def _open(self, bucket: Bucket) -> None:
        bucket.launched = False
        for slot in bucket.slots:
            slot.num_contributions = 0
            slot.param.grad = None
        bucket.num_waiting = sum(slot.num_expected > 0 for slot in bucket.slots)

    def _begin(self) -> None:
        """The step's transfers, from its first gradient on, when all those before are over.

        Not earlier: it may be time to agree on a plan, and what comes before (a forward, a state_dict) need not happen
        on all ranks.
        """
        self._begun = True
        if self._transfers is None or not self._buckets:
            return
        if self._planner.is_due(self._num_steps):
            self._plan_anew(self._transfers)
        self._transfers.begin_sums(self._buckets, counted=self._counted)

    def _plan_anew(self, transfers: Transfers) -> None:
        transfers.agree(self._num_steps)
        if self._planner.adapts_buckets:
            self._cut()
            for bucket in self._buckets:
                self._open(bucket)
        if self._puts_off and transfers.sums_in_forward:
            last = self._planner.last_gradients(self._buckets)
            for slot in self.slots:
                slot.is_last = slot in last

    def _check_no_stray_gradient(self) -> None:
        for slot in self._slots.values():
            if slot.param.grad is not None:
                raise RuntimeError(
                    f"GradientBuckets: {slot.name}.grad was set without passing through the buckets; "
                    "hand such gradients to accumulate()"
                )

    def _learn_counts(self) -> None:
        self._num_steps += 1
        if not self._counted:
            for slot in self._slots.values():
                slot.num_expected = slot.num_contributions
            self._counted = True
        missing = {slot.name for slot in self._slots.values() if slot.num_contributions == 0}
        if new := sorted(missing - self._named_without_gradient):
            self._named_without_gradient |= missing
            warnings.warn(
                f"GradientBuckets: no gradient came in for {', '.join(new)}; it counts as zero",
                stacklevel=4,
            )


def _unless_alone(group: ProcessGroup | None) -> ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None
