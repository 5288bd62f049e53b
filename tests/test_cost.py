"""What the models of ops and sums expect: what is timed for `auto`, and which algorithm a sum takes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from fusedcomm.comm.hierarchical import level_groups
from fusedcomm.tune.cost import (
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
