"""One op at one shape on one GPU: this rank computes, its peers are imitated by copies within the GPU.

Methods without a link: `cublas` and `roof` (our kernel) are the GEMM alone, `hook` is the op's kernel with all flags
up, or raising them, on the whole GPU; `compute` is what is left of `fused` if nothing travels, on the SMs that the
copies leave, and `sum` that part of it which adds up the partial sums, after all transfers. With a link: `transfer`
moves what `serial` moves, alone; `serial`, `chunked` and `fused` are the methods of the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fusedcomm.bench.gpu_device import Device, Mark
from fusedcomm.bench.gpu_link import TIMEOUT_US, ImitatedLink
from fusedcomm.bench.gpu_shapes import Shape
from fusedcomm.comm.ring import Chunk, all_gather_steps, chunk_bounds, reduce_scatter_steps
from fusedcomm.kernels.all_gather_matmul import all_gather_matmul
from fusedcomm.kernels.await_rows import await_rows
from fusedcomm.kernels.flags import Chunks, Timeout, read_status
from fusedcomm.kernels.gemm import gemm
from fusedcomm.kernels.grid import Grid
from fusedcomm.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.kernels.reduce import reduce
from fusedcomm.tune import cost

ALONE = ("cublas", "roof", "hook", "compute")
# Parts of other methods, which leave no result of their own.
PARTS = ("transfer", "sum")
LINKED = ("transfer", "serial", "chunked", "fused")
# The calls of a case cross the number at which epochs wrap around.
_FIRST_EPOCH = 2**31 - 2

Run = Callable[[], object]
LinkedRun = Callable[[ImitatedLink], object]


@dataclass(frozen=True)
class Plan:
    """How the kernels of a case run: on the whole GPU, on the SMs that copies leave, and in how many chunks a shard."""

    whole: Grid
    left: Grid
    pieces: int


class Case(Protocol):
    """An op on one set of buffers."""

    # Of this rank's link in one direction.
    wire_bytes: int
    # The buffers together.
    num_bytes: int

    def alone(self) -> Mapping[str, Run]:
        """The methods without a link, by name."""
        ...

    def linked(self) -> Mapping[str, LinkedRun]:
        """Those with one."""
        ...

    def poison(self) -> None:
        """Fill everything that a method writes with NaN."""
        ...

    def results(self, method: str) -> dict[str, Tensor]:
        """What the method wrote."""
        ...

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What it must write, by plain torch in `dtype`."""
        ...


class Signals:
    """Flags, epoch and records of one case's calls, shared by all its sets of buffers."""

    def __init__(self, device: Device, shape: Shape, pieces: int) -> None:
        bounds = chunk_bounds(shape.sizes, pieces)
        self.rank, self.world, self.pieces = shape.world // 2, shape.world, pieces
        self.starts = torch.tensor(bounds, dtype=torch.int32, device=device.torch_device)
        self.bounds = bounds
        epoch = torch.full((1,), _FIRST_EPOCH, dtype=torch.int32, device=device.torch_device)
        self.chunks = Chunks(self.rank, self.world, self.starts, epoch.repeat(len(bounds) - 1), epoch)
        # All flags of these are up for ever.
        self.preset = Chunks(self.rank, self.world, self.starts, self.chunks.flags.clone(), epoch.clone())
        self.counters = torch.zeros_like(self.chunks.flags)
        self.status = self.starts.new_zeros(4)

    @property
    def own(self) -> slice:
        return slice(self.rank * self.pieces, (self.rank + 1) * self.pieces)

    @property
    def own_rows(self) -> slice:
        return slice(self.bounds[self.own.start], self.bounds[self.own.stop])

    def peers_chunks(self) -> Iterator[tuple[int, slice]]:
        """Number and rows of every peer's chunks: those of rank+1, rank+2, ..., as they travel."""
        for distance in range(1, self.world):
            owner = (self.rank + distance) % self.world
            for chunk in range(owner * self.pieces, (owner + 1) * self.pieces):
                yield chunk, slice(self.bounds[chunk], self.bounds[chunk + 1])

    def single(self, chunk: int, rows: slice) -> Chunks:
        """That chunk alone, to wait for."""
        starts = self.starts.new_tensor([0, rows.stop - rows.start])
        return Chunks(0, 1, starts, self.chunks.flags[chunk : chunk + 1], self.chunks.epoch)

    def timeout(self) -> Timeout | None:
        """The first wait that was in vain; waits for the device."""
        return read_status(self.status)


