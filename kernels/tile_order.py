"""Which tile comes next, and which chunks it touches: as Triton code, and as the Python oracle beside it.

Tile rows are visited in ascending order from a first one that depends on the rank, and wrap around.

- All-gather: from the first tile row that begins in our own rows, which are here already. The rows of rank+1,
  rank+2, ... follow in the order in which they arrive. The tile row that holds the end of rank-1's rows and
  the beginning of our own comes last, as the last rows to arrive do.
- Reduce-scatter: from the tile row that holds the first row of rank+1, so that its chunks leave first; our own
  rows, which do not travel, come last.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusedcomm.kernels._triton import tl, triton


@triton.jit
def first_gathered_tile(own_start, num_tiles_m, TILE_M: tl.constexpr):
    return tl.cdiv(own_start, TILE_M) % num_tiles_m


@triton.jit
def first_scattered_tile(next_start, num_rows, TILE_M: tl.constexpr):
    # Where the rows of rank+1 are none, at the very end, the next ones are at the beginning.
    return (next_start % num_rows) // TILE_M


@triton.jit
def tile_at(index, first_tile_m, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """Tile row and tile column at place `index`: groups of GROUP_M tile rows, each column by column."""
    tiles_per_group = GROUP_M * num_tiles_n
    group_begin = index // tiles_per_group * GROUP_M
    group_rows = tl.minimum(num_tiles_m - group_begin, GROUP_M)
    place = index % tiles_per_group
    tile_m = (first_tile_m + group_begin + place % group_rows) % num_tiles_m
    tile_n = place // group_rows
    return tile_m, tile_n


@triton.jit
def all_chunks(chunk_starts_ptr, num_chunks, LANES: tl.constexpr):
    """A lane for each chunk: its number, its first row, and the first one behind it.

    Lanes that are left over have the last chunk's number, and no rows.
    """
    lane = tl.arange(0, LANES)
    chunk = tl.minimum(lane, num_chunks - 1)
    starts = tl.load(chunk_starts_ptr + chunk).to(tl.int32)
    stops = tl.load(chunk_starts_ptr + 1 + chunk).to(tl.int32)
    return chunk, starts, tl.where(lane < num_chunks, stops, starts)


@triton.jit
def touches(starts, stops, row_begin, row_end):
    """Which chunks hold some of rows `row_begin:row_end`; an empty one holds nothing to wait for or to announce."""
    return (starts < row_end) & (stops > row_begin) & (starts < stops)


def gather_order(
    shard_starts: Sequence[int], rank: int, num_tiles_n: int, *, tile_m: int, group_m: int
) -> list[tuple[int, int]]:
    """The tiles in the order of an all-gather; rank r owns rows `shard_starts[r]:shard_starts[r + 1]`."""
    tile_rows = range(0, shard_starts[-1], tile_m)
    first = next((tile for tile, row in enumerate(tile_rows) if row >= shard_starts[rank]), 0)
    return _in_groups(first, len(tile_rows), num_tiles_n, group_m)


def scatter_order(
    shard_starts: Sequence[int], rank: int, num_tiles_n: int, *, tile_m: int, group_m: int
) -> list[tuple[int, int]]:
    """The tiles in the order of a reduce-scatter; rank r owns rows `shard_starts[r]:shard_starts[r + 1]`."""
    rows = shard_starts[-1]
    next_start = shard_starts[(rank + 1) % (len(shard_starts) - 1)]
    tile_rows = [range(row, min(row + tile_m, rows)) for row in range(0, rows, tile_m)]
    first = next((tile for tile, held in enumerate(tile_rows) if next_start in held), 0)
    return _in_groups(first, len(tile_rows), num_tiles_n, group_m)


def _in_groups(first: int, num_tiles_m: int, num_tiles_n: int, group_m: int) -> list[tuple[int, int]]:
    rows = [*range(first, num_tiles_m), *range(first)]
    return [
        (row, column)
        for begin in range(0, num_tiles_m, group_m)
        for column in range(num_tiles_n)
        for row in rows[begin : begin + group_m]
    ]
