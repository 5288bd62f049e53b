"""Data parallelism: gradients in flat fp32 buckets, summed over the ranks while backward still runs."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fusedcomm.comm.record import span
from fusedcomm.nn.layout import claim_partial_grad, layout_of

# Views start at multiples of 64 bytes, so that vector kernels never meet an unaligned gradient.
_ALIGN = 16


@dataclass(eq=False)
class _Bucket:
    flat: Tensor
    slots: list[_Slot]
    # Gradients whose last contribution of the step has not come in; the bucket travels at 0.
    num_waiting: int = 0
    launched: bool = False
    work: dist.Work | None = None


@dataclass(eq=False)
class _Slot:
    name: str
    param: nn.Parameter
    grad: Tensor
    bucket: _Bucket
    num_expected: int = 0
    num_contributions: int = 0


class GradientBuckets:
    """Sum each parameter's gradient in fp32 over micro-batches, then over tensor- and data-parallel ranks.

        buckets = GradientBuckets(model.named_parameters(), dp_group=mesh.dp_group, tp_group=mesh.tp_group)
        loss.backward()
        buckets.finish()
        optimizer.step()
        buckets.zero()

    Shapes per rank: `param.main_grad` is fp32, shaped as the parameter, a view into a flat bucket of about
    `bucket_mb` MiB; buckets follow the reverse order of `named_params`, which should be the order of use.

    What travels when: backward adds each gradient to `main_grad` and frees `param.grad`. The first step
    counts how often each parameter contributes until `finish()` (micro-batches, modules used twice and
    deferred weight gradients included). From the second step on a bucket is all-reduced over `dp_group` in
    the background as soon as the last contribution to it and to every bucket before it is in: all ranks send
    in one order. Parameters of which each tensor-parallel rank holds a part of the gradient
    (`ParamLayout.partial_grad`) share one more bucket, which `finish()` sums over `tp_group` and `dp_group`.
    A group of one, or None, sends nothing.

    It is a sum, not a mean: divide the loss by the global number of tokens (or samples).

    After `finish()` any torch optimizer can step: `param.grad` is the view itself where the parameter is
    fp32, and elsewhere a copy rounded to its dtype. (`finish(set_grad=False)` saves that copy for
    `fusedcomm.parallel.Optimizer`, which reads `main_grad`.) Then `zero()`, not `optimizer.zero_grad()`,
    prepares the next step.

    Errors: ValueError on all ranks of a group if they hold different parameters; RuntimeError for a gradient
    that comes in after its bucket was sent, and in `finish()` for one that did not pass through the buckets.
    Source: counting contributions in the first step is Megatron-LM's, the buckets are PyTorch DDP's (Li et
    al. 2020).
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        *,
        dp_group: ProcessGroup | None,
        tp_group: ProcessGroup | None = None,
        bucket_mb: float = 25.0,
    ) -> None:
        named = [(name, param) for name, param in named_params if param.requires_grad]
        if len({id(param) for _, param in named}) < len(named):
            raise ValueError(
                "GradientBuckets: a parameter is given under two names; "
                "pass model.named_parameters(), which names each once"
            )
        self._dp_group = _unless_alone(dp_group)
        self._tp_group = _unless_alone(tp_group)
        named = _agree_on_order(named[::-1], self._dp_group)
        sums_over_tp = self._tp_group is not None
        merged = [pair for pair in named if sums_over_tp and layout_of(pair[1]).partial_grad]
        whole = [pair for pair in named if not (sums_over_tp and layout_of(pair[1]).partial_grad)]
        _check_same(_digest(merged), self._tp_group, "tensor", "parameters with partial gradients")

        # `merged` is one bucket whatever its size: these parameters are vectors, and one latency beats many.
        self._buckets = [_fill_bucket(group) for group in _cut(whole, int(bucket_mb * 2**20))]
        self._merged = _fill_bucket(merged) if merged else None
        if self._merged is not None:
            for slot in self._merged.slots:
                claim_partial_grad(slot.param)
        self._slots: dict[Tensor, _Slot] = {slot.param: slot for bucket in self._all_buckets() for slot in bucket.slots}
        for slot in self._slots.values():
            slot.param.register_post_accumulate_grad_hook(self._collect)
        self._counted = False
        self._finished = False
        self._num_launched = 0
        self._named_without_gradient: set[str] = set()

    def accumulate(self, param: Tensor, grad: Tensor) -> None:
        """Add one contribution to `param.main_grad`: a deferred one, as autograd's come in by themselves."""
        slot = self._slots.get(param)
        if slot is None:
            raise ValueError(
                f"GradientBuckets: no bucket holds the parameter of shape {list(param.shape)}; "
                "give every trained parameter to the constructor"
            )
        bucket = slot.bucket
        if bucket.launched:
            raise RuntimeError(
                f"GradientBuckets: contribution {slot.num_contributions + 1} to the gradient of {slot.name} came "
                f"after its bucket was sent with {slot.num_contributions}; call zero() after each optimizer step, and "
                "count_again() before a step with more micro-batches or other uses of a module"
            )
        with torch.no_grad():
            slot.grad.add_(grad)
        slot.num_contributions += 1
        if self._counted and slot.num_contributions == slot.num_expected:
            bucket.num_waiting -= 1
            self._launch_ready()

    def finish(self, *, set_grad: bool = True) -> None:
        """Wait until every gradient is the sum over all ranks; every rank calls it once a step."""
        if self._finished:
            raise RuntimeError("GradientBuckets: finish() was called twice; call zero() after each optimizer step")
        self._check_no_stray_gradient()
        for bucket in self._buckets[self._num_launched :]:
            self._launch(bucket)
        if self._merged is not None:
            with span("wait", "gradients_tp", self._merged.flat.nbytes):
                dist.all_reduce(self._merged.flat, group=self._tp_group)
            self._launch(self._merged)
        for bucket in self._all_buckets():
            if bucket.work is not None:
                with span("wait", "gradients_dp", bucket.flat.nbytes):
                    bucket.work.wait()
                bucket.work = None
        self._finished = True
        self._learn_counts()
        if set_grad:
            for slot in self._slots.values():
                slot.param.grad = slot.grad.to(slot.param.dtype)

    def zero(self) -> None:
        """Prepare the next step: gradients are 0 and nothing has been sent."""
        for bucket in self._all_buckets():
            # A step that was given up on may still be travelling.
            if bucket.work is not None:
                bucket.work.wait()
            bucket.work = None
            bucket.launched = False
            bucket.flat.zero_()
            for slot in bucket.slots:
                slot.num_contributions = 0
                slot.param.grad = None
            bucket.num_waiting = sum(slot.num_expected > 0 for slot in bucket.slots)
        self._num_launched = 0
        self._finished = False

    def count_again(self) -> None:
        """Let the next step count contributions anew: like the first, it sends nothing before `finish()`."""
        self._counted = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets on this rank: what one all-reduce of the step moves in."""
        return sum(bucket.flat.nbytes for bucket in self._all_buckets())

    def _all_buckets(self) -> list[_Bucket]:
        return self._buckets if self._merged is None else [*self._buckets, self._merged]

    def _collect(self, param: Tensor) -> None:
        grad, param.grad = param.grad, None
        # Autograd calls this too where a function gave no gradient: a deferred one is still to come.
        if grad is not None:
            self.accumulate(param, grad)

    def _launch_ready(self) -> None:
        while self._num_launched < len(self._buckets):
            bucket = self._buckets[self._num_launched]
            if bucket.num_waiting > 0:
                return
            self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        bucket.launched = True
        if bucket is not self._merged:
            self._num_launched += 1
        if self._dp_group is not None:
            bucket.work = dist.all_reduce(bucket.flat, group=self._dp_group, async_op=True)

    def _check_no_stray_gradient(self) -> None:
        for slot in self._slots.values():
            if slot.param.grad is not None:
                raise RuntimeError(
                    f"GradientBuckets: {slot.name}.grad was set without passing through the buckets; "
                    "hand such gradients to accumulate()"
                )

    def _learn_counts(self) -> None:
        if not self._counted:
            for slot in self._slots.values():
                slot.num_expected = slot.num_contributions
            self._counted = True
        missing = {slot.name for slot in self._slots.values() if slot.num_contributions == 0}
        if new := sorted(missing - self._named_without_gradient):
            self._named_without_gradient |= missing
            warnings.warn(
                f"GradientBuckets: no gradient came in for {', '.join(new)}; it counts as zero",
                stacklevel=3,
            )


def main_grad_of(param: Tensor) -> Tensor | None:
    """The parameter's fp32 gradient in its bucket; None where it has no bucket."""
    return getattr(param, "main_grad", None)


