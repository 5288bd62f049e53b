"""matmul_all_reduce on real gloo ranks, against the oracle in fusedcomm.reference; and its schedule as data."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from helpers import RankFailure, assert_as_accurate, run_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedcomm import PeerError, matmul_all_reduce, matmul_reduce_scatter, recording, reference
from fusedcomm.comm.pool import STAGING
from fusedcomm.comm.ring import all_reduce_blocks, chunk_sizes
from fusedcomm.ops.chunked import Call
from fusedcomm.ops.matmul_all_reduce import _forward as all_reduce_forward
from fusedcomm.tune.cost import Choice, chunked

on_ranks = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@dataclass(frozen=True)
class Case:
    world: int
    lead: tuple[int, ...]
    k: int
    n: int
    dtype: torch.dtype
    bias: bool
    method: str
    defer: bool
    contiguous: bool
    seed: int


@st.composite
def cases(draw) -> Case:
    return Case(
        world=draw(st.integers(1, 4)),
        lead=tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))),
        k=draw(st.integers(1, 9)),
        n=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        bias=draw(st.booleans()),
        method=draw(st.sampled_from(["serial", "chunked", "auto"])),
        defer=draw(st.booleans()),
        contiguous=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def inputs(case: Case, dtype: torch.dtype, absolute: bool = False):
    """Every rank's x and w, the bias and `dy`, rounded to the case's dtype; absolute values if asked for."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator).to(case.dtype).to(dtype)
        return values.abs() if absolute else values

    # Ranks may hold different shares of K.
    ks = [case.k + rank % 2 for rank in range(case.world)]
    return [draw(*case.lead, k) for k in ks], [draw(case.n, k) for k in ks], draw(case.n), draw(*case.lead, case.n)


def leaf(tensor: Tensor, contiguous: bool = True) -> Tensor:
    if not contiguous and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def late(rank: int, case: Case) -> None:
    """One rank, chosen by the seed, comes late: it must change nothing."""
    if case.seed % (2 * case.world) == rank:
        time.sleep(random.Random(case.seed).uniform(0.0, 0.05))


def run_case(rank: int, world: int, case: Case):
    xs, ws, bias, dy = inputs(case, case.dtype)
    x, w, b = leaf(xs[rank], case.contiguous), leaf(ws[rank], case.contiguous), leaf(bias)
    deferred = []
    late(rank, case)
    y = matmul_all_reduce(
        x,
        w,
        group=dist.group.WORLD,
        bias=b if case.bias else None,
        defer_wgrad=(lambda weight, gradient: deferred.append((weight, gradient.kept()))) if case.defer else None,
        method=case.method,
    )
    y.backward(dy)
    for weight, gradient in deferred:
        assert weight is w
        assert weight.grad is None
        weight.grad = gradient.compute()
    return [y.detach(), x.grad, w.grad, *([b.grad] if case.bias else [])]


def expect(case: Case, dtype: torch.dtype, absolute: bool = False):
    """By rank: y, dx, dw and db."""
    xs, ws, bias, dy = inputs(case, dtype, absolute)
    leaves = [tensor.requires_grad_() for tensor in [*xs, *ws, bias]]
    y = reference.matmul_all_reduce(xs, ws, bias=bias if case.bias else None)[0]
    y.backward(dy)
    return [(y.detach(), x.grad, w.grad, leaves[-1].grad) for x, w in zip(xs, ws)]


@on_ranks
@given(case=cases())
def test_matmul_all_reduce_matches_reference(case):
    results = run_ranks(case.world, run_case, case)
    exact, plain, terms = expect(case, torch.float64), expect(case, case.dtype), expect(case, torch.float64, True)
    for rank, result in enumerate(results):
        assert torch.equal(result[0], results[0][0]), "all ranks must hold the same bits"
        for i, tensor in enumerate(result):
            name = f"{('y', 'dx', 'dw', 'db')[i]} of rank {rank}"
            assert_as_accurate(tensor, exact[rank][i], plain[rank][i], terms=terms[rank][i], name=name)


