"""The ops as one persistent kernel each, whose tiles wait for rows that arrive or announce rows that may leave.

The counterpart of `ops.chunked`. It knows a transport and no process group. Tensors are `[rows, lead, features]`; every
product and every sum runs on our kernels, and a chunk is ready when the flag says so that its transport raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusedcomm.comm.record import span, wait_span
from fusedcomm.comm.transport import FlagTransport
from fusedcomm.kernels.all_gather_matmul import all_gather_matmul
from fusedcomm.kernels.await_rows import await_rows
from fusedcomm.kernels.checks import MAX_WEIGHTS
from fusedcomm.kernels.epilogue import NOTHING, Epilogue
from fusedcomm.kernels.gemm import gemm
from fusedcomm.kernels.grid import Grid, grid_of
from fusedcomm.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.kernels.reduce import reduce
from fusedcomm.ops.activation import Activation, activate, differentiate
from fusedcomm.ops.chunked import Call, flat
from fusedcomm.ops.wgrad import LentRows, Sink, WeightGradient

# The kernels' name of each activation of the ops.
_ACTIVATIONS = {None: None, "gelu": "gelu_tanh", "silu": "silu", "swiglu": "swiglu"}


@dataclass(frozen=True)
class FusedCall:
    """One call: what every rank must agree on, who carries it, and into how many chunks each shard is cut."""

    op: str
    transport: FlagTransport
    # Rows per rank.
    sizes: tuple[int, ...]
    pieces: int

    @classmethod
    def of(cls, call: Call) -> FusedCall:
        assert call.transport is not None
        return cls(call.op, call.transport, call.sizes, call.choice.num_chunks)

    def signature(self, kind: str, lead: int, features: int, dtype: torch.dtype) -> str:
        """What every rank must agree on, in words."""
        return (
            f"{self.op}: {kind} sizes={list(self.sizes)} of [rows, {lead}, {features}] "
            f"{str(dtype).removeprefix('torch.')} fused x{self.pieces}"
        )

    def matrix_sizes(self, lead: int) -> list[int]:
        """Rows per rank of the tensors as matrices."""
        return [size * lead for size in self.sizes]

    def grid(self, x: Tensor, weights: Sequence[Tensor]) -> Grid:
        """For `x @ w.T` of each weight, beside what the transport runs."""
        columns = tuple(len(w) for w in weights)
        return grid_of(x.device, x.dtype, len(x), columns, self.transport.communication_sms)


class Gather:
    """Everybody's rows, on their way from now on into a buffer of the transport's."""

    def __init__(self, call: FusedCall, shard: Tensor) -> None:
        self.call = call
        _, lead, features = shard.shape
        self._shape = (sum(call.sizes), lead, features)
        self._flight = call.transport.gather(
            call.op,
            call.signature("gather", lead, features, shard.dtype),
            flat(shard.contiguous()),
            call.matrix_sizes(lead),
            call.pieces,
        )
        # Whether something waits for all rows: a kernel of ours, or the stream.
        self._is_awaited = self._is_complete = False
        self._kept: Tensor | None = None

    def multiply(self, weights: Sequence[Tensor], outputs: Sequence[Tensor], epilogue: Epilogue = NOTHING) -> None:
        """`y = epilogue(x @ w.T)` in one launch, whose tiles wait for their rows: for up to three weights."""
        flight, x = self._flight, self._flight.x_full
        with span("compute", self.call.op):
            all_gather_matmul(
                x,
                weights,
                outputs,
                chunks=flight.chunks,
                status=flight.status,
                timeout_us=flight.timeout_us,
                epilogue=epilogue,
                **self.call.grid(x, weights)._asdict(),
            )
        # Where there is no tile, none waits.
        self._is_awaited |= any(y.numel() for y in outputs)

    @property
    def full(self) -> Tensor:
        """All rows, `[rows, lead, features]`, once they are there (on the current stream); gone after `finish`."""
        if not self._is_complete:
            self._await_all()
        return self._flight.x_full.view(self._shape)

    def _await_all(self) -> None:
        flight = self._flight
        with wait_span(f"{self.call.op} gather", flight.x_full.device):
            await_rows(flight.chunks, len(flight.x_full), status=flight.status, timeout_us=flight.timeout_us)
        self._is_awaited = self._is_complete = True

    def kept(self) -> Tensor:
        """All rows in memory of their own."""
        if self._kept is None:
            self._kept = self.full.clone()
        return self._kept

    def finish(self) -> None:
        """Everything that reads the rows is launched. Raises what `Flight.finish` does."""
        if not self._is_awaited:
            # Rows that nobody reads come in all the same, and until then their buffer is not free.
            self._await_all()
        self._flight.finish()


class Scatter:
    """Partial sums of everybody's rows, on their way to the owners while they are computed."""

    def __init__(self, call: FusedCall, lead: int, features: int, like: Tensor) -> None:
        self.call = call
        self._own_shape = (call.sizes[call.transport.rank], lead, features)
        # A kernel announces no chunk without elements.
        sizes = call.matrix_sizes(lead if features else 0)
        self._flight = call.transport.scatter(
            call.op, call.signature("scatter", lead, features, like.dtype), like, features, sizes, call.pieces
        )

    def multiply(self, x: Tensor, w: Tensor, residual: Tensor | None = None) -> None:
        """The partial sums `x @ w.T + residual`: matrices, x with all rows; each chunk leaves once it is computed."""
        flight, grid = self._flight, self.call.grid(x, [w])

        def launch() -> None:
            matmul_reduce_scatter(
                x,
                w,
                flight.y_partial,
                chunks=flight.chunks,
                counters=flight.counters,
                residual=residual,
                **grid._asdict(),
            )

        with span("compute", self.call.op):
            # Empty where no chunk has elements, whatever the shape of x.
            flight.produce(launch if flight.y_partial.numel() else lambda: None)

    def finish(self, bias: Tensor | None = None) -> Tensor:
        """The sum of this rank's own rows, in the order of ranks, plus `bias`; raises what `Flight.finish` does."""
        flight = self._flight
        total = flight.summands.new_empty(self._own_shape)
        if total.numel():
            with wait_span(f"{self.call.op} from all", total.device):
                rows = len(flight.summands) * flight.summands.shape[1]
                await_rows(flight.arrivals, rows, status=flight.status, timeout_us=flight.timeout_us)
            with span("compute", f"{self.call.op} sum"):
                reduce(flight.summands, flat(total), bias=bias)
        flight.finish()
        return total


