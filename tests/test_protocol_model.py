"""The flag protocol is right, and nothing of it can be left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from protocol_model import PROGRAM, Bug, Model, Protocol, one_after_the_other
from protocol_search import search, survive

OPS = ("all_gather", "reduce_scatter")
# What ranks own. Where one owns nothing, nobody waits for it, and it can fall or run behind.
TWO_RANKS = [(2, 2), (2, 0), (0, 2), (1, 2)]
THREE_RANKS = [(2, 2, 2), (2, 0, 1), (0, 2, 0)]
# Orders of beginning and finishing, and how many buffers they need for one to be free beside those under way: that of
# two halves in turns, forward and backward, and that of a stack. The last call, or the last but one, is the first that
# takes a buffer again.
UNDER_WAY = {
    "forward": ((1, 2, -1, 3, -2, 4, -3, -4), 3),
    "backward": ((1, 2, -1, 3, -3, -2, 4, -4), 3),
    "stack": ((1, 2, 3, -3, -2, 4, 5, -5, -4, -1), 4),
}
ORDERINGS = [(op, ordering) for op in OPS for ordering in sorted(Model(Protocol(op, (2, 2))).orderings - {PROGRAM})]


def finds_bug(protocol: Protocol, *, reduced: bool = True) -> bool:
    try:
        search(protocol, reduced=reduced)
    except Bug:
        return True
    return False


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("chunks", [*TWO_RANKS, *THREE_RANKS])
def test_protocol_reads_what_was_written_for_it_and_ends(op, chunks):
    # The third call is the first that takes a buffer again; the epoch wraps in the second.
    calls = 3 if sum(chunks) > 4 else 4
    found = search(Protocol(op, chunks, order=one_after_the_other(calls)))
    assert found.ends == 1
    # Some rank has ended a call that another has not.
    assert found.lead >= 1


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("name", "chunks"),
    [*((name, chunks) for name in UNDER_WAY for chunks in TWO_RANKS), ("forward", (1, 1, 1)), ("backward", (1, 1, 1))],
)
def test_several_calls_may_be_under_way(op, name, chunks):
    order, num_buffers = UNDER_WAY[name]
    assert search(Protocol(op, chunks, order=order, num_buffers=num_buffers)).ends == 1


def test_models_hold_the_orderings_of_the_design():
    assert {ordering for op, ordering in ORDERINGS if op == "all_gather"} == {
        *("input event", "reuse barrier", "data before flag", "chunk flag", "reads before done", "join")
    }
    assert {ordering for op, ordering in ORDERINGS if op == "reduce_scatter"} == {
        *("store before count", "all tiles", "ready flag"),
        *("reuse barrier", "data before flag", "chunk flag", "reads before done", "join"),
    }


@pytest.mark.parametrize(("op", "ordering"), ORDERINGS)
def test_no_ordering_can_be_left_out(op, ordering):
    broken = [Protocol(op, chunks, without=frozenset({ordering})) for chunks in TWO_RANKS]
    assert any(finds_bug(protocol) for protocol in broken)


@pytest.mark.parametrize("op", OPS)
def test_no_buffer_may_be_taken_that_is_not_free(op):
    order = (1, 2, -2, 3, -3, -1)
    for chunks in TWO_RANKS:
        assert search(Protocol(op, chunks, order=order)).ends == 1
    assert any(finds_bug(Protocol(op, chunks, order=order, in_turn=True)) for chunks in TWO_RANKS)


def test_epochs_are_compared_modulo():
    # 0 comes after 7.
    assert any(finds_bug(Protocol("all_gather", chunks, compare="plain")) for chunks in TWO_RANKS)


@pytest.mark.parametrize("op", OPS)
def test_who_waits_for_a_dead_rank_gives_up(op):
    for chunks in [*TWO_RANKS, *THREE_RANKS]:
        for dead in range(len(chunks)):
            assert survive(Protocol(op, chunks), dead) > len(chunks)
            for order, num_buffers in UNDER_WAY.values():
                assert survive(Protocol(op, chunks, order=order, num_buffers=num_buffers), dead) > len(chunks)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wait", ["chunk flag", "reuse barrier"])
def test_no_wait_for_a_peer_can_do_without_a_limit(op, wait):
    endless = [Protocol(op, chunks, unbounded=frozenset({wait})) for chunks in TWO_RANKS]
    found = []
    for protocol in endless:
        for dead in range(2):
            try:
                survive(protocol, dead)
            except Bug as bug:
                found.append(str(bug))
    assert found
    assert all("waits for ever" in bug for bug in found)


@pytest.mark.parametrize("ordering", [None, *(ordering for op, ordering in ORDERINGS if op == "all_gather")])
def test_the_reduced_search_finds_what_the_whole_one_finds(ordering):
    for chunks in [(1, 0), (1, 1)]:
        protocol = Protocol("all_gather", chunks, order=one_after_the_other(3))
        if ordering is not None:
            protocol = replace(protocol, without=frozenset({ordering}))
        assert finds_bug(protocol) == finds_bug(protocol, reduced=False)
