from __future__ import annotations

import time

import pytest
import torch
from helpers import assert_as_accurate
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import CONFIG, WRAPPING_EPOCHS, chunks_with_rows, fetch_chunks, make_chunks, peer, poisoned, rows_of
from torch.nn.functional import linear

from fusedcomm.kernels.flags import Chunks
from fusedcomm.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.kernels.tile_order import scatter_order

TIMES = {torch.float32: 2.0, torch.float16: 2.0, torch.bfloat16: 3.0}


def new_counters(chunks: Chunks) -> torch.Tensor:
    return torch.zeros(chunks.num_chunks, dtype=torch.int32)


def publication_order(chunks: Chunks, num_tiles_n: int, num_programs: int) -> list[int]:
    """The chunks with rows, in the order in which one program finishes them."""
    pieces = chunks.num_chunks // chunks.world
    starts = chunks.starts.tolist()
    group_m = CONFIG.group_for(starts[-1] // chunks.num_chunks, num_tiles_n, num_programs)
    tiles = scatter_order(starts[::pieces], chunks.rank, num_tiles_n, tile_m=CONFIG.tile_m, group_m=group_m)
    finished = {
        chunk: place
        for place, (tile, _) in enumerate(tiles)
        for chunk in range(chunks.num_chunks)
        if max(starts[chunk], tile * CONFIG.tile_m) < min(starts[chunk + 1], (tile + 1) * CONFIG.tile_m)
    }
    return sorted(finished, key=lambda chunk: (finished[chunk], chunk))


@pytest.mark.parametrize(
    ("rank", "sizes", "pieces", "dtype", "order"),
    [
        (0, [40], 1, torch.float32, [0]),
        (1, [64, 64, 64], 1, torch.float32, [2, 0, 1]),
        (2, [64, 64, 64], 2, torch.float16, [0, 1, 2, 3, 4, 5]),
        (1, [37, 50, 14], 1, torch.float16, None),
        (2, [70, 0, 9, 30], 2, torch.bfloat16, None),
    ],
)
def test_matmul_reduce_scatter_publishes_chunks_that_are_complete(rank, sizes, pieces, dtype, order):
    generator = torch.Generator().manual_seed(rank)
    rows = sum(sizes)
    chunks = make_chunks(rank, sizes, pieces)
    counters = new_counters(chunks)
    order = order or publication_order(chunks, num_tiles_n=4, num_programs=1)
    y_partial, received = poisoned(rows, 100, dtype=dtype), poisoned(rows, 100, dtype=dtype)
    w = torch.randn(100, 70, generator=generator).to(dtype)
    for epoch in WRAPPING_EPOCHS:
        x = torch.randn(rows, 70, generator=generator).to(dtype)
        chunks.epoch.fill_(epoch)
        y_partial.fill_(float("nan"))
        received.fill_(float("nan"))
        looks = torch.zeros(2, dtype=torch.int32).share_memory_()
        with peer(fetch_chunks, y_partial, received, chunks, order, looks):
            while not looks[0]:
                time.sleep(0.001)
            matmul_reduce_scatter(x, w, y_partial, chunks=chunks, counters=counters, config=CONFIG, num_programs=1)
        # Chunks left while others were computed.
        assert len(order) == 1 or looks[1] > 1
        assert torch.equal(received, y_partial)
        assert_as_accurate(received, linear(x.double(), w.double()), linear(x, w), times=TIMES[dtype])
        assert chunks.flags[order].tolist() == [epoch] * len(order)
        assert sorted(order) == chunks_with_rows(chunks)
        assert chunks.flags.count_nonzero() == len(order)
        assert not counters.any()


def test_publication_order_is_the_ring_from_the_next_rank_on():
    assert publication_order(make_chunks(1, [64, 64, 64]), 3, 1) == [2, 0, 1]
    assert publication_order(make_chunks(0, [32, 96, 32, 64], pieces=2), 1, 1) == [2, 3, 4, 5, 6, 7, 0, 1]


@settings(deadline=None, max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=5),
    pieces=st.integers(1, 3),
    shape=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    starts_dtype=st.sampled_from([torch.int32, torch.int64]),
    num_programs=st.integers(1, 7),
    data=st.data(),
)
def test_matmul_reduce_scatter_publishes_every_chunk_once(sizes, pieces, shape, starts_dtype, num_programs, data):
    columns, depth = shape
    rank = data.draw(st.integers(0, len(sizes) - 1))
    chunks = make_chunks(rank, sizes, pieces, starts_dtype)
    chunks.epoch.fill_(9)
    counters = new_counters(chunks)
    x, w = torch.randn(sum(sizes), depth), torch.randn(columns, depth)
    y_partial = poisoned(sum(sizes), columns, dtype=torch.float32)
    matmul_reduce_scatter(x, w, y_partial, chunks=chunks, counters=counters, config=CONFIG, num_programs=num_programs)
    assert_as_accurate(y_partial, linear(x.double(), w.double()), linear(x, w))
    with_elements = [y_partial[rows_of(chunks, chunk)].numel() > 0 for chunk in range(chunks.num_chunks)]
    assert chunks.flags.tolist() == [9 if full else 0 for full in with_elements]
    assert not counters.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"counters": torch.zeros(3, dtype=torch.int32)},
            r"counters is torch.int32 \(3,\) .*must be torch.int32 \(2,\)",
        ),
        ({"x": torch.zeros(8, 4)}, r"x is \(8, 4\) and w is \(5, 3\)"),
        ({"chunks": make_chunks(0, [4, 5])}, r"starts are \[0, 4, 9\]; must ascend from 0 to .*, 8"),
    ],
)
def test_matmul_reduce_scatter_rejects_what_does_not_fit(changes, message):
    chunks = make_chunks(0, [4, 4])
    arguments = {"x": torch.zeros(8, 3), "w": torch.zeros(5, 3), "y_partial": torch.zeros(8, 5), "chunks": chunks}
    arguments |= {"counters": new_counters(chunks), "config": CONFIG, "num_programs": 1}
    with pytest.raises(ValueError, match="matmul_reduce_scatter: .*" + message):
        matmul_reduce_scatter(**(arguments | changes))