BIG = Case(4, (600, 2), 48, 40, torch.bfloat16, True, "chunked", False, True, 3)


@pytest.mark.parametrize("method", ["serial", "chunked"])
def test_two_runs_and_all_ranks_are_bit_equal(method):
    case = replace(BIG, method=method)
    first, second = run_ranks(4, run_case, case), run_ranks(4, run_case, case)
    for before, after in zip(first, second):
        assert all(torch.equal(a, b) for a, b in zip(before, after))
        assert torch.equal(before[0], first[0][0])
    exact, plain, terms = expect(case, torch.float64), expect(case, case.dtype), expect(case, torch.float64, True)
    assert_as_accurate(first[0][0], exact[0][0], plain[0][0], terms=terms[0][0])


def run_order(rank, world):
    terms = [torch.full((7, 1), [1e8, 1.0, -1e8][rank]), torch.full((7, 1), [256.0, 1.0, 1.0][rank]).bfloat16()]
    return [
        matmul_all_reduce(term, term.new_ones(1, 1), group=dist.group.WORLD, method="chunked").unique().tolist()
        for term in terms
    ]


def test_sums_are_taken_in_rank_order_and_in_fp32():
    for wide, narrow in run_ranks(3, run_order):
        assert wide == [0.0], "(1e8 + 1) - 1e8"
        assert narrow == [258.0], "256 + 1 is 256 in bfloat16"


@pytest.mark.parametrize(
    "nodes", [(), (0, 0, 1, 1), (0, 1, 0, 1), (2, 2, 2, 5, 5, 5), (0, 1, 2, 3), (0, 0, 0)], ids=str
)
@given(world=st.integers(2, 5), rows=st.integers(0, 70), num_chunks=st.integers(1, 5))
@settings(deadline=None, derandomize=True)
def test_every_partial_counts_once_and_every_sum_reaches_everybody(nodes, world, rows, num_chunks):
    world = len(nodes) or world
    blocks = [all_reduce_blocks(rank, world, rows, num_chunks, nodes) for rank in range(world)]
    assert len({len(of_rank) for of_rank in blocks}) == 1
    # By source and destination, in order: what one sends and the other expects.
    sends, receives = defaultdict(list), defaultdict(list)
    # Whose partials of a row a rank has in its sum, and how often it gets the finished sum of it.
    summed = torch.eye(world, dtype=torch.int64)[:, :, None].repeat(1, 1, rows)
    gathered = torch.zeros(world, rows, dtype=torch.int64)
    for level in range(len(blocks[0][0]) if blocks[0] else 0):
        before = summed.clone()
        for rank in range(world):
            for block in blocks[rank]:
                own = slice(block[level].own.start, block[level].own.stop)
                for step in block[level].scatter:
                    if step.send is not None:
                        sends[rank, step.dst].append(step.send)
                    if step.recv is not None:
                        assert step.recv == block[level].own
                        receives[step.src, rank].append(step.recv)
                        summed[rank, :, own] += before[step.src, :, own]
    for rank in range(world):
        for block in blocks[rank]:
            own = slice(block[-1].own.start, block[-1].own.stop)
            assert summed[rank, :, own].eq(1).all()
            gathered[rank, own] += 1
            for level in block[::-1]:
                for step in level.gather:
                    if step.send is not None:
                        assert gathered[rank, step.send.start : step.send.stop].eq(1).all()
                        sends[rank, step.dst].append(step.send)
                    if step.recv is not None:
                        receives[step.src, rank].append(step.recv)
                for step in level.gather:
                    if step.recv is not None:
                        gathered[rank, step.recv.start : step.recv.stop] += 1
    assert sends == receives
    assert gathered.eq(1).all()


