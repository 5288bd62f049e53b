"""Flags between a kernel and whoever moves its chunks: wait for one, publish one. All memory order is here.

A flag is an int32 per chunk that holds the *epoch* (number of the call) of the data in the chunk. Epochs only
grow, modulo 2^32, so flags are never reset: a chunk is ready once its flag is not behind the epoch of this
call. A chunk without elements is never waited for and never published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fusedcomm.kernels._triton import INTERPRETED, tl, triton
from fusedcomm.kernels.checks import check_words
from fusedcomm.kernels.tile_order import chunks_touched

# Which operation waited in vain: the first word of a status record, where 0 stands for none.
OPS = (None, "all_gather_matmul", "await_rows")
ALL_GATHER_MATMUL = tl.constexpr(OPS.index("all_gather_matmul"))
AWAIT_ROWS = tl.constexpr(OPS.index("await_rows"))


@dataclass(frozen=True)
class Chunks:
    """How the rows of all ranks are cut into chunks, and the flags that say which of them are ready.

    Every rank has equally many chunks, in the order of the rows; a short or empty shard has empty ones.

    Attributes:
        rank, world: who we are, and how many ranks share the rows.
        starts: [chunks + 1] int32 or int64, ascending from 0 to the number of rows; chunk c holds rows
            starts[c]:starts[c + 1].
        flags: [chunks] int32, the epoch of the data in each chunk.
        epoch: [1] int32, the epoch of this call; on the device, so that a captured graph can be replayed.
    """

    rank: int
    world: int
    starts: Tensor
    flags: Tensor
    epoch: Tensor

    @property
    def num_chunks(self) -> int:
        return self.flags.numel()

    def check(self, op: str, rows: int, device: torch.device) -> None:
        """Raises ValueError unless these are chunks of `rows` rows; on a GPU it does not read `starts`."""
        if not 0 <= self.rank < self.world:
            raise ValueError(f"{op}: rank={self.rank} of world={self.world}; must be in 0..world-1")
        if self.num_chunks == 0 or self.num_chunks % self.world:
            raise ValueError(
                f"{op}: {self.num_chunks} flags for world={self.world}; every rank has equally many chunks, "
                "at least one: give a short shard empty ones"
            )
        check_words(op, "starts", self.starts, self.num_chunks + 1, device, (torch.int32, torch.int64))
        check_words(op, "flags", self.flags, self.num_chunks, device)
        check_words(op, "epoch", self.epoch, 1, device)
        # Reading a GPU's would make the host wait for it.
        if device.type == "cpu":
            starts = self.starts.tolist()
            if starts[0] != 0 or starts[-1] != rows or sorted(starts) != starts:
                raise ValueError(f"{op}: starts are {starts}; must ascend from 0 to the number of rows, {rows}")


class Timeout(NamedTuple):
    """What a kernel waited for in vain: a chunk of `rank` at an epoch. The kernel's outputs are void."""

    op: str
    rank: int
    chunk: int
    epoch: int


def read_status(status: Tensor) -> Timeout | None:
    """The time-out that a kernel recorded in `status` [4] int32, if any; waits for the device.

    The record stays until it is set to zero; kernels that are given it meanwhile end at once.
    """
    op, rank, chunk, epoch = status.tolist()
    name = OPS[op]
    return None if name is None else Timeout(name, rank, chunk, epoch)


# The interpreter has no inline assembly, and AMD's GPUs have another: there a poll counts for a microsecond.
HAS_CLOCK = not INTERPRETED and torch.version.hip is None


