"""The chunk schedule, checked as data for every world size up to 16: no process group is needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedcomm.comm.ring import all_gather_steps, chunk_sizes, cut, reduce_scatter_steps

WORLDS = range(1, 17)


def uneven(world: int) -> list[int]:
    return [(rank * 5) % 7 for rank in range(world)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("steps_of", [all_gather_steps, reduce_scatter_steps])
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
    schedules = [steps_of(rank, [6] * world, 2) for rank in range(world)]
    assert len({len(steps) for steps in schedules}) == 1
    for step in zip(*schedules):
        assert len({s.dst for s in step}) == world, "two senders would share a receiver's link"
        assert len({s.src for s in step}) == world
        for rank, s in enumerate(step):
            assert s.dst != rank
            assert s.src != rank
            assert step[s.dst].src == rank, "the receiver waits for another rank at this step"


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_uses_every_row_once_and_sends_only_own_rows(world):
    sizes = uneven(world)
    for rank in range(world):
        own = sum(sizes[:rank])
        steps = all_gather_steps(rank, sizes, 3)
        # A rank sends nothing that it must first receive: all it sends is its own.
        assert all(s.send.owner == rank for s in steps if s.send)
        rows = [row for s in steps if s.recv for row in range(s.recv.start, s.recv.stop)]
        assert sorted(rows + list(range(own, own + sizes[rank]))) == list(range(sum(sizes)))


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


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6), num_chunks=st.integers(1, 5))
def test_cut_covers_each_shard_with_nearly_equal_chunks(sizes, num_chunks):
    row = 0
    for owner, (size, chunks) in enumerate(zip(sizes, cut(sizes, num_chunks))):
        assert len(chunks) == min(num_chunks, size)
        for chunk in chunks:
            assert (chunk.owner, chunk.start) == (owner, row)
            row = chunk.stop
        if chunks:
            assert max(c.rows for c in chunks) - min(c.rows for c in chunks) <= 1
    assert row == sum(sizes)
