"""One weight, used by the first and the last pipeline stage: two copies that must stay one."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fusedcomm.comm.mesh import Mesh
from fusedcomm.comm.record import span
from fusedcomm.parallel.buckets import main_grad_of


def tied_group(mesh: Mesh, *, last_stage_rank: int, timeout_s: float) -> ProcessGroup | None:
    """The two ranks with the copies at this rank's place in dp and tp; every rank of the mesh calls it.

    `last_stage_rank` is the pipeline rank of the last stage. None on ranks that hold no copy, and everywhere
    if one rank holds both. `timeout_s` limits each wait, as in `build_mesh`.
    """
    if last_stage_rank == 0:
        return None
    mine = None
    for line in mesh.device_mesh.mesh.flatten(1).t().tolist():
        pair = [line[0], line[last_stage_rank]]
        group = dist.new_group(pair, timeout=timedelta(seconds=timeout_s), group_desc="tied_weights")
        if isinstance(group, ProcessGroup) and mesh.rank in pair:
            mine = group
    return mine


class TiedWeights:
    """Keeps the embedding of the first stage and the output weight of the last one equal, bit for bit.

    Shapes per rank: `first` and `last` are the copies that this rank holds, None where it holds none; `group`
    joins the two ranks, and is None where one rank holds both copies or a rank holds neither. Copies that start equal,
    equal gradients and one clipping factor give equal updates, so that nothing but the fp32 gradient travels,
    once a step. In the gradient norm the second copy does not count (`Optimizer(counted_elsewhere=...)`).
    """

    def __init__(self, *, first: nn.Parameter | None, last: nn.Parameter | None, group: ProcessGroup | None) -> None:
        self._copies = [copy for copy in (first, last) if copy is not None]
        self._group = group
        if len(self._copies) not in ((1,) if group is not None else (0, 2)):
            raise ValueError(
                f"TiedWeights: {len(self._copies)} copies {'without' if group is None else 'and'} a group; a rank "
                "holds one copy and a group of two ranks, or both copies, or neither"
            )

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients: after `GradientBuckets.finish()`, before clipping."""
        grads = [_main_grad(copy) for copy in self._copies]
        if self._group is not None:
            with span("wait", "gradients_tied", grads[0].nbytes):
                dist.all_reduce(grads[0], group=self._group)
        elif grads:
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])


def _main_grad(copy: nn.Parameter) -> Tensor:
    grad = main_grad_of(copy)
    if grad is None:
        raise ValueError(
            f"TiedWeights: a tied weight of shape {list(copy.shape)} has no fp32 gradient; "
            "make GradientBuckets of it first"
        )
    return grad
