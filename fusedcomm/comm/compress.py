"""What travels in place of fp32 gradients, and the residual that makes up for what is lost.

Error feedback: what a rank's encoding misses is kept in its residual, and added to what it sums the next time. So
nothing is lost for good, only late, and lossy sums converge like exact ones (Karimireddy et al. 2019,
arXiv 1901.09847). In an all-reduce by owners (`comm.hierarchical`) there are two encodings, of each rank's summands and
of the owner's sum; what the latter misses stays in the owner's residual, since only the total over the ranks matters
(as the server's error of 1-bit Adam, Tang et al. 2021).

A gradient that is not finite stays so: scales of its block become NaN or infinite, and so does all that they scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Numbers that share a scale of int8: 4 bytes more per 256 make 3.94 times fewer than fp32's.
BLOCK = 256
_LARGEST = 127


class Codec(Protocol):
    """A smaller form of fp32 numbers. Deterministic, and of a size that depends on their number alone."""

    def num_bytes(self, length: int) -> int:
        """How many bytes stand for `length` numbers."""
        ...

    def encode(self, values: Tensor, wire: Tensor, error: Tensor | None) -> None:
        """Write what stands for `values` [n] into `wire` [num_bytes], and add what that misses to `error` [n]."""
        ...

    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Write the numbers that `wire` stands for into `values` [n]."""
        ...


class Bf16:
    """Half the bytes; each number keeps 8 bits of precision. Sums are in fp32."""

    def num_bytes(self, length: int) -> int:
        return 2 * length

    def encode(self, values: Tensor, wire: Tensor, error: Tensor | None) -> None:
        rounded = wire.view(torch.bfloat16)
        rounded.copy_(values)
        if error is not None:
            error.add_(values).sub_(rounded)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        values.copy_(wire.view(torch.bfloat16))


class Int8:
    """A quarter of the bytes: blocks of 256 numbers are rounded to 127ths of their largest.

    On the wire: the scales, fp32 [blocks], and then the numbers, int8 [n]. A number is off by at most 1/254 of its
    block's largest one.
    """

    def num_bytes(self, length: int) -> int:
        return 4 * -(-length // BLOCK) + length

    def encode(self, values: Tensor, wire: Tensor, error: Tensor | None) -> None:
        for part, quants, scales, rest in self._parts(values, wire, error):
            torch.linalg.vector_norm(part, math.inf, dim=1, out=scales)
            scales /= _LARGEST
            # A block of zeros has no scale to divide by, and among the smallest numbers of all one is rounded coarsely.
            divisors = torch.where(scales == 0, 1.0, scales)
            rounded = (part / divisors[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
            quants.copy_(rounded)
            if rest is not None:
                rest.add_(part).sub_(rounded.mul_(scales[:, None]))

    def decode(self, wire: Tensor, values: Tensor) -> None:
        for part, quants, scales, _ in self._parts(values, wire, None):
            torch.mul(quants, scales[:, None], out=part)

    def _parts(
        self, values: Tensor, wire: Tensor, error: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """Values, int8 and error as [blocks, numbers in each], and scales [blocks]: the whole blocks, then the rest."""
        length = values.numel()
        num_blocks = -(-length // BLOCK)
        scales, quants = wire[: 4 * num_blocks].view(torch.float32), wire[4 * num_blocks :].view(torch.int8)
        whole = length - length % BLOCK
        for start, stop, width in ((0, whole, BLOCK), (whole, length, length - whole)):
            if start < stop:
                cut = slice(start, stop)
                rest = None if error is None else error[cut].view(-1, width)
                own_scales = scales[start // BLOCK :][: (stop - start) // width]
                yield values[cut].view(-1, width), quants[cut].view(-1, width), own_scales, rest


class TopK:
    """The largest `fraction` of the numbers with their places, 8 bytes each; the others count as 0 and wait.

    Where sums are encoded, the owner chooses anew among what came in (gTop-k, Shi et al. 2019), so that a sum's bytes
    do not grow with the ranks. Without a residual it would not converge.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def num_bytes(self, length: int) -> int:
        return 8 * self._count(length)

    def encode(self, values: Tensor, wire: Tensor, error: Tensor | None) -> None:
        chosen, places = self._parts(wire)
        # NaN counts as the largest, and so is among the chosen.
        places.copy_(values.abs().topk(places.numel(), sorted=False).indices)
        torch.index_select(values, 0, places, out=chosen)
        if error is not None:
            error += values
            error.index_add_(0, places, chosen, alpha=-1)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        chosen, places = self._parts(wire)
        values.zero_().index_copy_(0, places.long(), chosen)

    def _count(self, length: int) -> int:
        return min(length, math.ceil(length * self._fraction))

    def _parts(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        half = wire.numel() // 2
        return wire[:half].view(torch.float32), wire[half:].view(torch.int32)


@dataclass(frozen=True)
class Place:
    """Where a parameter's gradient lies in the buffer of all gradients: elements `start : start + numel`."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a flat fp32 buffer of `num_elements`."""

    places: Sequence[Place]
    num_elements: int
    device: torch.device

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of such a buffer by name, each in its shape."""
        return {place.name: flat[place.start : place.stop].view(place.shape) for place in self.places}


def packed_layout(tensors: Mapping[str, Tensor], device: torch.device) -> Layout:
    """These tensors one behind the other."""
    places, start = [], 0
    for name, tensor in tensors.items():
        places.append(Place(name, start, tuple(tensor.shape)))
        start = places[-1].stop
    return Layout(places, start, device)


class Residual:
    """What encodings have missed so far on this rank, laid out as the gradients and known by parameter name."""

    def __init__(self, layout: Layout) -> None:
        self.whole = torch.zeros(layout.num_elements, dtype=torch.float32, device=layout.device)
        self._layout = layout

    def state_dict(self) -> dict[str, Tensor]:
        """Live views by parameter name, each of its parameter's shape."""
        return self._layout.views(self.whole)
