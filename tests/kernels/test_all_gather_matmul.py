from __future__ import annotations

import random

import pytest
import torch
from helpers import assert_as_accurate
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import (
    CONFIG,
    MANY_POLLS,
    WRAPPING_EPOCHS,
    chunks_with_rows,
    make_chunks,
    own_chunks,
    peer,
    poisoned,
    push_chunks,
    rows_of,
)
from torch.nn.functional import linear, silu

from fusedcomm.kernels.all_gather_matmul import all_gather_matmul
from fusedcomm.kernels.epilogue import Epilogue
from fusedcomm.kernels.flags import Timeout, read_status

TIMES = {torch.float32: 2.0, torch.float16: 2.0, torch.bfloat16: 3.0}
GRID = {"config": CONFIG, "num_programs": 2}


def new_status() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("rank", "sizes", "pieces", "dtype"),
    [
        (0, [40], 1, torch.float32),
        (1, [64, 64], 1, torch.float32),
        (1, [37, 20, 14], 1, torch.float16),
        (2, [40, 0, 9, 30], 2, torch.bfloat16),
        (3, [30, 30, 30, 5], 3, torch.float32),
    ],
)
def test_all_gather_matmul_matches_reference_whenever_rows_arrive(rank, sizes, pieces, dtype):
    generator = torch.Generator().manual_seed(rank)
    rows = sum(sizes)
    chunks = make_chunks(rank, sizes, pieces)
    x_full, status = poisoned(rows, 40, dtype=dtype), new_status()
    w = torch.randn(45, 40, generator=generator).to(dtype)
    bias = torch.randn(45, generator=generator).to(dtype)
    for epoch in WRAPPING_EPOCHS:
        x = torch.randn(rows, 40, generator=generator).to(dtype)
        x_full.fill_(float("nan"))
        chunks.epoch.fill_(epoch)
        for chunk in own_chunks(chunks):
            x_full[rows_of(chunks, chunk)] = x[rows_of(chunks, chunk)]
            chunks.flags[chunk] = epoch
        # Nobody publishes a chunk without rows.
        missing = [chunk for chunk in chunks_with_rows(chunks) if chunk not in own_chunks(chunks)]
        order = random.Random(epoch).sample(missing, len(missing))
        y = poisoned(rows, 45, dtype=dtype)
        with peer(push_chunks, x, x_full, chunks, [(chunk, 0.05) for chunk in order]):
            all_gather_matmul(
                x_full,
                w,
                y,
                chunks=chunks,
                status=status,
                timeout_us=MANY_POLLS,
                epilogue=Epilogue(bias, "silu"),
                **GRID,
            )
        assert read_status(status) is None
        assert torch.equal(x_full, x)
        reference = silu(linear(x.double(), w.double(), bias.double()))
        assert_as_accurate(y, reference, silu(linear(x, w, bias)), times=TIMES[dtype])


@settings(deadline=None, max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=5),
    pieces=st.integers(1, 3),
    shape=st.tuples(st.integers(1, 50), st.integers(0, 50)),
    starts_dtype=st.sampled_from([torch.int32, torch.int64]),
    num_programs=st.integers(1, 7),
    data=st.data(),
)
def test_all_gather_matmul_computes_every_tile_of_any_shape(sizes, pieces, shape, starts_dtype, num_programs, data):
    columns, depth = shape
    rank = data.draw(st.integers(0, len(sizes) - 1))
    chunks = make_chunks(rank, sizes, pieces, starts_dtype)
    x, w = torch.randn(sum(sizes), depth), torch.randn(columns, depth)
    y, status = poisoned(sum(sizes), columns, dtype=torch.float32), new_status()
    all_gather_matmul(x, w, y, chunks=chunks, status=status, timeout_us=1, config=CONFIG, num_programs=num_programs)
    assert_as_accurate(y, linear(x.double(), w.double()), linear(x, w))


