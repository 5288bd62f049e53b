"""Buffers that all ranks of one machine map: files in /dev/shm, which are gone before anybody uses them."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from fusedcomm.comm.buffers import Buffer, part_bytes, split_buffer
from fusedcomm.comm.channel import Channel

_FOLDER = Path("/dev/shm")
_PAGE_BYTES = 4096


def map_everywhere(channel: Channel, op: str, num_bytes: int, epoch: int) -> list[Buffer]:
    """A buffer of `num_bytes` on every rank, by rank, as all ranks map them; every rank of the group calls it.

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
        buffers: list[Buffer] = []
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


def _create(path: Path, num_bytes: int, world: int, epoch: int) -> None:
    size = sum(part_bytes(world, num_bytes, _PAGE_BYTES))
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Now, and not by a signal when it is written to, must a lack of memory show.
        os.posix_fallocate(file, 0, size)
    finally:
        os.close(file)
    buffer = _map(path, num_bytes, world)
    buffer.flags.fill_(epoch)
    buffer.done.fill_(epoch)


def _map(path: Path, num_bytes: int, world: int) -> Buffer:
    size = sum(part_bytes(world, num_bytes, _PAGE_BYTES))
    file = os.open(path, os.O_RDWR)
    try:
        whole = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)
    return split_buffer(whole, world, num_bytes, _PAGE_BYTES)
