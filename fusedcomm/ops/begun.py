"""What an op that is begun and finished apart does at each of its four points: in chunks, or fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedcomm.comm.record import note_path
from fusedcomm.ops.activation import Activation, activate
from fusedcomm.ops.all_gather_matmul import Save, begin_backward, multiply_gathered
from fusedcomm.ops.chunked import Call, Gather, Scatter
from fusedcomm.ops.matmul_reduce_scatter import multiply_gathered_gradient, scatter_products
from fusedcomm.ops.wgrad import Sink

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
        self, grads: Sequence[Tensor], saved: Tensor, weights: Sequence[Tensor], *, need_x: bool, sink: Sink
    ) -> None:
        """Let partial sums of dx go, if it is needed, and the weights' gradients go to `sink`."""
        call = _noted(self.call, saved.device, " backward")
        regather = sink.is_needed and self.save == "shard"
        self._scatter = begin_backward(
            call, grads, None, saved.contiguous(), weights, regather=regather, need_x=need_x, sink=sink
        )

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
        self, grads: Sequence[Tensor], saved: Tensor, weights: Sequence[Tensor], *, need_x: bool, sink: Sink
    ) -> None:
        from fusedcomm.ops import fused

        call = fused.FusedCall.of(_noted(self.call, saved.device, " backward"))
        regather = sink.is_needed and self.save == "shard"
        self._scatter = fused.gather_matmul_backward(
            call, grads, None, saved, weights, regather=regather, need_x=need_x, sink=sink
        )


@dataclass
class ScatterParts:
    """Those of a matmul-reduce-scatter, in chunks."""

    call: Call
    input_activation: Activation | None
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
        self._gather = Gather(_noted(self.call, grad.device, " backward"), grad.contiguous(), keep=False)

    def finish_backward(self, xs: Sequence[Tensor], w: Tensor, *, need_x: bool, sink: Sink) -> list[Tensor]:
        """`[dx, ...]`, none if it is not needed; the gradient of `w` goes to `sink`."""
        gather, self._gather = self._gather, None
        assert isinstance(gather, Gather)
        return multiply_gathered_gradient(gather, xs, w, self.input_activation, need_x=need_x, sink=sink)


class FusedScatterParts(ScatterParts):
    """The same, with kernels that announce rows and wait for them."""

    def begin(self, xs: Sequence[Tensor], w: Tensor) -> None:
        from fusedcomm.ops import fused

        call = fused.FusedCall.of(_noted(self.call, w.device))
        self._scatter = fused.multiply_scattered(call, activate(self.input_activation, xs), w)

    def begin_backward(self, grad: Tensor) -> None:
        from fusedcomm.ops import fused

        self._gather = fused.Gather(fused.FusedCall.of(_noted(self.call, grad.device, " backward")), grad)

    def finish_backward(self, xs: Sequence[Tensor], w: Tensor, *, need_x: bool, sink: Sink) -> list[Tensor]:
        from fusedcomm.ops import fused

        gather, self._gather = self._gather, None
        assert isinstance(gather, fused.Gather)
        return fused.multiply_gathered_gradient(gather, xs, w, self.input_activation, need_x=need_x, sink=sink)
