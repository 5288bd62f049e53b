"""The axes pp, dp and tp on one DeviceMesh, with the process group and this rank's place on each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import ProcessGroup, _set_pg_timeout

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Mesh:
    """This rank's view of a pp x dp x tp mesh.

    Ranks are numbered with tp innermost: tensor-parallel peers, which exchange most, are neighbours on a node.
    """

    rank: int
    world: int
    pp: int
    dp: int
    tp: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    pp_group: ProcessGroup
    dp_group: ProcessGroup
    tp_group: ProcessGroup
    device: torch.device
    device_mesh: DeviceMesh

    @cached_property
    def tp_dp_mesh(self) -> DeviceMesh:
        """This pipeline rank's part of the mesh, with dp inside tp: for shares of tensor-parallel shards."""
        ranks = self.device_mesh.mesh[self.pp_rank].t()
        return DeviceMesh.from_group(
            [self.tp_group, self.dp_group], self.device.type, mesh=ranks, mesh_dim_names=("tp", "dp")
        )

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1


def build_mesh(*, pp: int, dp: int, tp: int, device: torch.device | str = "cpu", timeout_s: float) -> Mesh:
    """Lay the initialised default group out as pp x dp x tp.

    Every rank calls it. `timeout_s` limits each wait on each axis: torch gives sub-groups a default of their own
    (pytorch#121676), so it is set on all of them.

    Raises:
        ValueError: pp x dp x tp is not the number of ranks.
    """
    world = dist.get_world_size()
    if pp * dp * tp != world:
        raise ValueError(
            f"build_mesh: pp={pp} x dp={dp} x tp={tp} = {pp * dp * tp} but {world} ranks are running; "
            "change a degree or the number of ranks"
        )
    device = torch.device(device)
    device_mesh = init_device_mesh(device.type, (pp, dp, tp), mesh_dim_names=AXES)
    groups = {axis: device_mesh.get_group(axis) for axis in AXES}
    for group in groups.values():
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    ranks = {axis: device_mesh.get_local_rank(axis) for axis in AXES}
    return Mesh(
        rank=dist.get_rank(),
        world=world,
        pp=pp,
        dp=dp,
        tp=tp,
        pp_rank=ranks["pp"],
        dp_rank=ranks["dp"],
        tp_rank=ranks["tp"],
        pp_group=groups["pp"],
        dp_group=groups["dp"],
        tp_group=groups["tp"],
        device=device,
        device_mesh=device_mesh,
    )
