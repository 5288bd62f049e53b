"""The chunk schedule, checked as data for every world size up to 16: no process group is needed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedcomm.comm.ring import all_gather_steps, chunk_sizes, cut, reduce_scatter_steps, tapered

WORLDS = range(1, 17)
DIRECTIONS = ["pairs", "ring", "both_ways"]


def uneven(world: int) -> tuple[int, ...]:
    return tuple((rank * 5) % 7 for rank in range(world))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize(
    "steps_of",
    [reduce_scatter_steps, *(partial(all_gather_steps, direction=direction) for direction in DIRECTIONS)],
)
def test_every_send_meets_its_receive(world, num_chunks, steps_of):
    sizes = uneven(world)
    schedules = [steps_of(rank, sizes, num_chunks) for rank in range(world)]
    # Messages of one pair of ranks keep their order, so the n-th send must be the n-th receive.
    for src in range(world):
        for dst in range(world):
            sends = [s.send for s in schedules[src] if s.dst == dst and s.send]
            recvs = [s.recv for s in schedules[dst] if s.src == src and s.recv]
            assert sends == recvs


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("steps_of", [all_gather_steps, reduce_scatter_steps])
def test_no_two_transfers_share_a_link(world, steps_of):
    schedules = [steps_of(rank, (6,) * world, 2) for rank in range(world)]
    assert len({len(steps) for steps in schedules}) == 1
    for step in zip(*schedules):
        assert len({s.dst for s in step}) == world, "two senders would share a receiver's link"
        assert len({s.src for s in step}) == world
        for rank, s in enumerate(step):
            assert s.dst != rank
            assert s.src != rank
            assert step[s.dst].src == rank, "the receiver waits for another rank at this step"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_all_gather_uses_every_row_once(world, direction):
    sizes = uneven(world)
    for rank in range(world):
        own = sum(sizes[:rank])
        steps = all_gather_steps(rank, sizes, 3, direction)
        rows = [row for s in steps if s.recv for row in range(s.recv.start, s.recv.stop)]
        assert sorted(rows + list(range(own, own + sizes[rank]))) == list(range(sum(sizes)))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_all_gather_sends_what_is_there_from_the_distance_before(world, direction):
    sizes = uneven(world)
    for rank in range(world):
        steps = all_gather_steps(rank, sizes, 3, direction)
        for step in steps:
            if step.send is None:
                continue
            before = [s.recv for s in steps if s.distance == step.distance - 1 and s.recv]
            rows = {row for chunk in before for row in range(chunk.start, chunk.stop)}
            rows |= set(range(sum(sizes[:rank]), sum(sizes[: rank + 1])))
            assert rows.issuperset(range(step.send.start, step.send.stop))
            assert direction == "pairs" or step.dst in {(rank - 1) % world, (rank + 1) % world}


@pytest.mark.parametrize("world", range(2, 17))
def test_both_ways_take_half_the_hops_and_load_each_direction_with_half(world):
    steps = all_gather_steps(0, (8,) * world, 1, "both_ways")
    assert max(step.distance for step in steps) == world // 2
    down = sum(step.dst == world - 1 for step in steps)
    assert world == 2 or abs(down - (len(steps) - down)) <= 1


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_computes_every_row_once_and_receives_own_rows_from_all(world):
    sizes = uneven(world)
    for rank in range(world):
        own = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        steps = reduce_scatter_steps(rank, sizes, 3)
        sent = [row for s in steps if s.send for row in range(s.send.start, s.send.stop)]
        assert sorted(sent + list(own)) == list(range(sum(sizes)))
        assert all(s.send.owner == s.dst for s in steps if s.send)
        for peer in range(world):
            got = [row for s in steps if s.src == peer and s.recv for row in range(s.recv.start, s.recv.stop)]
            assert sorted(got) == (list(own) if peer != rank else [])


@given(total=st.integers(0, 50), world=st.integers(1, 16))
def test_chunk_sizes_cut_as_torch_does(total, world):
    sizes = chunk_sizes(total, world)
    pieces = [len(piece) for piece in torch.empty(total).chunk(world)]
    assert len(sizes) == world
    assert list(sizes) == pieces + [0] * (world - len(pieces))


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6), weights=st.lists(st.integers(1, 9), min_size=1))
def test_cut_covers_each_shard_without_empty_chunks(sizes, weights):
    row = 0
    for owner, size in enumerate(sizes):
        for chunk in cut(sizes, owner, weights):
            assert (chunk.owner, chunk.start) == (owner, row)
            assert chunk.rows > 0
            assert abs(chunk.rows - size * max(weights) / sum(weights)) <= size * max(weights) / sum(weights) + 1
            row = chunk.stop
        assert row == sum(sizes[: owner + 1])


def test_what_nothing_can_hide_is_small():
    assert tapered(1) == (1,)
    assert tapered(4) == (4, 2, 1, 1)
    last_arrival = all_gather_steps(0, (64,) * 4, 4)[-4:]
    assert [step.recv.rows for step in last_arrival] == [32, 16, 8, 8]
    first_departure = reduce_scatter_steps(0, (64,) * 4, 4)[:4]
    assert [step.send.rows for step in first_departure] == [8, 8, 16, 32]
    for steps in (all_gather_steps(0, (64,) * 4, 4), reduce_scatter_steps(0, (64,) * 4, 4)):
        assert len(steps) <= 4 + 1 + 4, "between the ends, shards travel whole"
