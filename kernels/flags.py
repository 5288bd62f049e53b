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
from fusedcomm.kernels.tile_order import touches

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


def num_lanes(num_chunks: int, num_warps: int) -> int:
    """Of the vectors over chunks in a kernel: each lane is held by one thread, and a reduction passes a barrier.

    Fewer lanes than threads would be held by several, who may see a flag at different times, and so part.
    """
    return max(triton.next_power_of_2(num_chunks), num_warps * (32 if torch.version.hip is None else 64))


# The interpreter has no inline assembly, and AMD's GPUs have another: there a poll counts for a microsecond.
HAS_CLOCK = not INTERPRETED and torch.version.hip is None


@triton.jit
def clock_ns(like):
    """The GPU's wall clock, in the shape of int32 `like`, after a pause: spinning leaves memory to who moves data."""
    return tl.inline_asm_elementwise(
        "nanosleep.u32 40; mov.u64 $0, %globaltimer;", "=l,r", [like], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def fence_for_tma():
    # Orders loads through TMA descriptors, which another unit does, after the acquire that this thread did.
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def are_up(flag_ptrs, epoch, CLOCK: tl.constexpr):
    """Which flags are not behind `epoch`.

    Once the program has passed a barrier, all its threads see what the publishers of those wrote before.
    """
    # Acquire, system scope: orders all later loads of the chunks after these loads of their flags, whose writer may
    # be a copy engine, another GPU or another process.
    if CLOCK:
        flags = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];",
            "=r,l",
            [flag_ptrs.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        # Adding nothing is Triton's own way to spell an acquiring load: one that writes, and keeps others waiting.
        flags = tl.atomic_add(flag_ptrs, 0, sem="acquire", scope="sys")
    # Like epochs, the difference wraps.
    return flags - epoch >= 0


@triton.jit
def any_of(mask):
    return tl.max(mask.to(tl.int32), axis=0) > 0


@triton.jit
def wait(flag_ptrs, epoch, seen, needed, timeout_us, CLOCK: tl.constexpr):
    """Looks until all `needed` flags are not behind `epoch`, at most for `timeout_us`.

    Does not look where all of those are `seen`. Returns which have been seen by now, and whether the needed ones are.
    """
    missing = any_of(needed & ~seen)
    if missing:
        # What is here already costs no look at the clock.
        seen = seen | are_up(flag_ptrs, epoch, CLOCK)
        missing = any_of(needed & ~seen)
        if CLOCK:
            if missing:
                end_ns = clock_ns(epoch) + timeout_us.to(tl.int64) * 1000
                in_time = True
                while missing & in_time:
                    seen = seen | are_up(flag_ptrs, epoch, CLOCK)
                    missing = any_of(needed & ~seen)
                    # Threads read the clock one after the other: they must not disagree on whether it is too late.
                    in_time = ~any_of(clock_ns(needed.to(tl.int32)) > end_ns)
        else:
            polls = 1
            while missing & (polls < timeout_us):
                seen = seen | are_up(flag_ptrs, epoch, CLOCK)
                missing = any_of(needed & ~seen)
                polls += 1
        # Hands what each thread acquired on to the others.
        tl.debug_barrier()
    return seen, ~missing


@triton.jit
def publish(flag_ptrs, epoch, complete):
    """Raises the `complete` flags to `epoch`; whoever sees one there sees all that this program stored before."""
    # Orders the stores of all threads before the exchange, which one thread does. Triton up to 3.7 puts no
    # barrier there itself.
    tl.debug_barrier()
    # Release, system scope: orders this program's stores, and those that it acquired from other programs
    # through `arrive`, before the flag, which a stream, a peer or another process may read.
    tl.atomic_xchg(flag_ptrs, epoch, mask=complete, sem="release", scope="sys")


@triton.jit
def arrive(counter_ptrs, touched):
    """Counts a tile that this program has stored for the `touched` chunks; returns how many were counted before."""
    # Orders the stores of all threads before the count, which one thread does.
    tl.debug_barrier()
    # Acquire and release, device scope: orders our tile before the count, for whoever counts after us, and
    # the tiles of those who counted before us ahead of what we do next. So the last one can publish for all.
    return tl.atomic_add(counter_ptrs, 1, mask=touched, sem="acq_rel", scope="gpu")


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
    chunk,
    starts,
    stops,
    flags_ptr,
    status_ptr,
    epoch,
    seen,
    row_begin,
    row_end,
    chunks_per_rank,
    timeout_us,
    OP: tl.constexpr,
    TMA: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """Waits for every chunk that holds some of the rows; records a failure.

    Returns which chunks have been seen here by now, `seen` among them, and whether all that were waited for came.
    """
    needed = touches(starts, stops, row_begin, row_end)
    seen, arrived = wait(flags_ptr + chunk, epoch, seen, needed, timeout_us, CLOCK)
    if not arrived:
        first = tl.min(tl.where(needed & ~seen, chunk, 2**31 - 1), axis=0)
        record_timeout(status_ptr, OP, first // chunks_per_rank, first, epoch)
    if TMA and CLOCK:
        fence_for_tma()
    return seen, arrived


@triton.jit
def announce_rows(
    chunk,
    starts,
    stops,
    flags_ptr,
    counters_ptr,
    epoch,
    row_begin,
    row_end,
    num_tiles_n,
    TILE_M: tl.constexpr,
):
    """Counts a stored tile for every chunk that holds some of its rows; publishes those that it completes."""
    touched = touches(starts, stops, row_begin, row_end)
    num_tiles = (tl.cdiv(stops, TILE_M) - starts // TILE_M) * num_tiles_n
    complete = touched & (arrive(counters_ptr + chunk, touched) == num_tiles - 1)
    if any_of(complete):
        # The next to count here is a later kernel of this stream, which must start from zero.
        tl.store(counters_ptr + chunk, 0, mask=complete)
        publish(flags_ptr + chunk, epoch, complete)
