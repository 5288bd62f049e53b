"""Kernels that wait for chunks and announce them, beside copies on another stream."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from helpers import assert_as_accurate
from place import DEVICE, INTERPRETED, TIMES, configs, only_on_gpu, poisoned, randn
from torch.nn.functional import linear

from fusedcomm.bench.gpu_link import prove_progress
from fusedcomm.comm.places import COPY_SMS
from fusedcomm.comm.ring import chunk_bounds
from fusedcomm.kernels.all_gather_matmul import all_gather_matmul
from fusedcomm.kernels.await_rows import await_rows
from fusedcomm.kernels.flags import Chunks, Timeout, read_status
from fusedcomm.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.kernels.paced_copy import paced_copy

LAST = 2**31 - 2
# Uneven, with an empty shard and tiles that straddle.
SIZES = [(20, 13), (9, 0, 17, 30)] if INTERPRETED else [(700, 411), (300, 0, 517, 130), (129,) * 8]
FEATURES, COLUMNS = (40, 48) if INTERPRETED else (320, 3000)
TIMEOUT_US = 3 if INTERPRETED else 5_000_000


def make_chunks(rank: int, sizes: tuple[int, ...], pieces: int, epoch: int) -> Chunks:
    bounds = torch.tensor(chunk_bounds(sizes, pieces), device=DEVICE)
    word = torch.full((1,), epoch, dtype=torch.int32, device=DEVICE)
    return Chunks(rank, len(sizes), bounds, word.repeat(len(bounds) - 1), word)


def rows_of(chunks: Chunks) -> list[slice]:
    starts = chunks.starts.tolist()
    return [slice(*pair) for pair in pairwise(starts)]


def own_chunks(chunks: Chunks) -> range:
    pieces = chunks.num_chunks // chunks.world
    return range(chunks.rank * pieces, (chunks.rank + 1) * pieces)


def push(device, x, x_full, chunks: Chunks, rows: list[slice], order: list[int]) -> None:
    """On the current stream: chunk after chunk, each after a while, and its flag."""
    for chunk in order:
        device.sleep(2e-4)
        paced_copy(x[rows[chunk]], x_full[rows[chunk]], gbyte_per_s=50.0, num_programs=COPY_SMS)
        chunks.flags[chunk : chunk + 1].copy_(chunks.epoch)


class GatherCall:
    """An all-gather-matmul whose peers push in some order."""

    def __init__(self, device, rank: int, sizes: tuple[int, ...], pieces: int, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.config = configs(device, dtype)[0]
        self.num_programs = device.num_programs(self.config, dtype.itemsize, COPY_SMS)
        self.chunks = make_chunks(rank, sizes, pieces, LAST)
        self.rows, self.own = rows_of(self.chunks), own_chunks(self.chunks)
        self.x, self.w = randn(0, sum(sizes), FEATURES, dtype=dtype), randn(1, COLUMNS, FEATURES, dtype=dtype)
        self.x_full = poisoned(sum(sizes), FEATURES, dtype=dtype)
        self.y = poisoned(sum(sizes), COLUMNS, dtype=dtype)
        self.status = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        self.missing: set[int] = set()

    def __call__(self) -> None:
        chunks = self.chunks
        chunks.epoch.add_(1)
        self.x_full.fill_(float("nan"))
        self.y.fill_(float("nan"))
        for chunk in self.own:
            self.x_full[self.rows[chunk]] = self.x[self.rows[chunk]]
            chunks.flags[chunk : chunk + 1].copy_(chunks.epoch)
        order = [chunk for chunk in range(chunks.num_chunks) if chunk not in (*self.own, *self.missing)]
        random.Random(chunks.rank).shuffle(order)
        with self.device.beside(self.device.mark()):
            push(self.device, self.x, self.x_full, chunks, self.rows, order)
            done = self.device.mark()
        all_gather_matmul(
            *(self.x_full, self.w, self.y),
            chunks=chunks,
            status=self.status,
            timeout_us=TIMEOUT_US,
            config=self.config,
            num_programs=self.num_programs,
        )
        self.device.wait(done)

    def check(self) -> None:
        assert read_status(self.status) is None
        assert torch.equal(self.x_full, self.x)
        assert_as_accurate(
            self.y, linear(self.x.double(), self.w.double()), linear(self.x, self.w), times=TIMES[self.dtype]
        )


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_are_multiplied_when_they_arrive_whatever_the_order(device, sizes, pieces):
    for rank in range(len(sizes)):
        call = GatherCall(device, rank, sizes, pieces, torch.bfloat16)
        # The epoch wraps around meanwhile.
        for _ in range(3):
            call()
            call.check()


def test_a_captured_call_replays(device):
    call = GatherCall(device, 1, SIZES[1], 2, torch.float16)
    replay = device.capture(call)
    for seed in range(2, 6):
        call.x.copy_(randn(seed, *call.x.shape, dtype=torch.float16))
        replay()
        device.synchronize()
        call.check()


def test_what_never_comes_is_recorded_and_ends_the_kernel(device, monkeypatch):
    monkeypatch.setitem(globals(), "TIMEOUT_US", 3 if INTERPRETED else 20_000)
    sizes = SIZES[1]
    call = GatherCall(device, 0, sizes, 2, torch.bfloat16)
    missing = call.chunks.num_chunks - 1
    call.missing = {missing}
    call()
    device.synchronize()
    assert read_status(call.status) == Timeout(
        "all_gather_matmul", rank=len(sizes) - 1, chunk=missing, epoch=call.chunks.epoch.item()
    )
    # Not one tile of its rows was computed, and the next kernel does not even begin.
    assert call.y[call.rows[missing]].isnan().all()
    call.missing = set()
    call()
    assert call.y.isnan().all()
    call.status.zero_()
    call()
    call.check()


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_chunks_leave_as_soon_as_they_are_computed(device, sizes, pieces):
    dtype = torch.bfloat16
    config = configs(device, dtype)[0]
    x, w = randn(0, sum(sizes), FEATURES, dtype=dtype), randn(1, COLUMNS, FEATURES, dtype=dtype)
    one_row = torch.tensor([0, 1], device=DEVICE)
    status = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    for rank in range(len(sizes)):
        chunks = make_chunks(rank, sizes, pieces, LAST)
        rows, counters = rows_of(chunks), torch.zeros_like(chunks.flags)
        for _ in range(3):
            y, received = (poisoned(sum(sizes), COLUMNS, dtype=dtype) for _ in range(2))
            chunks.epoch.add_(1)
            begin = device.mark()
            matmul_reduce_scatter(
                *(x, w, y),
                chunks=chunks,
                counters=counters,
                config=config,
                num_programs=device.num_programs(config, 2, COPY_SMS),
            )
            with device.beside(begin):
                for chunk, span in enumerate(rows):
                    if span.start < span.stop:
                        flag = Chunks(0, 1, one_row, chunks.flags[chunk : chunk + 1], chunks.epoch)
                        await_rows(flag, 1, status=status, timeout_us=TIMEOUT_US)
                        paced_copy(y[span], received[span], gbyte_per_s=200.0, num_programs=COPY_SMS)
                done = device.mark()
            device.wait(done)
            assert read_status(status) is None
            assert torch.equal(received, y)
            assert not counters.count_nonzero()
            assert_as_accurate(y, linear(x.double(), w.double()), linear(x, w), times=TIMES[dtype])


@pytest.mark.parametrize("as_graph", [False, True])
def test_copies_advance_beside_a_kernel_that_spins(device, as_graph):
    prove_progress(device, configs(device, torch.bfloat16)[0], as_graph=as_graph)


@only_on_gpu
def test_a_paced_copy_takes_as_long_as_its_link(device):
    source = randn(0, 50_000_000, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    for gbyte_per_s in (100.0, 300.0):
        copy = device.capture(
            lambda rate=gbyte_per_s: paced_copy(source, target, gbyte_per_s=rate, num_programs=4 * COPY_SMS)
        )
        expected_s = source.nbytes / gbyte_per_s / 1e9
        # Never faster; how much slower depends on the GPU, and the benchmark reports it.
        assert device.time_s(copy) > 0.98 * expected_s
    assert torch.equal(source, target)
