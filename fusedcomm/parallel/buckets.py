"""The flat fp32 buffer of all gradients of a rank, in an order that ranks agree on, and the buckets it is cut into."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fusedcomm.nn.layout import claim_partial_grad, layout_of

# Views start at multiples of 64 bytes, so that vector kernels never meet an unaligned gradient.
ALIGN = 16
NamedParams = list[tuple[str, nn.Parameter]]


@dataclass(eq=False)
class Slot:
    """A parameter and its gradient, a view into the buffer from element `start`, padded to `padded` elements."""

    name: str
    param: nn.Parameter
    grad: Tensor
    start: int
    padded: int
    num_expected: int = 0
    num_contributions: int = 0
    # time.perf_counter() of the step's latest contribution, and what computing it took if that was done here.
    ready_s: float | None = None
    compute_s: float = 0.0
    # Of the first forward that used the parameter, as if no layer before had waited for a sum.
    forward_s: float | None = None
    # Its last contribution of a step is computed after all others: by the plan, and in the latest step.
    is_last: bool = False
    was_last: bool = False
    bucket: Bucket = field(init=False)


@dataclass(eq=False)
class Bucket:
    """Consecutive slots whose sum is needed and becomes ready as one; `flat` starts at `offset` of the buffer."""

    index: int
    flat: Tensor
    offset: int
    slots: list[Slot]
    # Gradients whose last contribution of the step has not come in; the bucket is launched at 0.
    num_waiting: int = 0
    launched: bool = False
    # What remains to be done with the sum, once it is in; None: nothing is under way.
    pending: Callable[[Bucket], None] | None = None


def allocate_gradients(named: NamedParams) -> tuple[Tensor, list[Slot]]:
    """A buffer of zeros with a slot for each parameter, whose `main_grad` becomes its view."""
    sizes = [-(-param.numel() // ALIGN) * ALIGN for _, param in named]
    device = named[0][1].device if named else torch.device("cpu")
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    slots = []
    start = 0
    for (name, param), size in zip(named, sizes):
        grad = flat[start : start + param.numel()].view(param.shape)
        param.main_grad = grad  # pyright: ignore[reportAttributeAccessIssue]
        slots.append(Slot(name, param, grad, start, size))
        start += size
    return flat, slots


def cut_into_buckets(flat: Tensor, slots: Sequence[Slot], max_bytes: int, *, first_index: int = 0) -> list[Bucket]:
    """Buckets of as many slots as `max_bytes` hold, and at least one each."""
    groups: list[list[Slot]] = []
    num_bytes = 0
    for slot in slots:
        if not groups or num_bytes + slot.padded * 4 > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(slot)
        num_bytes += slot.padded * 4
    buckets = []
    for index, group in enumerate(groups, first_index):
        start, stop = group[0].start, group[-1].start + group[-1].padded
        bucket = Bucket(index, flat[start:stop], start, group)
        for slot in group:
            slot.bucket = bucket
        buckets.append(bucket)
    return buckets


def main_grad_of(param: Tensor) -> Tensor | None:
    """The parameter's fp32 gradient in its bucket; None where it has no bucket."""
    return getattr(param, "main_grad", None)


def arrange(
    named_params: Iterable[tuple[str, nn.Parameter]], dp_group: ProcessGroup | None, tp_group: ProcessGroup | None
) -> tuple[NamedParams, NamedParams]:
    """The trained parameters from the last to the first, the same on all ranks: `(whole, merged)`.

    Of `merged` ones each tensor-parallel rank holds a part of the gradient; whoever calls this sees to their sums.
    """
    named = [(name, param) for name, param in named_params if param.requires_grad]
    if len({id(param) for _, param in named}) < len(named):
        raise ValueError(
            "GradientBuckets: a parameter is given under two names; "
            "pass model.named_parameters(), which names each once"
        )
    named = _agree_on_order(named[::-1], dp_group)
    is_merged = {name: tp_group is not None and layout_of(param).partial_grad for name, param in named}
    merged = [pair for pair in named if is_merged[pair[0]]]
    _check_same(_digest(merged), tp_group, "tensor", "parameters with partial gradients")
    for _, param in merged:
        claim_partial_grad(param)
    return [pair for pair in named if not is_merged[pair[0]]], merged


def _digest(named: NamedParams) -> str:
    """A hash of names, shapes, dtypes and layouts in their order."""
    lines = [f"{name} {list(param.shape)} {param.dtype} {layout_of(param)}" for name, param in named]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _agree_on_order(named: NamedParams, group: ProcessGroup | None) -> NamedParams:
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
    """ValueError on all ranks unless all have this digest."""
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