@triton.jit
def clock_ns():
    """The GPU's wall clock, after a pause in which a spinning program leaves memory to those that move data."""
    return tl.inline_asm_elementwise(
        "nanosleep.u32 40; mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def fence_for_tma():
    # Orders loads through TMA descriptors, which another unit does, after the acquire that this thread did.
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait(flag_ptr, epoch, timeout_us, CLOCK: tl.constexpr):
    """Polls until the flag is not behind `epoch`, at most for `timeout_us`; returns whether it got there.

    After True every thread of this program sees what the publisher wrote before it raised the flag.
    """
    # Acquire, system scope: orders all later loads of the chunk after this load of its flag, whose writer may
    # be a copy engine, another GPU or another process. Adding nothing is Triton's way to spell an acquiring
    # load; one thread does it, and a barrier hands it on to the others. Like epochs, the difference wraps.
    ahead = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - epoch
    if CLOCK:
        # What is here already costs no look at the clock.
        if ahead < 0:
            start_ns = clock_ns()
            limit_ns = timeout_us.to(tl.int64) * 1000
            while (ahead < 0) & (clock_ns() - start_ns < limit_ns):
                ahead = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - epoch
    else:
        polls = 1
        while (ahead < 0) & (polls < timeout_us):
            ahead = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - epoch
            polls += 1
    return ahead >= 0


@triton.jit
def publish(flag_ptr, epoch):
    """Raises the flag to `epoch`; whoever sees it there sees all that this program stored before."""
    # Orders the stores of all threads before the exchange, which one thread does. Triton up to 3.7 puts no
    # barrier there itself.
    tl.debug_barrier()
    # Release, system scope: orders this program's stores, and those that it acquired from other programs
    # through `arrive`, before the flag, which a stream, a peer or another process may read.
    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@triton.jit
def arrive(counter_ptr):
    """Counts a tile that this program has stored; returns how many were counted before."""
    # Orders the stores of all threads before the count, which one thread does.
    tl.debug_barrier()
    # Acquire and release, device scope: orders our tile before the count, for whoever counts after us, and
    # the tiles of those who counted before us ahead of what we do next. So the last one can publish for all.
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")


@triton.jit
def record_timeout(status_ptr, OP: tl.constexpr, rank, chunk, epoch):
    """Keeps (op, rank, chunk, epoch) of the first wait that was in vain."""
    # Relaxed: it elects one writer and orders nothing. The host reads the record when the kernel has ended.
    if tl.atomic_cas(status_ptr, 0, OP, sem="relaxed", scope="gpu") == 0:
        tl.store(status_ptr + 1, rank)
        tl.store(status_ptr + 2, chunk)
        tl.store(status_ptr + 3, epoch)


@triton.jit
def wait_for_rows(
    chunk_starts_ptr,
    flags_ptr,
    status_ptr,
    epoch,
    row_begin,
    row_end,
    num_chunks,
    world,
    timeout_us,
    OP: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    TMA: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """Waits for every chunk that holds some of the rows; returns whether all came, and records a failure."""
    first, end = chunks_touched(chunk_starts_ptr, num_chunks, row_begin, row_end, MAX_CHUNKS)
    arrived = tl.full((), True, tl.int1)
    for chunk in range(first, end):
        has_rows = tl.load(chunk_starts_ptr + chunk) < tl.load(chunk_starts_ptr + chunk + 1)
        if arrived & has_rows:
            arrived = wait(flags_ptr + chunk, epoch, timeout_us, CLOCK)
            if not arrived:
                record_timeout(status_ptr, OP, chunk // (num_chunks // world), chunk, epoch)
    if TMA and CLOCK:
        fence_for_tma()
    return arrived


@triton.jit
def announce_rows(
    chunk_starts_ptr,
    flags_ptr,
    counters_ptr,
    epoch,
    row_begin,
    row_end,
    num_chunks,
    num_tiles_n,
    TILE_M: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):
    """Counts a stored tile for every chunk that holds some of its rows; publishes those that it completes."""
    first, end = chunks_touched(chunk_starts_ptr, num_chunks, row_begin, row_end, MAX_CHUNKS)
    for chunk in range(first, end):
        chunk_begin = tl.load(chunk_starts_ptr + chunk)
        chunk_end = tl.load(chunk_starts_ptr + chunk + 1)
        if chunk_begin < chunk_end:
            num_tiles = (tl.cdiv(chunk_end, TILE_M) - chunk_begin // TILE_M) * num_tiles_n
            if arrive(counters_ptr + chunk) == num_tiles - 1:
                # The next to count here is a later kernel of this stream, which must start from zero.
                tl.store(counters_ptr + chunk, 0)
                publish(flags_ptr + chunk, epoch)
