"""Normalisation over the features, on a sequence that is split over tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedcomm.nn.layout import ParamLayout, ShardedModule, TensorParallel, at_least_fp32


class RMSNorm(ShardedModule):
    """`x / rms(x) * weight` over the last dimension, computed in fp32 whatever the dtype.

    Shapes per rank: x [S/W, ..., H], weight [H], result as x. Nothing travels but the gradient of the weight:
    each rank sees its own rows only, so it is summed over the ranks (`ParamLayout.partial_grad`). Source:
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    weight: nn.Parameter

    def __init__(
        self,
        features: int,
        *,
        tp: TensorParallel,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp)
        self.eps = eps
        self.add_sharded_parameter("weight", (features,), ParamLayout(partial_grad=True), device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        return F.rms_norm(wide, self.weight.shape, at_least_fp32(self.weight), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(ShardedModule):
    """`(x - mean(x)) / std(x) * weight + bias` over the last dimension, computed in fp32 whatever the dtype.

    Shapes per rank: x [S/W, ..., H], weight and bias [H], result as x. Nothing travels but the gradients of
    weight and
    bias: each rank sees its own rows only, so they are summed over the ranks (`ParamLayout.partial_grad`).
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        features: int,
        *,
        tp: TensorParallel,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp)
        self.eps = eps
        for name in ("weight", "bias"):
            self.add_sharded_parameter(name, (features,), ParamLayout(partial_grad=True), device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight one, bias zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = at_least_fp32(self.weight), at_least_fp32(self.bias)
        return F.layer_norm(at_least_fp32(x), self.weight.shape, weight, bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
