"""Causal self-attention with the heads split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fusedcomm.nn.layout import TensorParallel, at_least_fp32, check_divides
from fusedcomm.nn.linear import ColumnParallelLinear, RowParallelLinear
from fusedcomm.nn.turns import Steps


class Attention(nn.Module):
    """Grouped-query causal self-attention: one gather feeds q, k and v, one scatter follows the output layer.

    Shapes per rank, W ranks: x [S/W, B, H] and the result alike (`sizes` rows each where uneven); inside,
    every rank sees the whole sequence of its own heads/W query heads and kv_heads/W key and value heads.
    `rope` rotates queries and keys. The probabilities are not dropped out: `scaled_dot_product_attention`
    would draw from a generator.

    Raises ValueError where heads or kv_heads do not divide. Source of the split: Megatron-LM; of grouped
    queries: Ainslie et al., "GQA: training generalized multi-query transformer models", 2023.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        *,
        tp: TensorParallel,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads("Attention", hidden, heads, kv_heads)
        check_heads_over_ranks("Attention", heads, kv_heads, tp.size)
        self.head_dim = hidden // heads
        kv_features = kv_heads * self.head_dim
        self.qkv = ColumnParallelLinear(
            hidden,
            {"q": hidden, "k": kv_features, "v": kv_features},
            tp=tp,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.out = RowParallelLinear(hidden, hidden, tp=tp, bias=bias, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, sizes: Sequence[int] | None = None, rope: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        return self.out(self._attend(self.qkv(x, sizes), rope), sizes)

    def steps(self, x: Tensor, sizes: Sequence[int] | None = None, rope: tuple[Tensor, Tensor] | None = None) -> Steps:
        """The same with a pause wherever something has begun to travel or can be hidden (see `nn.turns`)."""
        finish = self.qkv.begin(x, sizes)
        yield
        heads = self._attend(finish(), rope)
        yield
        return self.out.begin(heads, sizes)

    def _attend(self, qkv: Sequence[Tensor], rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of this rank's heads, [S, B, H/W], from what the one gather gave."""
        q, k, v = (rearrange(features, "s b (h d) -> b h s d", d=self.head_dim) for features in qkv)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return rearrange(y, "b h s d -> s b (h d)")


def check_heads(where: str, hidden: int, heads: int, kv_heads: int) -> None:
    """Whole features per head, whole query heads per key and value head."""
    if hidden % heads:
        raise ValueError(
            f"{where}: hidden={hidden} over heads={heads} leaves {hidden % heads}; "
            "every head has the same width: choose a multiple of heads"
        )
    if heads % kv_heads:
        raise ValueError(
            f"{where}: heads={heads} over kv_heads={kv_heads} leaves {heads % kv_heads}; "
            "each key and value head serves the same number of query heads: choose a divisor of heads"
        )


def check_heads_over_ranks(where: str, heads: int, kv_heads: int, tp_size: int) -> None:
    """Every rank has whole heads, as many as the others."""
    check_divides(where, "heads", heads, tp_size, "every rank computes whole heads: choose another tp")
    remedy = "every rank holds whole key and value heads: lower tp or raise kv_heads"
    check_divides(where, "kv_heads", kv_heads, tp_size, remedy)


def rope_table(seq_len: int, head_dim: int, theta: float, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines [seq_len, head_dim / 2] of the angles `position * theta ** (-2 i / head_dim)`, fp32.

    It is a function of its arguments and no buffer of a module, because a module's buffers are rounded by
    `.to(bfloat16)`. Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.
    """
    # In fp64, since at position 100,000 an fp32 angle is off by 0.01.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64, device=device), theta**-exponents)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, S, head_dim] turned by its positions, in fp32; feature i pairs with i + head_dim / 2."""
    first, second = at_least_fp32(x).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