def make_case(device: Device, shape: Shape, plan: Plan, signals: Signals, dtype: torch.dtype) -> Case:
    """The case of the shape's op on fresh random buffers."""
    kind = GatherCase if shape.op == "all_gather_matmul" else ScatterCase
    return kind(device, shape, plan, signals, dtype)


def _operands(device: Device, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(shape.m, shape.k, device=device.torch_device)
    w = torch.randn(shape.n, shape.k, device=device.torch_device) * shape.k**-0.5
    return x.to(dtype), w.to(dtype)


def _num_chunks(shape: Shape) -> int:
    """As the op's `chunked` cuts."""
    return cost.chunked("", world=shape.world, rows=shape.m).num_chunks


class GatherCase:
    """All-gather-matmul: `x` is what everybody has, `x_full` what has arrived."""

    def __init__(self, device: Device, shape: Shape, plan: Plan, signals: Signals, dtype: torch.dtype) -> None:
        self._device, self._shape, self._plan, self._signals = device, shape, plan, signals
        self._x, self._w = _operands(device, shape, dtype)
        self._x_full = torch.zeros_like(self._x)
        self._y = self._x.new_empty(shape.m, shape.n)
        self._own = signals.own_rows
        self.wire_bytes = self._x.nbytes - self._x[self._own].nbytes
        self.num_bytes = sum(tensor.nbytes for tensor in (self._x, self._x_full, self._w, self._y))

    def alone(self) -> Mapping[str, Run]:
        plan = self._plan
        return {
            "cublas": lambda: torch.mm(self._x, self._w.t(), out=self._y),
            "roof": lambda: gemm(self._x, self._w, self._y, **plan.whole._asdict()),
            "hook": lambda: self._kernel(self._x, self._signals.preset, plan.whole),
            "compute": lambda: self._kernel(self._x, self._signals.preset, plan.left),
        }

    def linked(self) -> Mapping[str, LinkedRun]:
        return {
            "transfer": self._transfer,
            "serial": self._serial,
            "chunked": self._chunked,
            "fused": self._fused,
        }

    def poison(self) -> None:
        for tensor in (self._x_full, self._y):
            tensor.fill_(float("nan"))

    def results(self, method: str) -> dict[str, Tensor]:
        return {"y": self._y}

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"y": self._x.to(dtype) @ self._w.to(dtype).t()}

    def _kernel(self, x_full: Tensor, chunks: Chunks, grid: Grid) -> None:
        all_gather_matmul(
            x_full,
            self._w,
            self._y,
            chunks=chunks,
            status=self._signals.status,
            timeout_us=TIMEOUT_US,
            **grid._asdict(),
        )

    def _steps(self, num_chunks: int) -> list[Chunk]:
        steps = all_gather_steps(self._signals.rank, self._shape.sizes, num_chunks)
        return [step.recv for step in steps if step.recv is not None]

    def _receive(self, rows: slice, link: ImitatedLink) -> None:
        link.copy(self._x[rows], self._x_full[rows])

    def _transfer(self, link: ImitatedLink) -> None:
        for chunk in self._steps(1):
            self._receive(slice(chunk.start, chunk.stop), link)

    def _serial(self, link: ImitatedLink) -> None:
        self._x_full[self._own] = self._x[self._own]
        self._transfer(link)
        torch.mm(self._x_full, self._w.t(), out=self._y)

    def _chunked(self, link: ImitatedLink) -> None:
        arrived: list[tuple[slice, Mark]] = []
        with self._device.beside(self._device.mark()):
            for chunk in self._steps(_num_chunks(self._shape)):
                rows = slice(chunk.start, chunk.stop)
                self._receive(rows, link)
                arrived.append((rows, self._device.mark()))
        torch.mm(self._x[self._own], self._w.t(), out=self._y[self._own])
        for rows, mark in arrived:
            self._device.wait(mark)
            torch.mm(self._x_full[rows], self._w.t(), out=self._y[rows])

    def _fused(self, link: ImitatedLink) -> None:
        chunks = self._signals.chunks
        chunks.epoch.add_(1)
        begin = self._device.mark()
        self._x_full[self._own] = self._x[self._own]
        chunks.flags[self._signals.own] = chunks.epoch
        # Peers do not wait for our own copy.
        with self._device.beside(begin):
            for chunk, rows in self._signals.peers_chunks():
                self._receive(rows, link)
                chunks.flags[chunk : chunk + 1].copy_(chunks.epoch)
            done = self._device.mark()
        self._kernel(self._x_full, chunks, self._plan.left)
        self._device.wait(done)


