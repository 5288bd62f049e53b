"""all_gather_matmul and matmul_reduce_scatter on real gloo ranks, against the oracle in fusedcomm.reference."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from helpers import assert_as_accurate, run_ranks
from hypothesis import HealthCheck, given, settings
from op_cases import (
    BIG,
    Case,
    cases,
    check_activated,
    check_gather,
    check_scatter,
    equal,
    run_activated,
    run_gather,
    run_scatter,
)
from op_contracts import check_compiled, check_gathered_gradient, check_opcheck, check_sink_that_raises

from fusedcomm import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, recording
from fusedcomm.ops import (
    all_gather,
    all_to_all,
    begin_all_gather_matmul,
    begin_matmul_reduce_scatter,
    reduce_scatter,
)
from fusedcomm.tune.cost import chunked

# A run on real ranks takes milliseconds to seconds, whatever the input: no deadline, and nothing to call slow.
on_ranks = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
METHODS = ("serial", "chunked", "auto")


@on_ranks
@given(case=cases(METHODS))
def test_all_gather_matmul_matches_reference(case):
    check_gather(case, run_ranks(case.world, run_gather, case))


@on_ranks
@given(case=cases(METHODS))
def test_matmul_reduce_scatter_matches_reference(case):
    check_scatter(case, run_ranks(case.world, run_scatter, case))


@pytest.mark.parametrize("activation", ["gelu", "silu", "swiglu"])
@pytest.mark.parametrize(
    ("method", "wgrad"), [("serial", "autograd"), ("chunked", "autograd"), ("chunked", "at_once"), ("chunked", "later")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_input_activation_matches_reference(activation, method, wgrad, dtype):
    check_activated(activation, dtype, run_ranks(3, run_activated, activation, dtype, method, wgrad))


@pytest.mark.parametrize("run", [run_gather, run_scatter])
def test_two_runs_are_bitequal(run):
    first, second = run_ranks(4, run, BIG), run_ranks(4, run, BIG)
    assert equal(first, second)


def test_serial_and_chunked_move_the_same_bits():
    serial = run_ranks(4, run_gather, Case(**{**BIG.__dict__, "method": "serial"}))
    chunked = run_ranks(4, run_gather, BIG)
    assert all(equal(a[1], b[1]) for a, b in zip(serial, chunked))


def run_beside_a_slow_peer(rank, world, is_slow):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(384, 2, 64, generator=generator, requires_grad=True)
    w = torch.randn(96, 64, generator=generator, requires_grad=True)
    mm = torch.mm

    def slow_mm(*args, **kwargs):
        start_s = time.perf_counter()
        product = mm(*args, **kwargs)
        time.sleep(9 * (time.perf_counter() - start_s) + 0.002)
        return product

    if is_slow and rank == 1:
        torch.mm = slow_mm
    try:
        y = all_gather_matmul(x, w, group=dist.group.WORLD, method="chunked")
        z = matmul_reduce_scatter(y, w.t().contiguous(), group=dist.group.WORLD, method="chunked")
        s = matmul_all_reduce(z, w, group=dist.group.WORLD, method="chunked")
        s.sum().backward()
    finally:
        torch.mm = mm
    return y.detach(), z.detach(), s.detach(), x.grad, w.grad


def test_a_peer_that_is_ten_times_slower_changes_no_bit():
    assert equal(run_ranks(3, run_beside_a_slow_peer, True), run_ranks(3, run_beside_a_slow_peer, False))


def test_gradient_flows_through_the_returned_gather():
    check_gathered_gradient("auto")


def run_activation(rank, world):
    torch.manual_seed(0)
    x, w, v = torch.randn(2, 6), torch.randn(4, 6), torch.randn(4, 6)
    group = dist.group.WORLD
    a, b = all_gather_matmul(x, [w, v], group=group)
    return [
        torch.equal(all_gather_matmul(x, [w, v], group=group, activation="swiglu"), torch.nn.functional.silu(a) * b),
        torch.equal(all_gather_matmul(x, w, group=group, activation="silu"), torch.nn.functional.silu(a)),
        torch.equal(
            all_gather_matmul(x, w, group=group, activation="gelu"),
            torch.nn.functional.gelu(a, approximate="tanh"),
        ),
    ]


def test_activations_are_those_of_torch():
    assert run_ranks(2, run_activation) == [[True] * 3] * 2


def run_overlap(rank, world):
    x = torch.randn(1024, 2, 64)
    w = torch.randn(64, 64)
    with recording() as record:
        all_gather_matmul(x, w, group=dist.group.WORLD, method="chunked")
        matmul_reduce_scatter(torch.randn(2048, 2, 64), w, group=dist.group.WORLD, method="chunked")
    computes = [e for e in record.events if e.kind == "compute" and e.name == "all_gather_matmul"]
    transfers = [e for e in record.events if e.kind == "transfer" and e.name.startswith("all_gather_matmul")]
    moved = sum(e.num_bytes for e in transfers)
    return len(computes), len(transfers), moved, x.nbytes, dict(record.paths), {e.thread for e in transfers}


def test_chunked_computes_by_chunk_and_sends_each_byte_once():
    for computes, transfers, moved, shard_bytes, paths, threads in run_ranks(2, run_overlap):
        num_chunks = chunked("", world=2, rows=4096).num_chunks
        assert num_chunks > 1
        assert computes == 1 + num_chunks, "own rows, then one GEMM per chunk of the peer"
        assert transfers == num_chunks
        assert moved == shard_bytes
        assert paths == {"all_gather_matmul:chunked": 1, "matmul_reduce_scatter:chunked": 1}
        assert threads == {"fusedcomm-sender"}


def run_many(rank, world):
    from fusedcomm.comm.pool import STAGING

    x = torch.randn(256, 2, 64, requires_grad=True)
    w, v = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    allocations = []
    for _ in range(5):
        y = all_gather_matmul(x, w, group=dist.group.WORLD, method="chunked")
        matmul_reduce_scatter(y, v, group=dist.group.WORLD, method="chunked").sum().backward()
        allocations.append(STAGING.num_allocations)
    return allocations


def test_staging_is_allocated_once():
    for allocations in run_ranks(2, run_many):
        assert len(set(allocations)) == 1, "the second call allocates staging again"


def run_timed(rank, world):
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(1500, 72, generator=generator, requires_grad=True)
    w, v = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((40, 72), (24, 40)))
    handed = []

    def take(weight, gradient):
        handed.append(weight)
        weight.grad = gradient.compute()

    y = all_gather_matmul(x, w, group=group, defer_wgrad=take)
    z = matmul_reduce_scatter(y, v, group=group, defer_wgrad=take)
    with recording() as record:
        z.sum().backward()
    num_products = sum(event.name == "dw" for event in record.events)
    return len(handed), num_products, v.grad, (torch.ones(len(y), 24).double().t() @ y.double()), y.detach()


def test_weight_gradients_are_handed_over_once_however_often_an_op_is_timed():
    for handed, num_products, dv, exact, y in run_ranks(2, run_timed):
        assert handed == 2
        assert num_products > 1, "no way to run the ops was timed"
        assert_as_accurate(dv, exact, torch.ones(len(y), 24).t() @ y)


@pytest.mark.parametrize("method", ["serial", "chunked"])
def test_opcheck_passes(method):
    check_opcheck(method)


def test_compiles_without_graph_breaks_to_the_same_bits():
    check_compiled("auto", "swiglu", "silu")


@pytest.mark.parametrize("method", ["serial", "chunked"])
def test_what_takes_gradients_may_raise(method):
    check_sink_that_raises(method)


def run_twice_differentiated(rank, world):
    group = dist.group.WORLD
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)

    def take(weight, gradient):
        gradient.kept()

    both = {"group": group}
    calls = [
        lambda: all_gather_matmul(x, w, **both),
        lambda: all_gather_matmul(x, w, activation="gelu", defer_wgrad=take, **both),
        lambda: matmul_reduce_scatter(x, w, **both),
        lambda: matmul_reduce_scatter(x, w, defer_wgrad=take, **both),
        lambda: matmul_all_reduce(x, w, **both),
        lambda: matmul_all_reduce(x, w, defer_wgrad=take, **both),
        lambda: begin_all_gather_matmul(x, [w], **both)()[0],
        lambda: begin_matmul_reduce_scatter(x, w, **both)(),
    ]
    found = []
    for call in calls:
        (plain,) = torch.autograd.grad(call().square().sum(), x)
        (grad,) = torch.autograd.grad(call().square().sum(), x, create_graph=True)
        message = ""
        try:
            grad.square().sum().backward()
        except RuntimeError as error:
            message = str(error)
        found.append((torch.equal(plain, grad), message))
    return found


def test_second_derivatives_of_products_are_refused_and_leave_the_group_usable():
    """They depend on what only the peers know."""
    for found in run_ranks(2, run_twice_differentiated):
        for first_is_right, message in found:
            assert first_is_right
            assert "only first derivatives" in message or "no autograd formula was registered" in message


def run_resharded(rank, world):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    sizes = {"gather_sizes": [6] * world, "scatter_sizes": [4 - world + 1] + [1] * (world - 1)}
    moves = [
        lambda: all_gather(x, group=dist.group.WORLD),
        lambda: reduce_scatter(x, group=dist.group.WORLD),
        lambda: all_to_all(x, group=dist.group.WORLD, gather_dim=0, scatter_dim=1, **sizes),
    ]
    found = []
    for move in moves:
        # The loss is the sum of all ranks' sums of cubes.
        (grad,) = torch.autograd.grad((move() ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        found.append(second)
    return x.detach(), found


def run_compiled_moves(rank, world):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    sizes = {"gather_sizes": [6] * world, "scatter_sizes": [4] if world == 1 else [1, 3]}
    moves = [
        lambda x: all_gather(x.square(), group=dist.group.WORLD).square(),
        lambda x: reduce_scatter(x.square(), group=dist.group.WORLD).square(),
        lambda x: all_to_all(x.square(), group=dist.group.WORLD, gather_dim=0, scatter_dim=1, **sizes).square(),
    ]
    found = []
    for move in moves:
        # A group of one moves nothing, and its graph is whole.
        compiled = torch.compile(move, fullgraph=world == 1, backend="aot_eager")
        results = [(y, *torch.autograd.grad(y.sum(), x)) for y in (move(x), compiled(x))]
        found.append(equal(*results))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_moves_break_the_graph_and_stay_right(world):
    assert run_ranks(world, run_compiled_moves, timeout_s=120) == [[True] * 3] * world


def test_moves_are_differentiable_twice():
    replies = run_ranks(3, run_resharded)
    total = sum(x for x, _ in replies)
    for x, (gathered, scattered, moved) in replies:
        # Of a gather every rank has a copy, and so does each copy's gradient.
        torch.testing.assert_close(gathered, 3 * 6 * x)
        # Every summand's gradient is that of the sum, on which all summands bear.
        torch.testing.assert_close(scattered, 3 * 6 * total)
        torch.testing.assert_close(moved, 6 * x)
