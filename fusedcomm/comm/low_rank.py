"""Sums of matrices by their products with a few vectors: PowerSGD."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedcomm.comm.collective import Collective, Pending
from fusedcomm.comm.compress import Place
from fusedcomm.comm.stages import Job, Stages


@dataclass(frozen=True)
class _Block:
    """Whole rows of one parameter's matrix inside a piece: elements `start : start + rows * columns` of the piece."""

    name: str
    first_row: int
    start: int
    rows: int
    columns: int

    @property
    def key(self) -> str:
        return f"{self.name}[{self.first_row}:{self.first_row + self.rows}]"

    def shares_rows_with(self, key: str) -> bool:
        name, _, rows = key.removesuffix("]").rpartition("[")
        first, last = map(int, rows.split(":"))
        return name == self.name and first < self.first_row + self.rows and self.first_row < last

    def of(self, piece: Tensor) -> Tensor:
        return piece[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


class LowRank:
    """`Collective` that sums matrices approximately, by their projection on `rank` directions.

    For a matrix M_i [n, m] on rank i, with Q [m, r] from the step before: P = sum of M_i Q travels and is made
    orthonormal; Q = sum of M_i^T P travels; the sum is taken to be P Q^T. So (n + m) r numbers travel in place of n m;
    parameters with one dimension, and matrices that would not get smaller, travel whole. What a rank's own part of the
    result, P (M_i^T P)^T, misses of M_i goes to the residual. A piece that cuts a matrix treats each part as a matrix.

    Accuracy: the part of a gradient outside of the r strongest directions is late by some steps, not lost. The start of
    Q is drawn from the parameter's name; afterwards it follows the gradients (one step of power iteration a call), and
    belongs to the state of training as the residual does.

    Args:
        inner: sums what travels, exactly, so that all ranks compute the same.
        places, residual: of all gradients.

    Source: Vogels, Karimireddy and Jaggi 2019, "PowerSGD" (arXiv 1905.13727).
    """

    def __init__(self, inner: Collective, *, rank: int, places: Sequence[Place], residual: Tensor) -> None:
        self._inner, self._rank = inner, rank
        self._places, self._residual = places, residual
        self._directions: dict[str, Tensor] = {}
        # One thread for all steps: those of two pieces would share `inner`, in an order that nobody has agreed on.
        self._stages = Stages(1, "fusedcomm-low-rank")

    def start(self, flat: Tensor, offset: int) -> Pending:
        """Begin to replace `flat` by its approximate sum."""
        jobs = [self._sum(flat, offset)] if flat.numel() else []
        return self._stages.start(jobs, flat.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Q of every block as it was cut last, by the parameter's name and its rows; the same on all ranks."""
        return dict(self._directions)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with these directions."""
        self._directions = {key: directions.clone() for key, directions in state.items()}

    @torch.no_grad()
    def _sum(self, flat: Tensor, offset: int) -> Job:
        error = self._residual[offset : offset + flat.numel()]
        flat += error
        error.zero_()
        blocks = self._blocks(offset, flat.numel())
        keeps = torch.ones(flat.numel(), dtype=torch.bool, device=flat.device)
        for block in blocks:
            block.of(keeps).fill_(False)
        rest = flat[keeps]
        products = [block.of(flat) @ self._directions_of(block, flat) for block in blocks]
        rest, *products = self._summed([rest, *products])
        bases = [torch.linalg.qr(product).Q for product in products]
        own = [block.of(flat).t() @ basis for block, basis in zip(blocks, bases)]
        for block, basis, directions in zip(blocks, bases, own):
            block.of(error).copy_(block.of(flat) - basis @ directions.t())
        directions = self._summed([tensor.clone() for tensor in own])
        flat[keeps] = rest
        for block, basis, summed in zip(blocks, bases, directions):
            torch.mm(basis, summed.t(), out=block.of(flat))
            self._directions[block.key] = summed
        # A generator, whose only step this is.
        yield from ()

    def _summed(self, tensors: list[Tensor]) -> list[Tensor]:
        """Their exact sums over the ranks, in one transfer."""
        if not tensors:
            # A piece without matrices, of which all ranks know.
            return []
        packed = torch.cat([tensor.flatten() for tensor in tensors])
        self._inner.start(packed, 0).wait()
        pieces = packed.split([tensor.numel() for tensor in tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors)]

    def _blocks(self, offset: int, length: int) -> list[_Block]:
        found = []
        for place in self._places:
            if len(place.shape) < 2:
                continue
            columns = math.prod(place.shape[1:])
            first = max(0, -(-(offset - place.start) // columns))
            last = min(place.shape[0], (offset + length - place.start) // columns)
            rows = last - first
            if rows > 0 and self._rank * (rows + columns) < rows * columns:
                start = place.start + first * columns - offset
                found.append(_Block(place.name, first, start, rows, columns))
        return found

    def _directions_of(self, block: _Block, like: Tensor) -> Tensor:
        directions = self._directions.get(block.key)
        if directions is None:
            # Pieces are cut anew, and those of the old cut do not come again.
            for key in list(filter(block.shares_rows_with, self._directions)):
                del self._directions[key]
            # Drawn on the CPU, where a seed means the same everywhere.
            generator = torch.Generator().manual_seed(zlib.crc32(block.key.encode()))
            directions = torch.randn(block.columns, self._rank, generator=generator).to(like.device)
        return directions