def gather_matmul(
    call: FusedCall,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: Activation | None,
    *,
    keep: bool,
) -> list[Tensor]:
    """`[x_full, y, ...]` from this rank's rows of x; `x_full` is empty unless it is to be kept."""
    return multiply_gathered(Gather(call, x), x, weights, biases, activation, keep=keep)


def multiply_gathered(
    gather: Gather,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: Activation | None,
    *,
    keep: bool,
) -> list[Tensor]:
    """The same from rows that are on their way, as many weights in a launch as the kernel takes."""
    rows = (sum(gather.call.sizes), x.shape[1])
    num_results = 1 if activation == "swiglu" else len(weights)
    results = [x.new_empty(*rows, w.shape[0]) for w in weights[:num_results]]
    for first in range(0, len(weights), MAX_WEIGHTS):
        part = slice(first, first + MAX_WEIGHTS)
        epilogue = Epilogue(_joined(biases[part]), _ACTIVATIONS[activation])
        gather.multiply(_alike(weights[part]), [flat(y) for y in results[part]], epilogue)
    x_full = gather.kept() if keep else x.new_empty(0)
    gather.finish()
    return [x_full, *results]


def _joined(biases: Sequence[Tensor]) -> Tensor | None:
    """Those of one launch."""
    if len(biases) > 1:
        return torch.cat(list(biases))
    return biases[0] if biases else None


