"""Linear layers split over tensor-parallel ranks, with the sequence split between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fusedcomm.nn.layout import ParamLayout, ShardedModule, TensorParallel, check_divides, fan_in_bound
from fusedcomm.ops.activation import Activation
from fusedcomm.ops.all_gather_matmul import all_gather_matmul
from fusedcomm.ops.begin import begin_all_gather_matmul, begin_matmul_reduce_scatter
from fusedcomm.ops.matmul_reduce_scatter import matmul_reduce_scatter


class _Linear(ShardedModule):
    """Weight and bias of one output."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def _add_parameters(
        self,
        full_shape: tuple[int, int],
        layouts: tuple[ParamLayout, ParamLayout],
        *,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        weight_layout, bias_layout = layouts
        self.add_sharded_parameter("weight", full_shape, weight_layout, device=device, dtype=dtype)
        if bias:
            self.add_sharded_parameter("bias", full_shape[:1], bias_layout, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)
        self._draw()

    def _draw(self) -> None:
        bound = fan_in_bound(self.full_shape("weight")[1])
        self.fill_from_full("weight", lambda full: full.uniform_(-bound, bound))
        if self.bias is not None:
            self.fill_from_full("bias", torch.Tensor.zero_)


class _ParallelLinear(_Linear):
    """One or several linear maps of one input; several are submodules, with the keys of `out_features`."""

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int] | Mapping[str, int],
        *,
        tp: TensorParallel,
        layouts: tuple[ParamLayout, ParamLayout],
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(tp)
        self.in_features = in_features
        self.out_features = out_features
        if isinstance(out_features, int):
            self._add_parameters((out_features, in_features), layouts, bias=bias, device=device, dtype=dtype)
            return
        for name, features in _named(out_features).items():
            output = _Linear(tp)
            output._add_parameters((features, in_features), layouts, bias=bias, device=device, dtype=dtype)
            self.add_module(name, output)

    def linears(self) -> list[_Linear]:
        """The holders of weight and bias, in the order of the outputs."""
        if isinstance(self.out_features, int):
            return [self]
        return [module for module in self.children() if isinstance(module, _Linear)]

    def reset_parameters(self) -> None:
        """Weights as `nn.Linear` draws them (from torch's global generator), biases zero.

        The whole weight is drawn on every rank: with one `torch.manual_seed` everywhere the shards belong
        together.
        """
        for linear in self.linears():
            linear._draw()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, tp={self.tp.size}"


class ColumnParallelLinear(_ParallelLinear):
    """`x @ weight.T + bias` with the outputs split over ranks: gathers the sequence while it multiplies.

    Shapes per rank, W ranks: x [S/W, ..., K], weight [N/W, K], bias [N/W], result [S, ..., N/W].
    `out_features` as a list or a mapping makes several such outputs from ONE gather (q, k, v; gate, up) and
    returns a list; their weights are `<name>.weight`, with the mapping's keys or "0", "1", ... as names.
    `sizes` are the rows per rank where they are uneven.

    The rows of x travel in forward, and again (with the partial gradients of x) in backward: see
    `all_gather_matmul`. Raises ValueError where N does not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int] | Mapping[str, int],
        *,
        tp: TensorParallel,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, features in _named(out_features).items():
            what = "out_features" if isinstance(out_features, int) else f"out_features[{name}]"
            check_divides("ColumnParallelLinear", what, features, tp.size, "choose another width or tp")
        layouts = (ParamLayout(shard_dim=0), ParamLayout(shard_dim=0))
        super().__init__(in_features, out_features, tp=tp, layouts=layouts, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor | list[Tensor]:
        linears = self.linears()
        biases = [linear.bias for linear in linears if linear.bias is not None]
        outputs = all_gather_matmul(
            x,
            [linear.weight for linear in linears],
            group=self.tp.group,
            bias=biases or None,
            sizes=sizes,
            save=self.tp.save,
            defer_wgrad=self.tp.defer_wgrad,
            method=self.tp.method,
        )
        return outputs[0] if isinstance(self.out_features, int) else outputs

    def begin(self, x: Tensor, sizes: Sequence[int] | None = None) -> Callable[[], list[Tensor]]:
        """Let the rows of x travel; the returned function, called once, multiplies and gives the list of outputs."""
        linears = self.linears()
        return begin_all_gather_matmul(
            x,
            [linear.weight for linear in linears],
            group=self.tp.group,
            biases=[linear.bias for linear in linears if linear.bias is not None],
            sizes=sizes,
            save=self.tp.save,
            defer_wgrad=self.tp.defer_wgrad,
            method=self.tp.method,
        )


class RowParallelLinear(_ParallelLinear):
    """`x @ weight.T + bias` with the inputs split over ranks: sums rows and splits them while it multiplies.

    Shapes per rank, W ranks: x [S, ..., K/W], weight [N, K/W], bias [N], result [S/W, ..., N], cut as
    `torch.chunk` would or as `sizes` says. The bias is added once, by the owner of the rows; its gradient is
    partial (`ParamLayout`). Several outputs as in ColumnParallelLinear, each with a scatter of its own.
    `input_activation` is computed on x chunk by chunk (`matmul_reduce_scatter`); `swiglu` takes two x.

    Partial sums of the result travel in forward, its gradient in backward: see `matmul_reduce_scatter`.
    Raises ValueError where K does not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int] | Mapping[str, int],
        *,
        tp: TensorParallel,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_divides("RowParallelLinear", "in_features", in_features, tp.size, "choose another width or tp")
        layouts = (ParamLayout(shard_dim=1), ParamLayout(partial_grad=True))
        super().__init__(in_features, out_features, tp=tp, layouts=layouts, bias=bias, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor | Sequence[Tensor],
        sizes: Sequence[int] | None = None,
        *,
        input_activation: Activation | None = None,
    ) -> Tensor | list[Tensor]:
        outputs = [
            matmul_reduce_scatter(
                x,
                linear.weight,
                group=self.tp.group,
                bias=linear.bias,
                input_activation=input_activation,
                sizes=sizes,
                defer_wgrad=self.tp.defer_wgrad,
                method=self.tp.method,
            )
            for linear in self.linears()
        ]
        return outputs[0] if isinstance(self.out_features, int) else outputs

    def begin(
        self,
        x: Tensor | Sequence[Tensor],
        sizes: Sequence[int] | None = None,
        *,
        input_activation: Activation | None = None,
    ) -> Callable[[], Tensor]:
        """Multiply by the one weight and let the sums travel; the returned function, called once, gives the result."""
        return begin_matmul_reduce_scatter(
            x,
            self.weight,
            group=self.tp.group,
            bias=self.bias,
            input_activation=input_activation,
            sizes=sizes,
            defer_wgrad=self.tp.defer_wgrad,
            method=self.tp.method,
        )


def _named(out_features: int | Sequence[int] | Mapping[str, int]) -> dict[str, int]:
    if isinstance(out_features, int):
        return {"": out_features}
    if isinstance(out_features, Mapping):
        return dict(out_features)
    return {str(index): features for index, features in enumerate(out_features)}