class ScatterCase:
    """Matmul-reduce-scatter: what would leave for a peer comes back as that peer's summand of the own rows."""

    def __init__(self, device: Device, shape: Shape, plan: Plan, signals: Signals, dtype: torch.dtype) -> None:
        self._device, self._shape, self._plan, self._signals = device, shape, plan, signals
        self._x, self._w = _operands(device, shape, dtype)
        self._y_partial = self._x.new_empty(shape.m, shape.n)
        self._own = signals.own_rows
        self._y = torch.empty_like(self._y_partial[self._own])
        # By distance of the peer.
        self._summands = self._y.new_zeros(shape.world, *self._y.shape)
        self._waits = {chunk: signals.single(chunk, rows) for chunk, rows in signals.peers_chunks()}
        self.wire_bytes = self._y_partial.nbytes - self._y.nbytes
        tensors = (self._x, self._w, self._y_partial, self._summands, self._y)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)

    def alone(self) -> Mapping[str, Run]:
        plan = self._plan
        return {
            "cublas": lambda: torch.mm(self._x, self._w.t(), out=self._y_partial),
            "roof": lambda: gemm(self._x, self._w, self._y_partial, **plan.whole._asdict()),
            "hook": lambda: self._kernel(self._signals.preset, plan.whole),
            "compute": self._compute,
            "sum": self._sum,
        }

    def linked(self) -> Mapping[str, LinkedRun]:
        return {
            "transfer": self._transfer,
            "serial": self._serial,
            "chunked": self._chunked,
            "fused": self._fused,
        }

    def poison(self) -> None:
        for tensor in (self._y_partial, self._summands, self._y):
            tensor.fill_(float("nan"))

    def results(self, method: str) -> dict[str, Tensor]:
        # What is left without a link has no peers' summands to add.
        return {"y_partial": self._y_partial} if method in ALONE else {"y": self._y}

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        y_partial = self._x.to(dtype) @ self._w.to(dtype).t()
        wide = torch.promote_types(dtype, torch.float32)
        y = y_partial.view(self._shape.world, *self._y.shape).to(wide).sum(0)
        return {"y_partial": y_partial, "y": y.to(dtype)}

    def _kernel(self, chunks: Chunks, grid: Grid) -> None:
        matmul_reduce_scatter(
            self._x,
            self._w,
            self._y_partial,
            chunks=chunks,
            counters=self._signals.counters,
            **grid._asdict(),
        )

    def _send(self, rows: slice, link: ImitatedLink) -> None:
        size = len(self._y)
        owner, begin = rows.start // size, rows.start % size
        place = self._summands[(owner - self._signals.rank) % self._shape.world]
        link.copy(self._y_partial[rows], place[begin : begin + rows.stop - rows.start])

    def _sum(self) -> None:
        self._summands[0] = self._y_partial[self._own]
        reduce(self._summands, self._y)

    def _compute(self) -> None:
        self._kernel(self._signals.preset, self._plan.left)
        self._sum()

    def _steps(self, num_chunks: int) -> Sequence[slice]:
        steps = reduce_scatter_steps(self._signals.rank, self._shape.sizes, num_chunks)
        return [slice(step.send.start, step.send.stop) for step in steps if step.send is not None]

    def _transfer(self, link: ImitatedLink) -> None:
        for rows in self._steps(1):
            self._send(rows, link)

    def _serial(self, link: ImitatedLink) -> None:
        torch.mm(self._x, self._w.t(), out=self._y_partial)
        self._transfer(link)
        self._sum()

    def _chunked(self, link: ImitatedLink) -> None:
        done: Mark = None
        for rows in self._steps(_num_chunks(self._shape)):
            torch.mm(self._x[rows], self._w.t(), out=self._y_partial[rows])
            with self._device.beside(self._device.mark()):
                self._send(rows, link)
                done = self._device.mark()
        torch.mm(self._x[self._own], self._w.t(), out=self._y_partial[self._own])
        self._device.wait(done)
        self._sum()

    def _fused(self, link: ImitatedLink) -> None:
        chunks = self._signals.chunks
        chunks.epoch.add_(1)
        begin = self._device.mark()
        self._kernel(chunks, self._plan.left)
        with self._device.beside(begin):
            for chunk, rows in self._signals.peers_chunks():
                await_rows(
                    self._waits[chunk],
                    rows.stop - rows.start,
                    status=self._signals.status,
                    timeout_us=TIMEOUT_US,
                )
                self._send(rows, link)
            done = self._device.mark()
        self._device.wait(done)
        self._sum()
