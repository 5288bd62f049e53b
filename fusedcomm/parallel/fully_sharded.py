"""Weights, gradients and optimizer state shared out over data-parallel ranks: torch's `fully_shard` on our layers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from fusedcomm.comm.collective import bulk_group
from fusedcomm.comm.owners import Owners
from fusedcomm.comm.record import span
from fusedcomm.nn.layout import claim_partial_grad, layout_of, set_layout
from fusedcomm.ops.wgrad import WeightGradient


def fully_shard_stage(
    stage: nn.Module,
    units: Iterable[nn.Module],
    *,
    dp_mesh: DeviceMesh,
    tp_group: ProcessGroup,
    dtype: torch.dtype,
    keep_gathered: bool,
) -> None:
    """Share out the fp32 parameters of `stage` over `dp_mesh`, row by row, in place.

    Each of `units`, and what is left of the stage, is gathered in `dtype` as a whole when its forward begins. It is
    given back after its backward, units also between forward and backward; with `keep_gathered` all of it only after
    the step's last backward. Sums are in fp32.
    """
    layouts = {name: layout_of(param) for name, param in stage.named_parameters()}
    with torch.no_grad():
        for param in stage.parameters():
            # All modes start from the same weights.
            param.copy_(param.to(dtype))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in units:
        fully_shard(unit, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
    fully_shard(stage, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)
    # A stage may return a view, and torch warns of what would modify it in place, as no loss and no transfer does. It
    # warns in each forward, beside other threads, whose warnings `catch_warnings` would take.
    name = re.escape(type(stage).__name__)
    warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({name}\) returned a view tensor")
    for module in _sharded_modules(stage):
        # The loss is divided by the tokens of all ranks: gradients are sums.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # torch has made new parameters.
    for name, param in stage.named_parameters():
        set_layout(param, layouts[name], tp_group)
        if layouts[name].partial_grad:
            claim_partial_grad(param)


class FullySharded:
    """Sums the gradients of stages that `fully_shard_stage` made; called as `GradientBuckets` is.

    Micro-batches add up, in fp32, where they are computed. A stage's sums leave in its last backward of the step, unit
    by unit as their gradients are complete; or where backward is split (`split_backward`), after the last weight
    gradient: `Pipeline.train_step(ends_step=...)` says when that is. Partial gradients are then summed over `tp_group`,
    together. `param.main_grad` is the sum for the rows of this rank, fp32.

    On CPU ranks shares travel by `Owners`, so that sums are in the order of ranks, and PeerError names who is gone.

    Errors: ValueError for a split backward of a stage that is not sharded as a whole: torch 2.13 would then sum without
    the weight gradients that were put off, and say nothing.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        dp_group: ProcessGroup,
        tp_group: ProcessGroup,
        keep_gathered: bool,
        split_backward: bool,
    ) -> None:
        self._stages = dict(stages)
        self._tp_group = tp_group if tp_group.size() > 1 else None
        self._keep_gathered, self._split_backward = keep_gathered, split_backward
        for index, stage in stages.items():
            if split_backward and len(list(_sharded_modules(stage))) > 1:
                raise ValueError(
                    f"FullySharded: stage {index} has a split backward and units that are sharded by themselves, whose "
                    "sums would lack the weight gradients that are put off; shard it as a whole (units=())"
                )
        self._params = {name: param for stage in stages.values() for name, param in stage.named_parameters()}
        self._holders: dict[Tensor, FSDPParam] = {}
        self._named_without_gradient: set[str] = set()
        device = next((param.device for param in self._params.values()), torch.device("cpu"))
        if device.type == "cpu":
            # The modules use it as long as they live.
            owners = Owners(bulk_group(dp_group, device, next(iter(stages.values()), self)))
            for module in (module for stage in stages.values() for module in _sharded_modules(stage)):
                module.set_custom_all_gather(_GatherFromOwners(owners))
                module.set_custom_reduce_scatter(_SumForOwners(owners))
        self.zero()

    def zero(self) -> None:
        """Prepare the next step, whose gradients stay here until its last backward."""
        for param in self._params.values():
            param.grad = None
        for stage in self._stages.values():
            self._let_sums_leave(stage, False)

    def accumulate(self, param: Tensor, grad: WeightGradient) -> None:
        """Compute a gradient that was put off; `param` is the gathered parameter, as the layer had it."""
        if param not in self._holders:
            groups = [group for stage in self._stages.values() for group in _groups(stage)]
            self._holders = {held.unsharded_param: held for group in groups for held in group.fsdp_params}
        held = self._holders[param]
        if held.unsharded_accumulated_grad is None:
            held.unsharded_accumulated_grad = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
            grad.add_to(held.unsharded_accumulated_grad, overwrite=True)
        else:
            grad.add_to(held.unsharded_accumulated_grad)

    def before_last_backward(self, stage: int) -> None:
        if not self._split_backward:
            self._let_sums_leave(self._stages[stage], True)

    def after_last_backward(self, stage: int) -> None:
        if self._split_backward:
            self._let_sums_leave(self._stages[stage], True)
            # As torch's own pipeline does: autograd, which would have called it, has ended before the last gradients.
            for group in _groups(self._stages[stage]):
                group.post_backward()
            cast(FSDPModule, self._stages[stage])._get_fsdp_state()._root_post_backward_final_callback()

    @torch.no_grad()
    def finish(self, *, set_grad: bool = True) -> None:
        """Every rank calls it once a step, after its last backward. `param.grad` is a DTensor in any case."""
        partial = []
        for param in self._params.values():
            grad = param.grad
            local = torch.zeros_like(_local(param)) if grad is None else _local(grad)
            param.main_grad = local  # pyright: ignore[reportAttributeAccessIssue]
            if layout_of(param).partial_grad:
                partial.append(local)
        self._name_without_gradient()
        if self._tp_group is not None and partial:
            flat = torch.cat([grad.flatten() for grad in partial])
            with span("wait", "gradients_tp", flat.nbytes):
                dist.all_reduce(flat, group=self._tp_group)
            for grad, total in zip(partial, flat.split([grad.numel() for grad in partial])):
                grad.copy_(total.view(grad.shape))

    def _name_without_gradient(self) -> None:
        missing = {name for name, param in self._params.items() if param.grad is None}
        if new := sorted(missing - self._named_without_gradient):
            self._named_without_gradient |= missing
            warnings.warn(
                f"FullySharded: no gradient came in for {', '.join(new)}; it counts as zero",
                stacklevel=3,
            )

    def gather_later(self) -> None:
        """The parameters' rows have changed: what evaluation has left gathered is out of date."""
        for stage in self._stages.values():
            for module in _sharded_modules(stage):
                module.reshard()

    def settle(self) -> None:
        """Nothing is ever pending."""

    def _let_sums_leave(self, stage: nn.Module, leave: bool) -> None:
        root = cast(FSDPModule, stage)
        root.set_is_last_backward(leave)
        root.set_requires_gradient_sync(leave)
        root.set_reshard_after_backward(leave or not self._keep_gathered)


class _GatherFromOwners(DefaultAllGather):
    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        parts = output_tensor.chunk(group.size())
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        with span("wait", "parameters_dp", output_tensor.nbytes):
            self._owners.gather([[part] for part in parts], output_tensor.device).wait()


class _SumForOwners(DefaultReduceScatter):
    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        parts = input_tensor.chunk(group.size())
        with span("wait", "gradients_dp", input_tensor.nbytes):
            self._owners.reduce([[part] for part in parts], input_tensor.device).wait()
        output_tensor.copy_(parts[group.rank()])


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor), "fully_shard makes DTensors"
    return tensor.to_local()


def _sharded_modules(stage: nn.Module) -> Iterator[FSDPModule]:
    yield from (module for module in stage.modules() if isinstance(module, FSDPModule))


def _groups(stage: nn.Module) -> Iterator[FSDPParamGroup]:
    for module in _sharded_modules(stage):
        yield from module._get_fsdp_state()._fsdp_param_groups
