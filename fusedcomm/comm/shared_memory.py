"""Buffers that all ranks of one machine map: files in /dev/shm, which are gone before anybody uses them."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fusedcomm.comm.channel import Channel

_FOLDER = Path("/dev/shm")
_PAGE_BYTES = 4096
# How many buffers the calls of one kind use in turn.
NUM_BUFFERS = 2
# Flags of one buffer, and so the most chunks of all ranks together.
MAX_CHUNKS = 4096


@dataclass(frozen=True)
class Buffer:
    """One of a rank's buffers, as this process maps it.

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


def map_everywhere(channel: Channel, op: str, num_bytes: int, epoch: int) -> list[list[Buffer]]:
    """Buffers of `num_bytes` on every rank, by rank, as all ranks map them; every rank of the group calls it.

    Names are known to all before there are files, and files go as soon as all have mapped them, or one has failed: so
    nothing stays behind, whichever rank dies.
    """
    mine = f"fusedcomm-{uuid.uuid4().hex}"
    names = [mine for _ in range(channel.world)]
    for peer, name in channel.share(op, mine).items():
        names[peer] = name
    try:
        made = _attempt(lambda: _create(_FOLDER / mine, num_bytes, channel.world, epoch))
        _check_all(channel, op, made)
        buffers: list[list[Buffer]] = []
        mapped = _attempt(lambda: buffers.extend(_map(_FOLDER / name, num_bytes, channel.world) for name in names))
        _check_all(channel, op, mapped)
    finally:
        for name in names:
            (_FOLDER / name).unlink(missing_ok=True)
    return buffers


def _attempt(step: Callable[[], object]) -> str:
    """What went wrong, or nothing."""
    try:
        step()
    except OSError as error:
        return str(error)
    return ""


def _check_all(channel: Channel, op: str, outcome: str) -> None:
    """ValueError on every rank if the step went wrong on one."""
    outcomes = {channel.rank: outcome, **channel.share(op, outcome)}
    for rank, failure in sorted(outcomes.items()):
        if failure:
            raise ValueError(
                f"{op}: rank {rank} cannot use the group's shared memory: {failure}; the ranks must run on one machine "
                f"and see one {_FOLDER} with room for their buffers: give it more, or use method='chunked'"
            )


def _part_bytes(num_bytes: int, world: int) -> list[int]:
    """A buffer's flags, done words and rows, each on pages of its own."""
    return [-(-part // _PAGE_BYTES) * _PAGE_BYTES for part in (MAX_CHUNKS * 4, world * 4, num_bytes)]


def _create(path: Path, num_bytes: int, world: int, epoch: int) -> None:
    whole = NUM_BUFFERS * sum(_part_bytes(num_bytes, world))
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Now, and not by a signal when it is written to, must a lack of memory show.
        os.posix_fallocate(file, 0, whole)
    finally:
        os.close(file)
    for buffer in _map(path, num_bytes, world):
        buffer.flags.fill_(epoch)
        buffer.done.fill_(epoch)


def _map(path: Path, num_bytes: int, world: int) -> list[Buffer]:
    parts = _part_bytes(num_bytes, world)
    file = os.open(path, os.O_RDWR)
    try:
        whole = torch.frombuffer(mmap.mmap(file, NUM_BUFFERS * sum(parts)), dtype=torch.uint8)
    finally:
        os.close(file)
    buffers = []
    for piece in whole.split(sum(parts)):
        flags, done, data = piece.split(parts)
        buffers.append(Buffer(data, flags.view(torch.int32), done.view(torch.int32)[:world]))
    return buffers
