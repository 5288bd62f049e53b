"""A Llama MLP block, forward and backward: RMSNorm, gate and up (N inner features a rank), SwiGLU, down."""

from __future__ import annotations

from collections.abc import Mapping

import torch
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

from fusedcomm.bench import block
from fusedcomm.bench.block import Block, DTensorNorm, Forward, linear_of, rms_norm
from fusedcomm.bench.case import Case, Spec, check_divides
from fusedcomm.nn.turns import Steps, in_turns
from fusedcomm.ops.begin import begin_all_gather_matmul, begin_matmul_reduce_scatter

# `interleave` computes the two halves of the rows in turns, as `tp_sync: interleave` does with those of a batch.
METHODS = (*block.METHODS, "interleave")
TORCH_METHOD = "torch"
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
    activation = "swiglu"

    def inner(self, products: list[Tensor]) -> Tensor:
        gate, up = products
        return F.silu(gate) * up

    def our_forward(self, method: str) -> Forward:
        return self._interleaved if method == "interleave" else super().our_forward(method)

    def _interleaved(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        def steps(half: Tensor) -> Steps:
            products = begin_all_gather_matmul(
                rms_norm(half, weights["norm"]),
                [weights["gate"], weights["up"]],
                group=self.group,
                save="gathered",
            )
            yield
            halves = products()
            yield
            return begin_matmul_reduce_scatter(
                halves, weights["down"], group=self.group, input_activation=self.activation
            )

        return torch.cat(in_turns(*(steps(half) for half in x.chunk(2))))

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
