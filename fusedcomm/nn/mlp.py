"""Feed-forward blocks with the inner features (split_dim 1) or the outer ones (split_dim 0) split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.nn.layout import TensorParallel, check_divides
from fusedcomm.nn.linear import ColumnParallelLinear, RowParallelLinear
from fusedcomm.nn.turns import Steps
from fusedcomm.ops.activation import Activation, activate, check_activation
from fusedcomm.ops.reshard import all_to_all


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` (swiglu) or `down(gelu(up(x)))` (gelu, tanh form).

    Shapes per rank, W ranks: x [S/W, B, H] and the result alike (`sizes` rows each where uneven).

    - `split_dim=1`, column-parallel then row-parallel: inside, a rank has [S, B, F/W]. H features per token
      are gathered before and scattered after: the cheapest pairing. F must divide.
    - `split_dim=0`, row-parallel then column-parallel: inside, a rank has [S/W, B, F]. The F inner features
      per token (2 F for swiglu) are scattered and F gathered, and two all-to-alls turn the split of x from
      rows to features and back. With F = 4 H that is about four times the bytes of `split_dim=1`; it is there
      for weights whose F does not divide. H must.

    Parameter names and values do not depend on `split_dim`. Raises ValueError where F or H does not divide.
    Source of swiglu: Shazeer, "GLU variants improve Transformer", 2020.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        *,
        tp: TensorParallel,
        activation: Literal["swiglu", "gelu"] = "swiglu",
        split_dim: Literal[0, 1] = 1,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_activation("MLP", activation)
        check_mlp("MLP", hidden, ffn_hidden, split_dim, tp.size)
        self.tp = tp
        self.activation: Activation = activation
        self.split_dim = split_dim
        pairing = (ColumnParallelLinear, RowParallelLinear)
        first, second = pairing if split_dim == 1 else pairing[::-1]
        if activation == "swiglu":
            outputs = {"gate": ffn_hidden, "up": ffn_hidden}
            self.gate_up = first(hidden, outputs, tp=tp, bias=bias, device=device, dtype=dtype)
        else:
            self.up = first(hidden, ffn_hidden, tp=tp, bias=bias, device=device, dtype=dtype)
        self.down = second(ffn_hidden, hidden, tp=tp, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        if isinstance(self.down, RowParallelLinear):
            return self.down(self._first()(x, sizes), sizes, input_activation=self.activation)
        group, world = self.tp.group, self.tp.size
        rows = sizes or [x.shape[0]] * world
        features = chunk_sizes(x.shape[-1], world)
        x = all_to_all(x, group=group, gather_dim=0, scatter_dim=2, gather_sizes=rows, scatter_sizes=features)
        outputs = self._first()(x, rows)
        inner = activate(self.activation, [outputs] if isinstance(outputs, Tensor) else outputs)
        y = self.down(inner, rows)
        return all_to_all(y, group=group, gather_dim=2, scatter_dim=0, gather_sizes=features, scatter_sizes=rows)

    def steps(self, x: Tensor, sizes: Sequence[int] | None = None) -> Steps:
        """The same with a pause wherever something has begun to travel or can be hidden; `split_dim=1` only."""
        first, second = self._first(), self.down
        if not isinstance(first, ColumnParallelLinear) or not isinstance(second, RowParallelLinear):
            raise ValueError(
                f"MLP: split_dim={self.split_dim} cannot be computed in steps, since its all-to-alls wait where they "
                "stand; use split_dim=1"
            )
        finish = first.begin(x, sizes)
        yield
        outputs = finish()
        yield
        return second.begin(outputs, sizes, input_activation=self.activation)

    def _first(self) -> ColumnParallelLinear | RowParallelLinear:
        return self.gate_up if self.activation == "swiglu" else self.up


def check_mlp(where: str, hidden: int, ffn_hidden: int, split_dim: int, tp_size: int) -> None:
    """The split features divide."""
    if split_dim not in (0, 1):
        raise ValueError(f"{where}: split_dim={split_dim!r} is unknown; use 1 (inner features) or 0 (outer ones)")
    if split_dim == 1:
        remedy = "choose another ffn_hidden or tp, or split_dim=0"
        check_divides(where, "ffn_hidden", ffn_hidden, tp_size, remedy)
    else:
        remedy = "split_dim=0 splits the hidden features: choose another tp"
        check_divides(where, "hidden", hidden, tp_size, remedy)
