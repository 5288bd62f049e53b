"""The buffers of fused calls: what one holds, and how large it must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

# Flags of one buffer, and so the most chunks of all ranks together.
MAX_CHUNKS = 4096


@dataclass(frozen=True)
class Buffer:
    """One of a rank's buffers, as this process sees it.

    Attributes:
        data: bytes, which peers write rows into.
        flags: [MAX_CHUNKS] int32, the epoch of each chunk's rows.
        done: [world] int32, up to which epoch each peer has read its own such buffer.
    """

    data: Tensor
    flags: Tensor
    done: Tensor

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.data[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def gather_bytes(shard: Tensor, sizes: Sequence[int]) -> int:
    """What a buffer must hold of a gather: everybody's rows."""
    return sum(sizes) * shard.shape[1] * shard.element_size()


def scatter_bytes(like: Tensor, features: int, sizes: Sequence[int]) -> int:
    """What the largest buffer must hold of a scatter: from every rank the rows of one."""
    return len(sizes) * max(sizes) * features * like.element_size()


def check_chunks(op: str, world: int, pieces: int) -> None:
    """ValueError if a buffer has too few flags."""
    if world * pieces > MAX_CHUNKS:
        raise ValueError(f"{op}: {pieces} chunks on each of {world} ranks; at most {MAX_CHUNKS} in all")


def split_buffer(whole: Tensor, world: int, num_bytes: int, alignment: int) -> Buffer:
    """A buffer in `whole` bytes: its flags, done words and rows, each aligned."""
    flags, done, data = whole.split(part_bytes(world, num_bytes, alignment))
    return Buffer(data, flags.view(torch.int32), done.view(torch.int32)[:world])


def part_bytes(world: int, num_bytes: int, alignment: int) -> list[int]:
    """How many bytes those take."""
    return [-(-part // alignment) * alignment for part in (MAX_CHUNKS * 4, world * 4, num_bytes)]


def rounded_up(num_bytes: int) -> int:
    """The size that a lane is made in, so that it seldom has to be made anew."""
    return max(1 << 16, 1 << max(0, num_bytes - 1).bit_length())