def _alike(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """With equal strides, as one launch needs them."""
    if len({w.stride() for w in weights}) == 1:
        return weights
    return [w.clone(memory_format=torch.contiguous_format) for w in weights]


def gather_matmul_backward(
    call: FusedCall,
    grads: Sequence[Tensor],
    grad_full: Tensor | None,
    saved: Tensor,
    weights: Sequence[Tensor],
    *,
    regather: bool,
    need_x: bool,
    sink: Sink,
) -> Scatter | None:
    """dx on its way, if it is needed, with the weights' gradients gone to `sink`, behind which its partial sums travel.

    `saved` are our own rows of x, if it is to `regather` the others' behind the product for dx, or all of them.
    """
    gather = Gather(replace(call, op=f"{call.op} gather"), saved) if regather else None
    scatter = None
    if need_x:
        scatter = Scatter(call, saved.shape[1], saved.shape[2], saved)
        _scatter_input_gradient(scatter, call, grads, grad_full, weights)
    if sink.is_needed:
        sink([FusedWeightGradient(call, grad, gather or saved) for grad in grads])
    if gather is not None:
        gather.finish()
    return scatter


class FusedWeightGradient(WeightGradient):
    """`dy.T @ x` by our kernel, which adds it in fp32 to what a buffer holds: in one pass, and unrounded."""

    def __init__(
        self, call: FusedCall, dy: Tensor | LentRows, x: Tensor | LentRows, *, hides_transfer: bool = True
    ) -> None:
        super().__init__(dy, [x], hides_transfer=hides_transfer)
        self._call = call

    def compute(self) -> Tensor:
        dy, x = self._matrices()
        dw = x.new_empty(dy.shape[1], x.shape[1])
        self._multiply(dw, NOTHING)
        return dw

    def add_to(self, out: Tensor, *, overwrite: bool = False) -> None:
        # A tile's elements are read and written by one program.
        self._multiply(out, NOTHING if overwrite else Epilogue(residual=out))

    def kept(self) -> WeightGradient:
        dy, (x,) = self._kept_rows()
        return FusedWeightGradient(self._call, dy, x, hides_transfer=False)

    @torch.no_grad()
    def _multiply(self, dw: Tensor, epilogue: Epilogue) -> None:
        dy, x = (matrix.t() for matrix in self._matrices())
        with span("compute", f"{self._call.op} dw"):
            gemm(dy, x, dw, epilogue=epilogue, **self._call.grid(dy, [x])._asdict())


def _scatter_input_gradient(
    scatter: Scatter, call: FusedCall, grads: Sequence[Tensor], grad_full: Tensor | None, weights: Sequence[Tensor]
) -> None:
    """This rank's partial dx of all rows: all but the last product are added up in fp32 before the last is begun."""
    residual = None if grad_full is None else flat(grad_full)
    *first, (last_grad, last_w) = zip(grads, weights)
    total = None
    for grad, w in first:
        rows = flat(grad)
        if total is None:
            total = rows.new_empty(len(rows), w.shape[1], dtype=torch.float32)
        with span("compute", f"{call.op} dx"):
            gemm(rows, w.t(), total, epilogue=Epilogue(residual=residual), **call.grid(rows, [w.t()])._asdict())
        residual = total
    scatter.multiply(flat(last_grad), last_w.t(), residual)


def matmul_scatter(call: FusedCall, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """This rank's rows of the sum, from all rows of x `[rows, lead, K]` and this rank's share of K."""
    return multiply_scattered(call, x, w).finish(bias)


def multiply_scattered(call: FusedCall, x: Tensor, w: Tensor) -> Scatter:
    """The same still on its way."""
    scatter = Scatter(call, x.shape[1], w.shape[0], x)
    scatter.multiply(flat(x), w)
    return scatter


def multiply_gathered_gradient(
    gather: Gather,
    xs: Sequence[Tensor],
    w: Tensor,
    input_activation: Activation | None,
    *,
    need_x: bool,
    sink: Sink,
) -> list[Tensor]:
    """`[dx, ...]` from rows of dy that are on their way, chunk by chunk, none if it is not needed.

    The gradient of `w` goes to `sink` when that is launched.
    """
    dxs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs] if need_x else []
    if not need_x:
        inner = activate(input_activation, xs)
    elif input_activation is None:
        (inner,) = xs
        gather.multiply([w.t()], [flat(dxs[0])])
    else:
        inner_grad = torch.empty_like(dxs[0])
        gather.multiply([w.t()], [flat(inner_grad)])
        inner = differentiate(input_activation, xs, inner_grad, dxs)
    if sink.is_needed:
        sink([FusedWeightGradient(gather.call, gather, inner)])
    gather.finish()
    return dxs


def matmul_reduce(call: FusedCall, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of all rows, on every rank the same: scattered while it is computed, and gathered after that."""
    own = matmul_scatter(call, x, w, bias)
    gather = Gather(replace(call, op=f"{call.op} gather"), own)
    total = gather.kept()
    gather.finish()
    return total
