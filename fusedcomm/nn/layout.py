"""How a parameter lies on the tensor-parallel ranks, and the sum of gradients of which each has a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from fusedcomm.ops.all_gather_matmul import Save
from fusedcomm.ops.wgrad import DeferWgrad

# Layout and hook travel with the Parameter object itself, under this attribute.
_ATTRIBUTE = "_fusedcomm_layout"


@dataclass(frozen=True)
class TensorParallel:
    """How layers split over ranks: one object for all layers of a model.

    Attributes:
        group: the tensor-parallel ranks; one rank is enough.
        method: how the ops run: "auto", "serial", "chunked", "fused" or "fused:TRANSPORT".
        save: "shard" gathers the input of a column-parallel layer again in backward, "gathered" keeps it.
        defer_wgrad: is handed each weight and its `WeightGradient` in backward, to compute at once, or later if it is
            `kept()`.
    """

    group: ProcessGroup
    method: str = "auto"
    save: Save = "shard"
    defer_wgrad: DeferWgrad | None = None

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()


@dataclass(frozen=True)
class ParamLayout:
    """What a tensor-parallel rank holds of a parameter and of its gradient.

    Attributes:
        shard_dim: the dimension that is cut evenly over the ranks, in rank order; None where every rank holds
            the whole.
        partial_grad: every rank holds the whole parameter, but sees its own rows of the sequence only, so
            that the gradient is the sum over the ranks.
    """

    shard_dim: int | None = None
    partial_grad: bool = False


@dataclass
class _Placement:
    layout: ParamLayout
    sum_hook: RemovableHandle | None


def layout_of(param: Tensor) -> ParamLayout:
    """The layout given by `set_layout`; replicated with a whole gradient where there is none."""
    placement = getattr(param, _ATTRIBUTE, None)
    return ParamLayout() if placement is None else placement.layout


def set_layout(param: nn.Parameter, layout: ParamLayout, group: ProcessGroup) -> None:
    """Note the layout, and with `partial_grad` have backward sum the gradient over `group`, in fp32.

    Every rank of the group must then run the same backward. `claim_partial_grad` takes that sum over.
    """
    if layout.partial_grad and layout.shard_dim is not None:
        raise ValueError(
            f"set_layout: shard_dim={layout.shard_dim} with partial_grad=True; "
            "a rank that holds a shard holds its whole gradient: leave one of them out"
        )
    placement = getattr(param, _ATTRIBUTE, None)
    if placement is not None and placement.sum_hook is not None:
        placement.sum_hook.remove()
    hook = None
    if layout.partial_grad and group.size() > 1:
        # A frozen parameter takes no hook, but must have it when it is trained again.
        trained = param.requires_grad
        hook = param.requires_grad_().register_hook(lambda grad: _sum_over(grad, group))
        param.requires_grad_(trained)
    setattr(param, _ATTRIBUTE, _Placement(layout, hook))


def claim_partial_grad(param: Tensor) -> None:
    """From now on the caller sums the gradient of this `partial_grad` parameter, merged with others say."""
    placement = getattr(param, _ATTRIBUTE, None)
    if placement is None or not placement.layout.partial_grad:
        raise ValueError(
            f"claim_partial_grad: a parameter of shape {list(param.shape)} has layout {layout_of(param)}; "
            "only a partial gradient can be claimed: ask layout_of(param).partial_grad first"
        )
    if placement.sum_hook is not None:
        placement.sum_hook.remove()
        placement.sum_hook = None


def _sum_over(grad: Tensor, group: ProcessGroup) -> Tensor:
    total = at_least_fp32(grad).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.to(grad.dtype)


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or as it is in fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ShardedModule(nn.Module):
    """Base of layers whose parameters have layouts.

    torch replaces Parameter objects in `to_empty` and in `load_state_dict(assign=True)`, and a caller may set
    another one. What was attached to the old ones is lost: this class attaches the layouts again.
    """

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.layouts: dict[str, ParamLayout] = {}
        self.register_load_state_dict_post_hook(lambda module, _: module._attach_layouts())

    def add_sharded_parameter(
        self,
        name: str,
        full_shape: Sequence[int],
        layout: ParamLayout,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """An uninitialised parameter that holds this rank's share of `full_shape`."""
        shape = list(full_shape)
        if layout.shard_dim is not None:
            shape[layout.shard_dim] //= self.tp.size
        self.layouts[name] = layout
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        # An assignment, `layer.weight = ...`, comes to this as well.
        super().register_parameter(name, param)
        if param is not None and name in self.layouts:
            self._attach_layout(name, param)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the named own parameter over all ranks."""
        shape = list(self.get_parameter(name).shape)
        shard_dim = self.layouts[name].shard_dim
        if shard_dim is not None:
            shape[shard_dim] *= self.tp.size
        return tuple(shape)

    @torch.no_grad()
    def fill_from_full(self, name: str, draw: Callable[[Tensor], object]) -> None:
        """Let `draw` fill the whole parameter in place, in fp32 on the CPU, and keep this rank's shard of it.

        So the values depend on neither the layout nor the device. It holds the whole parameter for a moment.
        """
        param = self.get_parameter(name)
        if param.is_meta:
            return
        full = torch.empty(self.full_shape(name), dtype=torch.float32, device="cpu")
        draw(full)
        shard_dim = self.layouts[name].shard_dim
        if shard_dim is not None:
            full = full.chunk(self.tp.size, dim=shard_dim)[self.tp.rank]
        param.copy_(full)

    def _attach_layouts(self) -> None:
        for name in self.layouts:
            self._attach_layout(name, self.get_parameter(name))

    def _attach_layout(self, name: str, param: nn.Parameter) -> None:
        if getattr(param, _ATTRIBUTE, None) is None:
            set_layout(param, self.layouts[name], self.tp.group)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedModule:
        super()._apply(fn, recurse)
        self._attach_layouts()
        return self


def fan_in_bound(fan_in: int) -> float:
    """`nn.Linear`'s rule for weights: uniform between -1/sqrt(fan_in) and 1/sqrt(fan_in)."""
    return 1 / math.sqrt(fan_in) if fan_in else 0.0


def check_divides(where: str, what: str, total: int, parts: int, remedy: str) -> None:
    """`parts` ranks share `total` evenly."""
    if total % parts:
        raise ValueError(
            f"{where}: {what}={total} over tp={parts} ranks leaves {total % parts}; it must divide; {remedy}"
        )
