"""A causal self-attention block, forward and backward: RMSNorm, q, k, v (N = K/W features each a rank), output."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from einops import rearrange
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

TORCH_METHOD = "torch"
EXTRA_METHODS: tuple[str, ...] = ()
_HEAD_DIM = 64


def default_shape(world: int) -> tuple[int, int, int]:
    # One sequence of 2048 tokens, 1024 wide; 16 heads over all ranks.
    return 2048, max(_HEAD_DIM, 1024 // world), 1024


def check_spec(spec: Spec) -> None:
    check_divides(spec, "M", spec.m, spec.world)
    check_divides(spec, "N, features of whole heads,", spec.n, _HEAD_DIM)


def make_case(spec: Spec, rank: int) -> Case:
    return _Attention(spec, rank)


class _Attention(Block):
    columns = ("q", "k", "v")
    row = "out"

    def inner(self, products: list[Tensor]) -> Tensor:
        return _attend(*products)

    def dtensor_model(self, mesh: DeviceMesh, full: Mapping[str, Tensor]) -> nn.Module:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "attention": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(0)),
        }
        return parallelize_module(_DTensorBlock(full), mesh, plan, src_data_rank=None)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (rearrange(x, "s (h d) -> 1 h s d", d=_HEAD_DIM) for x in (q, k, v))
    return rearrange(F.scaled_dot_product_attention(q, k, v, is_causal=True), "1 h s d -> s (h d)")


class _DTensorBlock(nn.Module):
    def __init__(self, full: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.norm = DTensorNorm(full["norm"])
        self.attention = _DTensorAttention(full)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.norm(x))


class _DTensorAttention(nn.Module):
    def __init__(self, full: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (linear_of(full[name]) for name in ("q", "k", "v", "out"))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(_attend(self.q(x), self.k(x), self.v(x)))
