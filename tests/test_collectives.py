"""Sums by tree and by levels equal one process's to the bit, whatever the length, the layout and the delays."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from torch import Tensor

from fusedcomm.comm import hierarchical, tree
from fusedcomm.comm.hierarchical import Hierarchical, level_groups, node_of_each_rank
from fusedcomm.comm.stages import wavefront
from fusedcomm.comm.tree import Tree
from fusedcomm.errors import PeerError

LENGTHS = (0, 1, 2, 7, 1000, 4099)


def values_of(rank: int, length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * rank + length))


def poison(pool, length: int) -> None:
    """Leave NaN in buffers that the next call will take."""
    buffers = [pool.take((length,), torch.empty(0)) for _ in range(4)]
    for buffer in buffers:
        pool.give(buffer.fill_(torch.nan))


def in_order(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def by_tree(terms: list[Tensor]) -> Tensor:
    power = 1 << (len(terms).bit_length() - 1)
    terms = [a + terms[index + power] if index + power < len(terms) else a for index, a in enumerate(terms[:power])]
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2])]
    return terms[0]


def by_levels(terms: list[Tensor], nodes: list[int]) -> Tensor:
    members = [[term for term, node in zip(terms, nodes) if node == number] for number in range(max(nodes) + 1)]
    return in_order([in_order(summands) for summands in members])


def _sum_all(rank: int, world: int, nodes: list[int] | None, delay: bool) -> list[Tensor]:
    """Every length twice, all started before the first is waited for."""
    group = dist.group.WORLD
    collective = Tree(group) if nodes is None else Hierarchical(*level_groups(group, nodes, timeout_s=20))
    jitter = random.Random(rank)
    flats = [values_of(rank, length) for length in (*LENGTHS, *LENGTHS)]
    pending = []
    for flat in flats:
        poison(tree._POOL if nodes is None else hierarchical._POOL, flat.numel())
        if delay:
            time.sleep(jitter.random() * 0.02)
        pending.append(collective.start(flat, 0))
    for work in pending:
        work.wait()
    return flats


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_tree_equals_one_process_bitwise(world):
    for flats in run_ranks(world, _sum_all, None, world == 3):
        for length, flat in zip((*LENGTHS, *LENGTHS), flats):
            assert torch.equal(flat, by_tree([values_of(rank, length) for rank in range(world)]))


@pytest.mark.parametrize(
    "nodes",
    [[0], [0, 0], [0, 1], [0, 0, 0], [0, 1, 2], [0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]],
    ids=lambda nodes: "".join(map(str, nodes)),
)
def test_hierarchical_equals_one_process_bitwise(nodes, monkeypatch):
    for flats in run_ranks(len(nodes), _sum_in_small_chunks, nodes):
        for length, flat in zip((*LENGTHS, *LENGTHS), flats):
            assert torch.equal(flat, by_levels([values_of(rank, length) for rank in range(len(nodes))], nodes))


def _sum_in_small_chunks(rank: int, world: int, nodes: list[int]) -> list[Tensor]:
    """So small that jobs outnumber the stages' room."""
    whole, hierarchical.CHUNK_BYTES = hierarchical.CHUNK_BYTES, 492
    try:
        return _sum_all(rank, world, nodes, world == 4)
    finally:
        hierarchical.CHUNK_BYTES = whole


def test_hierarchical_sums_do_not_depend_on_where_a_buffer_is_cut():
    whole, pieces = run_ranks(4, _sum_whole_and_in_pieces, [0, 0, 1, 1])[1]
    assert torch.equal(whole, pieces)


def _sum_whole_and_in_pieces(rank: int, world: int, nodes: list[int]) -> tuple[Tensor, Tensor]:
    collective = Hierarchical(*level_groups(dist.group.WORLD, nodes, timeout_s=20))
    whole, pieces = values_of(rank, 1001), values_of(rank, 1001)
    collective.start(whole, 0).wait()
    pending = [collective.start(piece, 0) for piece in pieces.split([64, 0, 640, 297])]
    for work in pending:
        work.wait()
    return whole, pieces


def _sum_in_step(rank: int, world: int, nodes: list[int]) -> Tensor:
    """The order in which a GPU's stream runs the jobs: no threads."""
    collective = Hierarchical(*level_groups(dist.group.WORLD, nodes, timeout_s=20))
    flat = values_of(rank, 1000)
    jobs = [collective._sum(chunk, None, call) for call, chunk in enumerate(flat.split(90))]
    for job in wavefront(jobs, 5):
        next(job, None)
    assert [next(job, "over") for job in jobs] == ["over"] * len(jobs)
    return flat


def test_hierarchical_equals_one_process_in_the_order_of_a_stream():
    nodes = [0, 0, 1, 1]
    for flat in run_ranks(4, _sum_in_step, nodes):
        assert torch.equal(flat, by_levels([values_of(rank, 1000) for rank in range(4)], nodes))


def test_wavefront_lets_every_job_take_every_step_and_the_first_one_finish_early():
    order = list(wavefront([iter(()) for _ in range(5)], 3))
    assert len(order) == 15
    assert [order.count(job) for job in dict.fromkeys(order)] == [3] * 5
    # Jobs 0, 1 and 2 are under way in turn 2, where the newest goes first.
    assert order[:6] == [order[0], order[1], order[0], order[3], order[1], order[0]]


def _sum_with_one_rank_missing(rank: int, world: int, nodes: list[int] | None) -> None:
    group = dist.group.WORLD
    collective = Tree(group) if nodes is None else Hierarchical(*level_groups(group, nodes, timeout_s=2))
    if rank == world - 1:
        time.sleep(5)
        return
    # Nothing hangs: also a piece that was started after the failure ends.
    pending = [collective.start(values_of(rank, 300_000), 0) for _ in range(12)]
    for work in pending[:-1]:
        with pytest.raises(PeerError):
            work.wait()
    pending[-1].wait()


@pytest.mark.parametrize("nodes", [None, [0, 1]])
def test_a_missing_peer_is_named_within_the_time_out(nodes):
    found = run_ranks(2, _sum_with_one_rank_missing, nodes, fresh_timeout_s=2, return_exceptions=True)
    assert isinstance(found[0], PeerError), found
    assert found[0].rank == 1
    assert "did not deliver its" in str(found[0])


def _layouts(rank: int, world: int) -> list[object]:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=r"nodes hold 2, 1 ranks of the group; all must hold equally many"):
        level_groups(group, [0, 0, 1], timeout_s=5)
    return [node_of_each_rank(group), node_of_each_rank(group, 2), node_of_each_rank(group, 1)]


def test_nodes_are_those_of_the_hosts_or_as_given():
    for layouts in run_ranks(3, _layouts):
        assert layouts == [(0, 0, 0), (0, 0, 1), (0, 1, 2)]
