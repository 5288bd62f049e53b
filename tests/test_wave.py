"""The wave model against a simulation by ticks, and against what must hold for any schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedcomm.comm.ring import chunk_sizes, cut
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.tile_order import gather_order, scatter_order
from fusedcomm.tune.wave import (
    Link,
    Makespan,
    TiledGemm,
    best_pieces,
    efficiency,
    gather_s,
    scatter_s,
    slowest_s,
)

BOTH = pytest.mark.parametrize("makespan", [gather_s, scatter_s])
SMALL = GemmConfig(tile_m=16, tile_n=16, tile_k=16, group_m=2)


@st.composite
def gemms(draw: st.DrawFn, config: GemmConfig = SMALL) -> TiledGemm:
    sizes = tuple(draw(st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any)))
    gemm = TiledGemm(sizes, draw(st.integers(1, 60)), config, draw(st.integers(1, 7)), 1.0)
    # Whole ticks a tile, so that the simulation is exact.
    return TiledGemm(*(sizes, gemm.columns, config, gemm.num_programs), gemm.num_waves * draw(st.integers(1, 9)))


def travelling(gemm: TiledGemm, rank: int, pieces: int):
    world = len(gemm.sizes)
    return [
        chunk for d in range(1, world) for chunk in cut(gemm.sizes, (rank + d) % world, (1,) * pieces) if chunk.rows
    ]


def programs(gemm: TiledGemm, order: list[tuple[int, int]]) -> list[list[int]]:
    """The tile rows of each program."""
    return [[row for row, _ in order[p :: gemm.num_programs]] for p in range(gemm.num_programs)]


def tick_gather(gemm: TiledGemm, ticks_a_row: int, chunk_ticks: int, rank: int, pieces: int) -> int:
    """Tick by tick: which rows are here, and which program can begin a tile."""
    tile_m, tile_ticks = gemm.config.tile_m, round(gemm.tile_s)
    here = set(range(gemm.shard_starts[rank], gemm.shard_starts[rank + 1]))
    queue = [(chunk, chunk.rows * ticks_a_row + chunk_ticks) for chunk in travelling(gemm, rank, pieces)]
    left = programs(
        gemm,
        gather_order(gemm.shard_starts, rank, gemm.num_tiles_n, tile_m=tile_m, group_m=gemm.group_m(pieces)),
    )
    # No tile reads behind the last row.
    here |= set(range(sum(gemm.sizes), sum(gemm.sizes) + tile_m))
    busy = [0] * gemm.num_programs
    tick = 0
    while any(left) or any(busy):
        for program, rows in enumerate(left):
            if not busy[program] and rows and here.issuperset(range(rows[0] * tile_m, (rows[0] + 1) * tile_m)):
                rows.pop(0)
                busy[program] = tile_ticks
        tick += 1
        busy = [max(0, ticks - 1) for ticks in busy]
        if queue:
            chunk, ticks = queue[0]
            queue[0] = (chunk, ticks - 1)
            if ticks == 1:
                here |= set(range(chunk.start, chunk.stop))
                queue.pop(0)
    return tick


def tick_scatter(gemm: TiledGemm, ticks_a_row: int, chunk_ticks: int, rank: int, pieces: int) -> int:
    """Tick by tick: which tiles are done, and whether the next chunk may leave."""
    tile_m, tile_ticks = gemm.config.tile_m, round(gemm.tile_s)
    left = programs(
        gemm,
        scatter_order(gemm.shard_starts, rank, gemm.num_tiles_n, tile_m=tile_m, group_m=gemm.group_m(pieces)),
    )
    done = dict.fromkeys(range(-(-sum(gemm.sizes) // tile_m)), 0)
    queue = travelling(gemm, rank, pieces)
    busy: list[tuple[int, int]] = [(0, -1)] * gemm.num_programs
    sending = tick = 0
    while any(left) or any(row >= 0 for _, row in busy) or queue or sending:
        for program, rows in enumerate(left):
            if busy[program][1] < 0 and rows:
                busy[program] = (tile_ticks, rows.pop(0))
        if queue and not sending:
            rows = range(queue[0].start // tile_m, -(-queue[0].stop // tile_m))
            if all(done[row] == gemm.num_tiles_n for row in rows):
                sending = queue.pop(0).rows * ticks_a_row + chunk_ticks
        tick += 1
        sending = max(0, sending - 1)
        for program, (ticks, row) in enumerate(busy):
            if row >= 0:
                busy[program] = (ticks - 1, row) if ticks > 1 else (0, -1)
                done[row] += ticks == 1
    return tick


@pytest.mark.parametrize(("makespan", "ticks"), [(gather_s, tick_gather), (scatter_s, tick_scatter)])
@settings(deadline=None, max_examples=60)
@given(
    gemm=gemms(), ticks_a_row=st.integers(0, 3), chunk_ticks=st.integers(1, 5), pieces=st.integers(1, 3), data=st.data()
)
def test_the_model_is_what_happens_tick_by_tick(makespan, ticks, gemm, ticks_a_row, chunk_ticks, pieces, data):
    rank = data.draw(st.integers(0, len(gemm.sizes) - 1))
    wire = ticks_a_row * (sum(gemm.sizes) - gemm.sizes[rank])
    expected = ticks(gemm, ticks_a_row, chunk_ticks, rank, pieces)
    assert makespan(gemm, Link(wire, chunk_ticks), rank, pieces) == pytest.approx(expected)


@BOTH
@settings(deadline=None)
@given(gemm=gemms(), wire=st.floats(0, 500), pieces=st.integers(1, 4), data=st.data())
def test_no_schedule_beats_the_slower_half_or_loses_to_serial(makespan: Makespan, gemm, wire, pieces, data):
    rank = data.draw(st.integers(0, len(gemm.sizes) - 1))
    # With nobody to send to, nothing travels.
    wire *= sum(gemm.sizes) > gemm.sizes[rank]
    total = makespan(gemm, Link(wire), rank, pieces)
    assert max(gemm.gemm_s, wire) <= total * (1 + 1e-9)
    assert total <= (gemm.gemm_s + wire) * (1 + 1e-9)


@BOTH
@settings(deadline=None)
@given(gemm=gemms(), wires=st.tuples(st.floats(0, 500), st.floats(0, 500)), pieces=st.integers(1, 4))
def test_a_slower_link_never_helps(makespan: Makespan, gemm, wires, pieces):
    fast, slow = (slowest_s(makespan, gemm, Link(wire), pieces) for wire in sorted(wires))
    assert fast <= slow * (1 + 1e-9)


# Without groups the order of the tiles is the same however the shards are cut.
UNGROUPED = GemmConfig(tile_m=16, tile_n=16, tile_k=16, group_m=1)


@BOTH
@settings(deadline=None)
@given(gemm=gemms(UNGROUPED), wire=st.floats(0, 500), pieces=st.integers(1, 3))
def test_cutting_finer_never_hurts_where_a_cut_costs_nothing(makespan: Makespan, gemm, wire, pieces):
    # Rows in multiples, so that the finer chunks are parts of the coarser ones.
    gemm = TiledGemm(tuple(6 * size for size in gemm.sizes), gemm.columns, UNGROUPED, gemm.num_programs, gemm.gemm_s)
    coarse, fine = (slowest_s(makespan, gemm, Link(wire), number) for number in (pieces, 2 * pieces))
    assert fine <= coarse * (1 + 1e-9)


def big(world: int, rows: int = 8192, columns: int = 16384) -> TiledGemm:
    """So many waves that their number plays no part."""
    return TiledGemm(chunk_sizes(rows, world), columns, GemmConfig(16, 256, 64, group_m=1), 64, 1.0)


@BOTH
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_at_balance_the_last_piece_cannot_hide(makespan: Makespan, pieces):
    total = slowest_s(makespan, big(8), Link(1.0), pieces)
    assert efficiency(total, 1.0, 1.0) == pytest.approx(1 - 1 / (8 * pieces), abs=0.01)


@BOTH
def test_a_fast_link_hides_all_and_a_slow_one_all_of_the_gemm_but_a_piece(makespan: Makespan):
    assert slowest_s(makespan, big(8), Link(0.0), 1) == pytest.approx(1.0)
    assert efficiency(slowest_s(makespan, big(8), Link(0.5), 1), 1.0, 0.5) > 0.85
    assert slowest_s(makespan, big(8), Link(100.0), 1) == pytest.approx(100.125, abs=0.02)


@BOTH
def test_a_group_of_one_only_computes(makespan: Makespan):
    assert slowest_s(makespan, big(1), Link(0.0), 4) == pytest.approx(1.0)


@BOTH
def test_few_waves_hide_less(makespan: Makespan):
    few = TiledGemm(chunk_sizes(2048, 8), 1792, GemmConfig(), 132, 1.0)
    assert few.num_waves == 1
    assert efficiency(slowest_s(makespan, few, Link(1.0), 1), 1.0, 1.0) < 0.2


@BOTH
def test_more_pieces_are_taken_while_they_gain_more_than_they_cost(makespan: Makespan):
    gemm = TiledGemm(chunk_sizes(8192, 8), 16384, GemmConfig(), 132, 1e-3)
    counts = [best_pieces(makespan, gemm, Link(1e-3, chunk_s)) for chunk_s in (0.0, 2e-6, 1e-3)]
    assert counts[0] > 1
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1
    # A piece of less than a tile is nobody's use.
    assert best_pieces(makespan, TiledGemm(chunk_sizes(1024, 8), 16384, GemmConfig(), 132, 1e-3), Link(1e-3)) == 1
