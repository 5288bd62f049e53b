"""What `auto` chooses: the same on every rank, remembered, and never what gains nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from test_ops import _equal

from fusedcomm import all_gather_matmul, matmul_reduce_scatter
from fusedcomm.comm.channel import channel_of
from fusedcomm.tune import propose_sizes
from fusedcomm.tune.cache import Tuner
from fusedcomm.tune.cost import candidates, chunked
from fusedcomm.tune.speed import proportional


@pytest.mark.parametrize("rows", [1, 31, 64, 300, 4096, 10**6])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_candidates_leave_every_chunk_enough_rows(rows, world):
    options = candidates(world=world, rows=rows)
    assert options[0].method == "serial"
    assert [option.num_chunks for option in options[1:]] == list(range(1, len(options)))
    most = chunked("", world=world, rows=rows).num_chunks
    assert most == 1 or rows / world / 2 ** (most - 1) >= 128


# Seconds that each way of running is made to take, by rank.
CASES = {
    "a chunked one is faster": ([{"serial": 0.03, 2: 0.004}] * 2, ("chunked", 2)),
    "nothing gains": ([{"serial": 0.004}] * 2, ("serial", 1)),
    "the slowest rank counts": (
        [{"serial": 0.03, 2: 0.05, 3: 0.01}, {"serial": 0.03, 2: 0.004, 3: 0.01}],
        ("chunked", 3),
    ),
}


def run_tuner(rank, world, seconds, folder, kind):
    os.environ["FUSEDCOMM_CACHE"] = folder
    tuner = Tuner(channel_of(dist.group.WORLD))
    runs = []

    def run(choice):
        runs.append(choice)
        way = "serial" if choice.method == "serial" else choice.num_chunks
        time.sleep(seconds[rank].get(way, 0.03))

    arguments = {"rows": 8192, "shapes": kind, "local": "", "device": torch.device("cpu"), "run": run}
    first = tuner.choose("op", "auto", **arguments)
    num_timed = len(runs)
    assert tuner.choose("op", "auto", **arguments) == first
    # A new process would have the disk alone.
    again = Tuner(channel_of(dist.group.WORLD)).choose("op", "auto", **arguments)
    return (first.method, first.num_chunks, first.reason), num_timed, len(runs), again == first


@pytest.mark.parametrize("name", CASES)
def test_the_fastest_is_chosen_by_all_ranks_and_remembered(name, tmp_path):
    seconds, expected = CASES[name]
    results = run_ranks(2, run_tuner, seconds, str(tmp_path), name)
    for choice, num_timed, num_runs, same in results:
        assert choice[:2] == expected
        assert num_timed > 0
        assert num_runs == num_timed, "a remembered choice was timed again"
        assert same
    assert results[0][0] == results[1][0]
    assert len(list(tmp_path.iterdir())) == 1


def run_differing(rank, world, folder):
    kind = "ranks remember different things"
    folders = [Path(folder) / "0", Path(folder) / "1"]
    # Both ranks know rank 0's; then rank 1 forgets, or remembers something else.
    first = run_tuner(rank, world, [{2: 0.004}] * 2, str(folders[0]), kind)[0]
    if rank == 1:
        folders[1].mkdir()
        for path in folders[0].iterdir():
            (folders[1] / path.name).write_text(path.read_text().replace('"chunked"', '"serial"'))
    dist.barrier()
    second, num_timed, _, _ = run_tuner(rank, world, [{3: 0.004}] * 2, str(folders[rank]), kind)
    return first, second, num_timed


def test_ranks_that_remember_different_things_time_again_and_agree(tmp_path):
    for first, second, num_timed in run_ranks(2, run_differing, str(tmp_path)):
        assert first[:2] == ("chunked", 2)
        assert num_timed > 0
        assert second[:2] == ("chunked", 3)


def run_every_way(rank, world):
    """All choices on the same inputs: results by way of running."""
    from fusedcomm.tune import cost

    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(300, 2, 48, generator=generator)
    w = torch.randn(40, 48, generator=generator)
    results = []
    for count in range(1, 5):
        cost._MAX_CHUNKS = count
        for _ in range(2):
            y, full = all_gather_matmul(x, w, group=dist.group.WORLD, method="chunked", return_gathered=True)
            results.append((y, full, matmul_reduce_scatter(full, w, group=dist.group.WORLD, method="chunked")))
    cost._MAX_CHUNKS = 5
    y, full = all_gather_matmul(x, w, group=dist.group.WORLD, method="serial", return_gathered=True)
    return (y, full, matmul_reduce_scatter(full, w, group=dist.group.WORLD, method="serial")), results


@pytest.mark.parametrize("world", [2, 3])
def test_every_choice_moves_the_same_bits_and_repeats_itself(world):
    for serial, results in run_ranks(world, run_every_way):
        for first, second in zip(results[::2], results[1::2]):
            assert _equal(first, second), "two runs of one choice differ"
        for y, full, z in results:
            assert torch.equal(full, serial[1])
            torch.testing.assert_close(y, serial[0], rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(z, serial[2], rtol=1e-5, atol=1e-3)


def run_uneven(rank, world):
    # Rank 1 multiplies 128 times as many rows in the measurement: slower whatever else the machine does.
    x, w = torch.randn(2048 if rank == 1 else 16, 512), torch.randn(512, 512)
    sizes = propose_sizes(96, x, w, group=dist.group.WORLD, multiple=8)
    # The layers' weights cut by it give what even shares give.
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(96, 24, generator=generator), torch.randn(24, 96, generator=generator)
    x = torch.randn(10, 24, generator=generator)
    h = all_gather_matmul(x.chunk(world)[rank], up.split(sizes)[rank], group=dist.group.WORLD)
    z = matmul_reduce_scatter(h, down.split(sizes, 1)[rank], group=dist.group.WORLD)
    return sizes, z, ((x @ up.t()) @ down.t()).chunk(world)[rank]


def test_a_slow_rank_gets_a_smaller_share():
    results = run_ranks(2, run_uneven)
    assert results[0][0] == results[1][0]
    for sizes, z, expected in results:
        assert sum(sizes) == 96
        assert all(size % 8 == 0 for size in sizes)
        assert sizes[0] > sizes[1]
        torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-3)


@given(st.integers(0, 1000), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_shares_are_whole_and_proportional(total, weights):
    sizes = proportional(total, weights)
    assert sum(sizes) == total
    assert all(abs(size - total * weight / sum(weights)) < 1 for size, weight in zip(sizes, weights))
