"""What `auto` chooses: the same on every rank, remembered, and never what gains nothing."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from op_cases import equal

from fusedcomm import all_gather_matmul, matmul_reduce_scatter
from fusedcomm.comm import transport
from fusedcomm.comm.channel import channel_of
from fusedcomm.comm.hierarchical import level_groups
from fusedcomm.comm.transport import flag_transport_of
from fusedcomm.ops.all_gather_matmul import _forward as gather_forward
from fusedcomm.ops.chunked import Call
from fusedcomm.ops.matmul_reduce_scatter import _forward as scatter_forward
from fusedcomm.tune import cache, propose_sizes
from fusedcomm.tune.cache import Tuner, fastest, tuner_of
from fusedcomm.tune.cost import (
    Choice,
    Link,
    Links,
    Seconds,
    all_reduce_s,
    candidates,
    chunked,
    expected_s,
    fastest_algorithm,
    fused,
    worth_timing,
)
from fusedcomm.tune.links import measure_links
from fusedcomm.tune.speed import proportional


@pytest.mark.parametrize("rows", [1, 31, 64, 300, 4096, 10**6])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_candidates_leave_every_chunk_enough_rows(rows, world):
    options = candidates(world=world, rows=rows)
    assert options[0].method == "serial"
    assert [option.num_chunks for option in options[1:]] == list(range(1, len(options)))
    most = chunked("", world=world, rows=rows).num_chunks
    assert most == 1 or rows / world / 2 ** (most - 1) >= 128


# A millisecond and 1 Gbit/s across, ten times less and more inside.
LINKS = Links(Link(1e-4, 1.25e9), Link(1e-3, 1.25e8))


def test_the_cost_of_a_sum_is_that_of_the_busiest_link():
    two_by_two = (0, 0, 1, 1)
    # Each of 6 rounds moves a quarter over each node's link.
    assert all_reduce_s("ring", 10**8, two_by_two, LINKS) == pytest.approx(6 * (1e-3 + 0.25 * 0.8))
    # Placed in turns, two edges of the ring leave each node.
    assert all_reduce_s("ring", 10**8, (0, 1, 0, 1), LINKS) == pytest.approx(6 * (1e-3 + 2 * 0.25 * 0.8))
    # A round inside, and one in which both ranks of a node send all of it.
    assert all_reduce_s("tree", 10**8, two_by_two, LINKS) == pytest.approx(1e-4 + 0.08 + 1e-3 + 2 * 0.8)
    by_levels_s = all_reduce_s("hierarchical", 10**8, two_by_two, LINKS)
    assert by_levels_s == pytest.approx(2e-4 + 2e-3 + 0.8, rel=0.01)
    assert all_reduce_s("hierarchical", 10**8, (0, 0, 1), LINKS) == math.inf
    # Rank 4 hands its summand in, and gets the sum, while the four others take two rounds.
    assert all_reduce_s("tree", 1000, (0,) * 5, LINKS) == pytest.approx(4 * (1e-4 + 1000 / 1.25e9))


def test_small_buffers_go_by_tree_and_large_ones_by_levels():
    nodes = (0, 0, 1, 1)
    assert fastest_algorithm(1000, nodes, LINKS) == "tree"
    assert fastest_algorithm(10**8, nodes, LINKS) == "hierarchical"
    assert fastest_algorithm(10**8, (0, 0, 1), LINKS) == "ring"


@pytest.mark.parametrize(
    ("nodes", "last_by_tree", "then"),
    [
        # What takes as long as a latency of 100 us, at 1.25 GB/s.
        ((0, 0), 125_000, "ring"),
        # 1.1 ms of latency; each byte passes once inside, and twice over the link across.
        ((0, 0, 1, 1), int(1.1e-3 / (1 / 1.25e9 + 2 / 1.25e8)), "hierarchical"),
    ],
)
def test_a_tree_is_chosen_up_to_the_size_at_which_its_bytes_take_longer_than_its_latency(nodes, last_by_tree, then):
    for num_bytes in (64, last_by_tree // 4, last_by_tree - 10):
        assert fastest_algorithm(num_bytes, nodes, LINKS) == "tree"
    for num_bytes in (last_by_tree + 10, 2 * last_by_tree, 512 * 1024, 10**7):
        assert fastest_algorithm(num_bytes, nodes, LINKS) == then


def _measured(rank: int, world: int) -> Links:
    group = dist.group.WORLD
    return measure_links(group, *level_groups(group, (0, 0, 1, 1), timeout_s=20), torch.device("cpu"))


def test_measured_links_are_the_same_on_every_rank():
    first, *others = run_ranks(4, _measured)
    assert all(links == first for links in others)
    for link in (first.in_node, first.across):
        assert 0 < link.latency_s < 1
        assert 1e5 < link.bytes_per_s < 1e12


def test_only_what_may_be_fastest_is_timed():
    options = candidates(world=4, rows=10**5)
    balanced = worth_timing(options, Seconds(serial=2.0, wire=1.0, piece=1e-4), directions=(), nodes=[0] * 4)
    assert balanced[0] == options[0]
    # A single chunk would leave a quarter of the GEMM unhidden.
    assert [option.num_chunks for option in balanced[1:]] == [2, 3, 4, 5]
    # Pieces that cost as much as the GEMM are best few.
    costly = worth_timing(options, Seconds(serial=1.1, wire=0.1, piece=0.5), directions=(), nodes=[0] * 4)
    assert [option.num_chunks for option in costly[1:]] == [1, 2]
    # One kernel has no pieces.
    options.append(fused("timed", world=4, rows=10**5))
    costly = worth_timing(options, Seconds(serial=1.1, wire=0.1, piece=0.5), directions=(), nodes=[0] * 4)
    assert [option.method for option in costly[1:]] == ["fused"]


def test_directions_are_timed_where_they_differ():
    seconds = Seconds(serial=2.0, wire=1.0, piece=1e-4)

    def directions(nodes, *ways):
        options = candidates(world=len(nodes), rows=10**5)
        return {option.direction for option in worth_timing(options, seconds, directions=ways, nodes=nodes)}

    assert directions([0, 0], "ring", "both_ways") == directions([0, 0, 1]) == {"pairs"}
    assert directions([0, 0, 1], "ring", "both_ways") == {"pairs", "ring", "both_ways"}
    for nodes in ([0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 1]):
        assert directions(nodes, "by_node") == {"pairs"}
    assert directions([0, 1, 0, 1], "by_node") == {"pairs", "by_node"}


@given(
    num_chunks=st.integers(1, 5),
    serial=st.floats(1e-6, 10),
    share=st.floats(0, 1.5),
    piece=st.floats(0, 1),
    world=st.integers(2, 16),
)
def test_nothing_is_expected_below_the_limit(num_chunks, serial, share, piece, world):
    wire = min(serial, share * serial)
    expected = expected_s(num_chunks, Seconds(serial, share * serial, piece), world)
    assert expected >= max(wire, serial - wire)


# Seconds that each way of running is made to take, by rank.
CASES = {
    "a chunked one is faster": ([{"serial": 0.03, 2: 0.004}] * 2, ("chunked", 2)),
    "nothing gains": ([{"serial": 0.004}] * 2, ("serial", 1)),
    "the slowest rank counts": (
        [{"serial": 0.03, 2: 0.05, 3: 0.01}, {"serial": 0.03, 2: 0.004, 3: 0.01}],
        ("chunked", 3),
    ),
    "one kernel is faster": ([{"serial": 0.03, 2: 0.02, "fused": 0.004}] * 2, ("fused", 2)),
}


def run_tuner(rank, world, seconds, folder, kind):
    os.environ["FUSEDCOMM_CACHE"] = folder
    tuner = Tuner(channel_of(dist.group.WORLD))
    runs = []

    def run(choice):
        runs.append(choice)
        way = choice.num_chunks if choice.method == "chunked" else choice.method
        time.sleep(seconds[rank].get(way, 0.03))

    arguments = {
        "rows": 8192,
        "shapes": kind,
        "local": "",
        # On any wire it takes far longer than everything else, whatever the number of chunks: all are timed.
        "wire_bytes": 10**12,
        "weight_bytes": 1,
        "directions": ("ring",),
        "device": torch.device("cpu"),
        "can_fuse": True,
        "run": run,
    }
    # The machine's real rate varies with what else runs on it, and another link would be timed anew. On a GPU there may
    # be a transport for the one kernel.
    carrier = "symmetric" if "fused" in seconds[rank] else ""
    with (
        patch.object(Tuner, "_measure_link", lambda self, device: cache._Link([0] * world, 1000.0)),
        patch.object(Tuner, "_carrier", lambda self, op, device: carrier),
    ):
        first = tuner.choose("op", "auto", **arguments)
        num_timed = len(runs)
        assert tuner.choose("op", "auto", **arguments) == first
        with (
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        ):
            # A graph takes what is known.
            assert tuner.choose("op", "auto", **arguments) == first
            unknown = tuner.choose("op", "auto", **arguments | {"shapes": "others"})
            assert unknown.reason == "a graph is captured: nothing can be timed"
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


SERIAL, TWO, FOUR = Choice("serial", 1, ""), Choice("chunked", 2, ""), Choice("chunked", 4, "")


@pytest.mark.parametrize(
    ("rounds", "method", "num_chunks"),
    [
        ([(1.0, 0.8, 0.7)] * 3, "chunked", 4),
        # Long calls are timed once.
        ([(10.0, 9.0, 11.0)], "chunked", 2),
        ([(1.0, 0.98, 1.1)] * 3, "serial", 1),
        # By luck: in the middle it is faster, but a third of the rounds say otherwise.
        ([(1.0, 0.9, 2.0), (1.1, 0.95, 2.0), (1.0, 1.3, 2.0)], "serial", 1),
        # A single round that is late is luck too.
        ([(1.0, 0.8, 2.0)] * 11 + [(1.0, 5.0, 2.0)], "chunked", 2),
    ],
)
def test_what_overlaps_is_taken_if_most_rounds_say_so(rounds, method, num_chunks):
    choice = fastest([SERIAL, TWO, FOUR], rounds)
    assert (choice.method, choice.num_chunks) == (method, num_chunks)


def test_what_is_as_fast_as_serial_is_hardly_ever_taken():
    """Times of a tiny call on a busy machine: a few tenths more or less, and now and then several times as much."""
    generator = torch.Generator().manual_seed(0)

    def taken(factor: float) -> int:
        times = (0.25 * torch.randn(200, cache._num_rounds(5e-4), 2, generator=generator)).exp()
        times *= 1 + 3 * (torch.rand(times.shape, generator=generator) < 0.05)
        times[..., 1] *= factor
        return sum(fastest([SERIAL, TWO], rounds).method == "chunked" for rounds in times.tolist())

    assert taken(1.0) <= 10
    assert taken(0.6) >= 190


@pytest.mark.parametrize(("major", "reason"), [(9, ""), (12, "RTX is none of sm_80, sm_90, sm_100, gfx942")])
def test_a_gpu_that_kernels_do_not_know_is_named(major, reason):
    properties = SimpleNamespace(name="RTX", gcnArchName="RTX", major=major, minor=0)
    with patch.object(torch.cuda, "get_device_properties", lambda device: properties):
        assert transport._unknown_gpu(torch.device("cuda", 0)) == reason


def run_on_an_unknown_gpu(rank, world):
    group, device = dist.group.WORLD, torch.device("cuda", 0)
    reason = "RTX is none of those" if rank else ""
    with (
        patch.object(transport, "_unknown_gpu", lambda device: reason),
        patch.object(transport, "_check_kernels", lambda op, device: None),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        carrier = tuner_of(group)._carrier("op", device)
        with pytest.raises(ValueError, match=r"^op: method='fused' cannot run: on rank 1, RTX is none of those"):
            flag_transport_of(group, "op", device)
    return carrier


def test_where_kernels_do_not_know_a_gpu_the_other_ways_are_timed():
    assert run_ranks(2, run_on_an_unknown_gpu) == ["", ""]


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


def run_homeless(rank, world):
    # As in a container whose user has no name.
    with (
        patch.dict(os.environ, {"FUSEDCOMM_CACHE": "", "XDG_CACHE_HOME": ""}),
        patch.object(Path, "home", side_effect=RuntimeError("Could not determine home directory.")),
    ):
        return all_gather_matmul(torch.ones(64, 3), torch.ones(2, 3), group=dist.group.WORLD).unique().tolist()


def test_without_a_home_nothing_is_remembered():
    assert run_ranks(2, run_homeless) == [[3.0]] * 2


def run_backwards(rank, world, folder):
    """How many kinds of backward calls were timed after each of several calls on tensors of the same shapes."""
    os.environ["FUSEDCOMM_CACHE"] = folder
    timed, counts = [], []

    def time_none(self, options, *rest):
        timed.append(options)
        return options[0]

    with patch.object(Tuner, "_time", time_none):
        for op, options in (
            (all_gather_matmul, {}),
            (all_gather_matmul, {"save": "gathered"}),
            (matmul_reduce_scatter, {}),
        ):
            for x_needs, w_needs in ((True, True), (False, True), (True, False), (True, True)):
                x, w = torch.ones(128, 8, requires_grad=x_needs), torch.ones(8, 8, requires_grad=w_needs)
                y = op(x, w, group=dist.group.WORLD, **options)
                timed.clear()
                y.sum().backward()
                counts.append(len(timed))
    return counts


def test_what_backward_has_to_do_makes_its_kind(tmp_path):
    """With nothing to hide `serial` is as good, which says nothing about a layer of the same shapes."""
    for counts in run_ranks(2, run_backwards, str(tmp_path)):
        # Where the input was kept, or needs no dw, dx is all that travels.
        assert counts == [1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0]


WAYS = [
    Choice("serial", 1, ""),
    *(Choice("chunked", count, "", direction) for direction in ("pairs", "ring", "both_ways") for count in range(1, 5)),
]


def run_every_way(rank, world, rows):
    """Twice in every way, on the same inputs."""
    generator = torch.Generator().manual_seed(rank)
    # Uneven, so that chunks of different shards differ too.
    sizes = tuple(rows + 3 * other for other in range(world))
    x = torch.randn(sizes[rank], 2, 48, generator=generator)
    w = torch.randn(40, 48, generator=generator)
    results = []
    for way in WAYS:
        for _ in range(2):
            call = Call("op", dist.group.WORLD, sizes, way)
            full, y = gather_forward(x, [w], [], call, None, keep=True)
            results.append((y, full, scatter_forward([full], w, None, None, call)))
    return results


# Few rows are sent by the calling thread, many by the sender's.
@pytest.mark.parametrize("rows", [40, 800])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_choice_moves_the_same_bits_and_repeats_itself(world, rows):
    for results in run_ranks(world, run_every_way, rows):
        serial = results[0]
        for first, second in zip(results[::2], results[1::2]):
            assert equal(first, second), "two runs of one choice differ"
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