# Tiles of 32 rows: the first holds rows of ranks 0, 1, 2 and 3, the second those of 3 and 4, the third those of 4.
STRADDLING = [10, 9, 8, 20, 40]


@pytest.mark.parametrize("missing", range(5))
def test_all_gather_matmul_waits_for_every_chunk_that_a_tile_touches(missing):
    chunks = make_chunks((missing + 1) % 5, STRADDLING)
    chunks.epoch.fill_(3)
    chunks.flags.fill_(3)
    chunks.flags[missing] = 2
    x, w = torch.randn(sum(STRADDLING), 8), torch.randn(20, 8)
    y, status = poisoned(sum(STRADDLING), 20, dtype=torch.float32), new_status()
    all_gather_matmul(x, w, y, chunks=chunks, status=status, timeout_us=5, **GRID)
    assert read_status(status) == Timeout("all_gather_matmul", rank=missing, chunk=missing, epoch=3)
    rows = rows_of(chunks, missing)
    assert y[rows.start // 32 * 32 : -(-rows.stop // 32) * 32].isnan().all()


def test_all_gather_matmul_begins_with_own_rows_and_goes_on_round_the_ring():
    sizes = [32, 64, 64, 32]
    chunks = make_chunks(2, sizes, pieces=2)
    chunks.epoch.fill_(1)
    x, w = torch.randn(sum(sizes), 8), torch.randn(40, 8)
    # Chunk by chunk arrives what comes next in the ring, and each time the kernel stops at the one after it.
    for arrived, waited in [(4, 5), (5, 6), (6, 7), (7, 0), (0, 1), (1, 2), (2, 3)]:
        chunks.flags[arrived] = 1
        y, status = poisoned(sum(sizes), 40, dtype=torch.float32), new_status()
        all_gather_matmul(x, w, y, chunks=chunks, status=status, timeout_us=1, config=CONFIG, num_programs=1)
        assert read_status(status) == Timeout("all_gather_matmul", rank=waited // 2, chunk=waited, epoch=1)


def test_all_gather_matmul_does_nothing_after_a_timeout_until_it_is_cleared():
    chunks = make_chunks(0, [32, 32])
    chunks.epoch.fill_(1)
    chunks.flags[0] = 1
    x, w = torch.randn(64, 8), torch.randn(20, 8)
    y, status = poisoned(64, 20, dtype=torch.float32), new_status()
    all_gather_matmul(x, w, y, chunks=chunks, status=status, timeout_us=1, **GRID)
    assert read_status(status) == Timeout("all_gather_matmul", rank=1, chunk=1, epoch=1)
    chunks.flags[1] = 1
    y.fill_(float("nan"))
    all_gather_matmul(x, w, y, chunks=chunks, status=status, timeout_us=1, **GRID)
    assert y.isnan().all()
    status.zero_()
    all_gather_matmul(x, w, y, chunks=chunks, status=status, timeout_us=1, **GRID)
    assert_as_accurate(y, linear(x.double(), w.double()), linear(x, w))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_full": torch.zeros(9, 3), "y": torch.zeros(9, 5)}, r"starts are \[0, 4, 8\]; must ascend from 0 to .*, 9"),
        ({"w": torch.zeros(5, 4)}, r"x is \(8, 3\) and w is \(5, 4\)"),
        ({"status": torch.zeros(3, dtype=torch.int32)}, r"status is torch.int32 \(3,\)"),
        ({"timeout_us": 0}, "timeout_us=0; must be 1 to"),
    ],
)
def test_all_gather_matmul_rejects_what_does_not_fit(changes, message):
    arguments = {"x_full": torch.zeros(8, 3), "w": torch.zeros(5, 3), "y": torch.zeros(8, 5), "status": new_status()}
    arguments |= {"chunks": make_chunks(0, [4, 4]), "timeout_us": 1, **GRID}
    with pytest.raises(ValueError, match="all_gather_matmul: .*" + message):
        all_gather_matmul(**(arguments | changes))