def run_by_node(rank, world, nodes, method, dtype):
    generator = torch.Generator().manual_seed(rank)
    x, w = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((333, 24), (20, 24)))
    bias = torch.arange(20, dtype=dtype)
    calls = [
        Call("op", dist.group.WORLD, chunk_sizes(333, world), Choice(method, count, "", direction, way))
        for count in (1, 4)
        for direction, way in (("pairs", ()), ("by_node", nodes))
    ]
    return x, w, bias, [all_reduce_forward(x, w, bias, call) for call in calls for _ in range(2)]


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("method", ["serial", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_by_node_match_reference_and_are_the_same_everywhere(nodes, method, dtype):
    replies = run_ranks(4, run_by_node, nodes, method, dtype)
    bias = replies[0][2]

    def expect(dtype):
        xs, ws = ([reply[index].to(dtype) for reply in replies] for index in (0, 1))
        return sum(x.to(dtype) @ w.to(dtype).t() for x, w in zip(xs, ws)) + bias.to(dtype)

    exact, plain = expect(torch.float64), expect(dtype)
    for index, result in enumerate(replies[0][3]):
        assert_as_accurate(result, exact, plain)
        assert torch.equal(result, replies[0][3][index ^ 1]), "two runs differ"
        for reply in replies[1:]:
            assert torch.equal(result, reply[3][index])


def run_overlap(rank, world):
    x, w = torch.randn(2048, 2, 64), torch.randn(64, 64)
    with recording() as record:
        y = matmul_all_reduce(x, w, group=dist.group.WORLD, method="chunked")
    computes = [event for event in record.events if event.kind == "compute" and event.name == "matmul_all_reduce"]
    transfers = [event for event in record.events if event.kind == "transfer"]
    before = sum(event.end_s < computes[-1].start_s for event in transfers)
    moved = sum(event.num_bytes for event in transfers)
    return len(computes), before, moved, y.nbytes, dict(record.paths), {event.thread for event in transfers}


def test_chunked_sends_each_byte_once_and_sums_while_it_computes():
    num_blocks = len(all_reduce_blocks(0, 2, 4096, chunked("", world=2, rows=4096).num_chunks))
    assert num_blocks == 9
    for computes, before, moved, result_bytes, paths, threads in run_ranks(2, run_overlap):
        assert computes == 2 * num_blocks, "the peer's rows and the own ones of each block"
        # One after the other, none would be; how many of the 18 are depends on the machine.
        assert before >= num_blocks // 2, "partials and sums of earlier blocks are over before the last GEMM"
        assert moved == result_bytes, "half of the rows as partials, half as sums"
        assert paths == {"matmul_all_reduce:chunked": 1}
        assert threads == {"fusedcomm-sender"}


def run_many(rank, world):
    x, w = torch.randn(256, 2, 64), torch.randn(64, 64)
    allocations = []
    for _ in range(4):
        matmul_all_reduce(x, w, group=dist.group.WORLD, method="chunked")
        allocations.append(STAGING.num_allocations)
    return allocations


def test_staging_is_allocated_once():
    for allocations in run_ranks(2, run_many):
        assert len(set(allocations)) == 1


def run_late(rank, world):
    """Large enough for the sender thread; in every call another rank comes late, with another exchange under way."""
    x, w = torch.full((1024, 512), float(rank + 1)), torch.eye(512)
    results = []
    for call in range(2 * world):
        if call % world == rank:
            time.sleep(0.1)
        y = matmul_all_reduce(x, w, group=dist.group.WORLD, method="chunked")
        z = matmul_reduce_scatter(y, w, group=dist.group.WORLD, method="chunked")
        results.append((y.unique().tolist(), z.unique().tolist()))
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_late_ranks_cost_time_alone(world):
    total = world * (world + 1) / 2
    for results in run_ranks(world, run_late):
        assert results == [([total], [total * world])] * (2 * world)


def run_opcheck(rank, world):
    torch.manual_seed(0)
    name, op = dist.group.WORLD.group_name, torch.ops.fusedcomm.matmul_all_reduce.default
    x, w, b = (torch.randn(*shape, requires_grad=True) for shape in ((5, 6), (3, 6), (3,)))
    return [
        torch.library.opcheck(op, (x, w, bias, name, method)) for bias, method in ((b, "chunked"), (None, "serial"))
    ]


def test_opcheck_passes():
    for results in run_ranks(2, run_opcheck, timeout_s=120):
        for result in results:
            assert set(result.values()) == {"SUCCESS"}


def run_compiled(rank, world):
    torch.manual_seed(rank)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((3, 4, 6), (5, 6), (5,))]

    def layer(x, w, b):
        return matmul_all_reduce(torch.relu(x), w, group=dist.group.WORLD, bias=b).square()

    outputs = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        y = function(*leaves)
        y.sum().backward()
        outputs.append([y.detach(), *(t.grad for t in leaves)])
        for t in leaves:
            t.grad = None
    return all(torch.equal(a, b) for a, b in zip(*outputs))


def test_compiles_without_graph_breaks_to_the_same_bits():
    assert run_ranks(2, run_compiled, timeout_s=120) == [True, True]


X, W = torch.randn(4, 6), torch.randn(5, 6)

BAD_CALLS = [
    (lambda g: matmul_all_reduce(X, torch.randn(5, 7), group=g), "w_shard has K=7 but x has K=6"),
    (lambda g: matmul_all_reduce(X, W.double(), group=g), "dtype torch.float64 but x has torch.float32"),
    (lambda g: matmul_all_reduce(X[0], W, group=g), "at least 2 dimensions"),
    (lambda g: matmul_all_reduce(X, W[0], group=g), r"weights are \[N, K\]"),
    (lambda g: matmul_all_reduce(X, W, group=g, bias=torch.randn(4)), r"bias has shape \[4\] but its weight has N=5"),
    (lambda g: matmul_all_reduce(X, W, group=g, method="quick"), "method='quick' is unknown"),
]


def run_bad_calls(rank, world):
    messages = []
    for call, _ in BAD_CALLS:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are matched by the test
            call(dist.group.WORLD)
        messages.append(str(caught.value))
    # Refused by all ranks, they leave the group usable.
    y = matmul_all_reduce(torch.ones(1, 2), torch.eye(2), group=dist.group.WORLD)
    return messages, y.tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_bad_input_is_a_value_error_with_the_numbers(world):
    for messages, y in run_ranks(world, run_bad_calls):
        assert y == [[world, world]]
        for message, (_, expected) in zip(messages, BAD_CALLS):
            with pytest.raises(ValueError, match=expected):
                raise ValueError(message)


# What rank 0 calls, what the others call, and what every message must name.
MISMATCHES = {
    "rows": ((torch.ones(4, 6), W), (torch.ones(2, 6), W), ["sizes=[2, 2]", "sizes=[1, 1]"]),
    "features": ((X, W), (X, torch.ones(4, 6)), ["1, 5]", "1, 4]"]),
    "dtype": ((X, W), (X.bfloat16(), W.bfloat16()), ["float32", "bfloat16"]),
    "refused": ((X, W), (X, torch.ones(5, 7)), ["w_shard has K=7"]),
}


def run_mismatch(rank, world, name):
    x, w = MISMATCHES[name][min(rank, 1)]
    matmul_all_reduce(x, w, group=dist.group.WORLD, method="chunked")


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_peer_that_calls_something_else_is_named(name):
    errors = run_ranks(2, run_mismatch, name, return_exceptions=True)
    assert isinstance(errors[0], PeerError), errors[0].trace
    for part in MISMATCHES[name][2]:
        assert part in str(errors[0])
    assert isinstance(errors[1], ValueError if name == "refused" else PeerError)


def run_killed(rank, world):
    x, w = torch.randn(4096, 64), torch.randn(64, 64)
    matmul_all_reduce(x, w, group=dist.group.WORLD, method="chunked")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        matmul_all_reduce(x, w, group=dist.group.WORLD, method="chunked")


def test_a_killed_peer_ends_the_others_with_an_error():
    start = time.monotonic()
    errors = run_ranks(3, run_killed, return_exceptions=True, fresh_timeout_s=5.0)
    assert isinstance(errors[2], RankFailure)
    for error in errors[:2]:
        assert isinstance(error, PeerError), error.trace
        assert error.op == "matmul_all_reduce"
    assert any(error.rank == 2 for error in errors[:2])
    assert time.monotonic() - start < 25
