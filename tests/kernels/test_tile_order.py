from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.kernels._triton import tl, triton
from fusedcomm.kernels.flags import num_lanes
from fusedcomm.kernels.tile_order import (
    all_chunks,
    first_gathered_tile,
    first_scattered_tile,
    gather_order,
    scatter_order,
    tile_at,
    touches,
)

TILE_M = 16


@triton.jit
def order_kernel(
    tiles_ptr,
    start,
    num_rows,
    num_tiles_n,
    GATHER: tl.constexpr,
    TILE_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    SIZE: tl.constexpr,
):
    num_tiles_m = tl.cdiv(num_rows, TILE_M)
    if GATHER:
        first_tile_m = first_gathered_tile(start, num_tiles_m, TILE_M)
    else:
        first_tile_m = first_scattered_tile(start, num_rows, TILE_M)
    num_tiles = num_tiles_m * num_tiles_n
    index = tl.minimum(tl.arange(0, SIZE), num_tiles - 1)
    tile_m, tile_n = tile_at(index, first_tile_m, num_tiles_m, num_tiles_n, GROUP_M)
    tl.store(tiles_ptr + 2 * index, tile_m)
    tl.store(tiles_ptr + 2 * index + 1, tile_n)


def order_in_triton(
    start: int, num_rows: int, num_tiles_n: int, group_m: int, *, gather: bool
) -> list[tuple[int, int]]:
    num_tiles = triton.cdiv(num_rows, TILE_M) * num_tiles_n
    tiles = torch.full((num_tiles, 2), -1, dtype=torch.int32)
    order_kernel[(1,)](tiles, start, num_rows, num_tiles_n, gather, TILE_M, group_m, triton.next_power_of_2(num_tiles))
    return [tuple(tile) for tile in tiles.tolist()]


def shards(world: int, *totals: int) -> list[list[int]]:
    """Some ways to cut rows over ranks: evenly, as torch.chunk does, unevenly with empty shards."""
    uneven = [(7 * rank * rank + 11) % 50 if rank % 3 != 1 else 0 for rank in range(world)]
    return [[2 * TILE_M] * world, *(list(chunk_sizes(total, world)) for total in totals), uneven]


@pytest.mark.parametrize("world", range(1, 17))
def test_tile_order_matches_oracle(world):
    for sizes in shards(world, 1, 150, 333):
        starts = [0, *accumulate(sizes)]
        for rank in range(world):
            group_m = 1 + rank % 3
            tiles = gather_order(starts, rank, 2, tile_m=TILE_M, group_m=group_m)
            assert order_in_triton(starts[rank], starts[-1], 2, group_m, gather=True) == tiles
            tiles = scatter_order(starts, rank, 3, tile_m=TILE_M, group_m=group_m)
            next_start = starts[(rank + 1) % world]
            assert order_in_triton(next_start, starts[-1], 3, group_m, gather=False) == tiles


def owners_of(tile: int, starts: list[int]) -> set[int]:
    """The ranks of which a tile row holds rows."""
    rows = range(tile * TILE_M, min((tile + 1) * TILE_M, starts[-1]))
    return {rank for rank, (begin, end) in enumerate(pairwise(starts)) if max(begin, rows[0]) < min(end, rows[-1] + 1)}


@pytest.mark.parametrize("world", range(1, 17))
def test_gather_order_never_needs_rows_before_those_that_arrive_earlier(world):
    for sizes in shards(world, 7, 150, 333):
        starts = [0, *accumulate(sizes)]
        for rank in range(world):
            tiles = gather_order(starts, rank, 1, tile_m=TILE_M, group_m=1)
            assert sorted(tiles) == [(tile, 0) for tile in range(len(tiles))]
            last_arrival = [max((owner - rank) % world for owner in owners_of(tile, starts)) for tile, _ in tiles]
            assert last_arrival == sorted(last_arrival)


@pytest.mark.parametrize("world", range(1, 17))
def test_scatter_order_finishes_rows_in_ring_order_and_our_own_last(world):
    for sizes in shards(world, 7, 150, 333):
        starts = [0, *accumulate(sizes)]
        for rank in range(world):
            tiles = scatter_order(starts, rank, 1, tile_m=TILE_M, group_m=1)
            assert sorted(tiles) == [(tile, 0) for tile in range(len(tiles))]
            touching = [owners_of(tile, starts) for tile, _ in tiles]
            finished = {owner: place for place, owners in enumerate(touching) for owner in owners}
            # A shard that lies within the first tile is finished with it, wherever it stands in the ring.
            behind = [
                finished[owner] for owner in ((rank + d) % world for d in range(1, world + 1)) if finished.get(owner)
            ]
            assert behind == sorted(behind)
            if sizes[rank] >= TILE_M:
                assert finished[rank] == max(finished.values())


@triton.jit
def touched_kernel(starts_ptr, touched_ptr, num_chunks, row_begin, row_end, LANES: tl.constexpr):
    chunk, starts, stops = all_chunks(starts_ptr, num_chunks, LANES)
    tl.store(touched_ptr + chunk, 1, mask=touches(starts, stops, row_begin, row_end))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_chunks_touched_are_those_that_hold_the_rows(data):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any))
    starts = [0, *accumulate(lengths)]
    begin = data.draw(st.integers(0, starts[-1] - 1))
    end = data.draw(st.integers(begin + 1, starts[-1]))
    found = torch.zeros(len(lengths), dtype=torch.int32)
    lanes = num_lanes(len(lengths), num_warps=data.draw(st.sampled_from([1, 4])))
    touched_kernel[(1,)](torch.tensor(starts), found, len(lengths), begin, end, lanes)
    holding = [lengths[c] and starts[c] < end and starts[c + 1] > begin for c in range(len(lengths))]
    assert found.tolist() == [int(bool(holds)) for holds in holding]