def _unless_alone(group: ProcessGroup | None) -> ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None


def _fill_bucket(named: list[tuple[str, nn.Parameter]]) -> _Bucket:
    sizes = [-(-param.numel() // _ALIGN) * _ALIGN for _, param in named]
    bucket = _Bucket(torch.zeros(sum(sizes), dtype=torch.float32, device=named[0][1].device), [])
    for (name, param), piece in zip(named, bucket.flat.split(sizes)):
        grad = piece[: param.numel()].view(param.shape)
        param.main_grad = grad  # pyright: ignore[reportAttributeAccessIssue]
        bucket.slots.append(_Slot(name, param, grad, bucket))
    return bucket


def _cut(named: list[tuple[str, nn.Parameter]], max_bytes: int) -> list[list[tuple[str, nn.Parameter]]]:
    groups: list[list[tuple[str, nn.Parameter]]] = []
    num_bytes = 0
    for name, param in named:
        if not groups or num_bytes + param.numel() * 4 > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append((name, param))
        num_bytes += param.numel() * 4
    return groups


def _digest(named: list[tuple[str, nn.Parameter]]) -> str:
    lines = [f"{name} {list(param.shape)} {param.dtype} {layout_of(param)}" for name, param in named]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _agree_on_order(
    named: list[tuple[str, nn.Parameter]], group: ProcessGroup | None
) -> list[tuple[str, nn.Parameter]]:
    """The group's first rank decides the order; every rank must hold the same parameters."""
    if group is None:
        return named
    names = [[name for name, _ in named]]
    dist.broadcast_object_list(names, group=group, group_src=0)
    place = {name: index for index, name in enumerate(names[0])}
    named = sorted(named, key=lambda pair: place.get(pair[0], len(place)))
    _check_same(_digest(named), group, "data", "parameters (name, shape, dtype, layout)")
    return named


def _check_same(digest: str, group: ProcessGroup | None, axis: str, what: str) -> None:
    if group is None:
        return
    digests = [""] * group.size()
    dist.all_gather_object(digests, digest, group=group)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise ValueError(
            f"GradientBuckets: {axis}-parallel ranks {others} hold other {what} than rank 0; "
            "ranks of one group must build the same model"
        )
