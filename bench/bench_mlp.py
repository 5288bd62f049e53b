"""A Llama MLP block, forward and backward: RMSNorm, gate and up (N inner features a rank), SwiGLU, down."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fusedcomm.bench.block import METHODS as METHODS
from fusedcomm.bench.block import Block, DTensorNorm, linear_of
from fusedcomm.bench.case import Case, Spec, check_divides
from fusedcomm.nn import swiglu

EXTRA_METHODS: tuple[str, ...] = ()


def default_shape(world: int) -> tuple[int, int, int]:
    # 2048 tokens, 1024 wide, 2816 inner features over all ranks.
    return 2048, max(1, 2816 // world), 1024


def check_spec(spec: Spec) -> None:
    check_divides(spec, "M", spec.m, spec.world)


def make_case(spec: Spec, rank: int) -> Case:
    return _MLP(spec, rank)


class _MLP(Block):
    columns = ("gate", "up")
    row = "down"

    def inner(self, products: list[Tensor]) -> Tensor:
        gate, up = products
        return F.silu(gate) * up

    def inner_of_ours(self, products: list[Tensor]) -> Tensor:
        return swiglu(products[0], products[1])

    def dtensor_model(self, mesh: DeviceMesh, full: Mapping[str, Tensor]) -> nn.Module:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "mlp": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(0)),
        }
        return parallelize_module(_DTensorBlock(full), mesh, plan, src_data_rank=None)


class _DTensorBlock(nn.Module):
    def __init__(self, full: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.norm = DTensorNorm(full["norm"])
        self.mlp = _DTensorMLP(full)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


class _DTensorMLP(nn.Module):
    def __init__(self, full: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (linear_of(full[name]) for name in ("gate", "up", "down"))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
