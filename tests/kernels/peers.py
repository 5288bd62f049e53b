"""What the tests of the kernels share: small tiles, chunks of uneven shards, and processes that play the peers."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fusedcomm.comm.ring import cut
from fusedcomm.kernels._triton import tl, triton
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.flags import Chunks, publish, wait

CONFIG = GemmConfig(tile_m=32, tile_n=32, tile_k=32, group_m=2)
# Three calls on the same buffers, whose numbers cross 2^31 and so change their sign.
WRAPPING_EPOCHS = (2**31 - 1, -(2**31), -(2**31) + 1)
# Many seconds: a poll takes tens of microseconds in the interpreter.
MANY_POLLS = 200_000

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fusedcomm.kernels.flags"])


def make_chunks(rank: int, sizes: Sequence[int], pieces: int = 1, starts_dtype: torch.dtype = torch.int64) -> Chunks:
    """Every rank's rows in `pieces` chunks, some of them empty where rows are few; in shared memory."""
    lengths = [
        length
        for shard in (cut(sizes, owner, [1] * pieces) for owner in range(len(sizes)))
        for length in [*(chunk.rows for chunk in shard), *[0] * (pieces - len(shard))]
    ]
    return Chunks(
        rank=rank,
        world=len(sizes),
        starts=torch.tensor([0, *accumulate(lengths)], dtype=starts_dtype).share_memory_(),
        flags=torch.zeros(len(lengths), dtype=torch.int32).share_memory_(),
        epoch=torch.zeros(1, dtype=torch.int32).share_memory_(),
    )


def rows_of(chunks: Chunks, chunk: int) -> slice:
    return slice(int(chunks.starts[chunk]), int(chunks.starts[chunk + 1]))


def chunks_with_rows(chunks: Chunks) -> list[int]:
    return chunks.starts.diff().nonzero().flatten().tolist()


def own_chunks(chunks: Chunks) -> range:
    pieces = chunks.num_chunks // chunks.world
    return range(chunks.rank * pieces, (chunks.rank + 1) * pieces)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype).share_memory_()


@contextmanager
def peer(function: Callable[..., None], *args: Any) -> Iterator[None]:
    """Runs `function(*args)` in another process meanwhile; what it raises fails the test."""
    process = _CONTEXT.Process(target=function, args=args, daemon=True)
    process.start()
    try:
        yield
        process.join(60)
        assert process.exitcode == 0, f"the peer ended with {process.exitcode}; its error is printed above"
    finally:
        process.kill()
        process.join()


@triton.jit
def publish_kernel(flag_ptr, epoch_ptr):
    flag_ptrs = flag_ptr + tl.arange(0, 1)
    publish(flag_ptrs, tl.load(epoch_ptr), tl.full((1,), True, tl.int1))


@triton.jit
def poll_kernel(flag_ptr, epoch_ptr, timeout_us, arrived_ptr):
    seen, needed = tl.full((1,), False, tl.int1), tl.full((1,), True, tl.int1)
    _, arrived = wait(flag_ptr + tl.arange(0, 1), tl.load(epoch_ptr), seen, needed, timeout_us, CLOCK=False)
    tl.store(arrived_ptr, arrived.to(tl.int32))


def has_arrived(chunks: Chunks, chunk: int, timeout_us: int = 1) -> bool:
    arrived = torch.empty(1, dtype=torch.int32)
    poll_kernel[(1,)](chunks.flags[chunk:], chunks.epoch, timeout_us, arrived)
    return bool(arrived)


def push_chunks(x: Tensor, x_full: Tensor, chunks: Chunks, arrivals: Sequence[tuple[int, float]]) -> None:
    """Plays the owners of all-gathered rows: after each delay copies a chunk and publishes its flag."""
    for chunk, delay_s in arrivals:
        time.sleep(delay_s)
        x_full[rows_of(chunks, chunk)] = x[rows_of(chunks, chunk)]
        publish_kernel[(1,)](chunks.flags[chunk:], chunks.epoch)


def fetch_chunks(y_partial: Tensor, received: Tensor, chunks: Chunks, order: Sequence[int], looks: Tensor) -> None:
    """Plays the copy engine of a reduce-scatter: copies each chunk as soon as its flag is up.

    Fails if a chunk is published before another that stands earlier in `order`. `looks` [2] counts how often it
    looked, and how often it found something to copy.
    """
    fetched = 0
    while fetched < len(order):
        # The last of the order first: when a later one is up, an earlier one at which we look now was up before.
        up = [has_arrived(chunks, chunk) for chunk in reversed(order[fetched:])][::-1]
        assert up == sorted(up, reverse=True), f"published out of order: {list(zip(order[fetched:], up))}"
        for chunk in order[fetched : fetched + sum(up)]:
            received[rows_of(chunks, chunk)] = y_partial[rows_of(chunks, chunk)]
        fetched += sum(up)
        looks += torch.tensor([1, any(up)])
