"""What an op that is begun and finished apart does at each of its four points: in chunks, or fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedcomm.comm.record import note_path
from fusedcomm.ops.activation import Activation, activate
from fusedcomm.ops.all_gather_matmul import Save, multiply_gathered, scatter_input_gradient
from fusedcomm.ops.chunked import Call, Gather, Scatter
from fusedcomm.ops.matmul_reduce_scatter import multiply_gathered_gradient, scatter_products
from fusedcomm.ops.wgrad import DeferWgrad, WeightGradient

if TYPE_CHECKING:
    from fusedcomm.ops import fused


def _noted(call: Call, device: torch.device, part: str = "") -> Call:
    """The call under the name of its part, with the path that it takes noted."""
    call = replace(call, op=f"{call.op}{part}")
    note_path(call.path(device))
    return call


@dataclass
class GatherParts:
    """Those of one all-gather-matmul, in chunks; the transfers only while they are under way."""

    call: Call
    save: Save
    defer_wgrad: DeferWgrad | None
    _gather: Gather | fused.Gather | None = None
    _scatter: Scatter | fused.Scatter | None = None

    def begin(self, x: Tensor) -> None:
        """Let the rows of x travel."""
        self._gather = Gather(_noted(self.call, x.device), x.contiguous(), keep=self.save == "gathered")

    def finish(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The results, and what backward needs of the input."""
        gather, self._gather = self._gather, None
        assert isinstance(gather, Gather), "an op is finished once"
        results = multiply_gathered(gather, x, weights, biases)
        return results, gather.full if self.save == "gathered" else x

    def begin_backward(
        self, grads: Sequence[Tensor], saved: Tensor, weights: Sequence[Tensor], *, need_x: bool, need_w: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """`([dw, ...], None)`, with `defer_wgrad` `([], x_full)`; partial sums of dx are let go, if it is needed."""
        call = _noted(self.call, saved.device, " backward")
        defer = self.defer_wgrad is not None
        gather = None
        if need_w and self.save == "shard":
            gather = Gather(replace(call, op=f"{call.op} gather"), saved.contiguous(), keep=defer)
        if need_x:
            self._scatter = scatter = Scatter(call, saved.shape[1], saved.shape[2], saved)
            scatter_input_gradient(scatter, grads, None, weights)
        x_full = saved if gather is None else gather.complete()
        dws = [WeightGradient(grad, [x_full]).compute() for grad in grads] if need_w and not defer else []
        if gather is not None:
            gather.release()
        return dws, x_full if defer else None

    def finish_backward(self) -> Tensor:
        """This rank's rows of dx."""
        scatter, self._scatter = self._scatter, None
        assert scatter is not None
        return scatter.finish()


class FusedGatherParts(GatherParts):
    """The same, with kernels that wait for rows and announce them."""

    def begin(self, x: Tensor) -> None:
        from fusedcomm.ops import fused

        self._gather = fused.Gather(fused.FusedCall.of(_noted(self.call, x.device)), x)

    def finish(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        from fusedcomm.ops import fused

        gather, self._gather = self._gather, None
        assert isinstance(gather, fused.Gather), "an op is finished once"
        keep = self.save == "gathered"
        x_full, *results = fused.multiply_gathered(gather, x, weights, biases, None, keep=keep)
        return results, x_full if keep else x

    def begin_backward(
        self, grads: Sequence[Tensor], saved: Tensor, weights: Sequence[Tensor], *, need_x: bool, need_w: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        from fusedcomm.ops import fused

        self._scatter, dws, x_full = fused.gather_matmul_backward(
            fused.FusedCall.of(_noted(self.call, saved.device, " backward")),
            grads,
            None,
            saved,
            weights,
            gathered=self.save == "gathered",
            need_x=need_x,
            need_w=need_w,
            defer=self.defer_wgrad is not None,
        )
        return dws, x_full


@dataclass
class ScatterParts:
    """Those of a matmul-reduce-scatter, in chunks."""

    call: Call
    input_activation: Activation | None
    defer_wgrad: DeferWgrad | None
    _scatter: Scatter | fused.Scatter | None = None
    _gather: Gather | fused.Gather | None = None

    def begin(self, xs: Sequence[Tensor], w: Tensor) -> None:
        """Multiply, and let the partial sums go."""
        call = _noted(self.call, w.device)
        self._scatter = scatter = Scatter(call, xs[0].shape[1], w.shape[0], xs[0])
        scatter_products(scatter, xs, w, self.input_activation)

    def finish(self, bias: Tensor | None) -> Tensor:
        """This rank's rows of the sum."""
        scatter, self._scatter = self._scatter, None
        assert scatter is not None, "an op is finished once"
        return scatter.finish(bias)

    def begin_backward(self, grad: Tensor) -> None:
        """Let the rows of dy travel."""
        call = _noted(self.call, grad.device, " backward")
        self._gather = Gather(call, grad.contiguous(), keep=self.defer_wgrad is not None)

    def finish_backward(
        self, xs: Sequence[Tensor], w: Tensor, *, need_x: bool, need_w: bool
    ) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """`([dx, ...], dw, None)`, each if it is needed; with `defer_wgrad` `([dx, ...], None, dy_full)`."""
        gather, self._gather = self._gather, None
        assert isinstance(gather, Gather)
        defer = self.defer_wgrad is not None
        need_w = need_w and not defer
        dxs, dw = multiply_gathered_gradient(gather, xs, w, self.input_activation, need_x=need_x, need_w=need_w)
        return dxs, dw, gather.full if defer else None


class FusedScatterParts(ScatterParts):
    """The same, with kernels that announce rows and wait for them."""

    def begin(self, xs: Sequence[Tensor], w: Tensor) -> None:
        from fusedcomm.ops import fused

        call = fused.FusedCall.of(_noted(self.call, w.device))
        self._scatter = fused.multiply_scattered(call, activate(self.input_activation, xs), w)

    def begin_backward(self, grad: Tensor) -> None:
        from fusedcomm.ops import fused

        self._gather = fused.Gather(fused.FusedCall.of(_noted(self.call, grad.device, " backward")), grad)

    def finish_backward(
        self, xs: Sequence[Tensor], w: Tensor, *, need_x: bool, need_w: bool
    ) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        from fusedcomm.ops import fused

        gather, self._gather = self._gather, None
        assert isinstance(gather, fused.Gather)
        defer = self.defer_wgrad is not None
        return fused.multiply_gathered_gradient(
            gather, xs, w, self.input_activation, need_x=need_x, need_w=need_w and not defer, keep=defer
        )
