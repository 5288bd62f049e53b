"""method="fused" on real ranks over shared memory, its kernels interpreted."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import assert_as_accurate, run_ranks
from hostile import CARRIERS, hostile, late
from hypothesis import HealthCheck, given, settings
from op_cases import (
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
from torch.nn.functional import gelu, linear, silu

from fusedcomm import PeerError, all_gather_matmul, last_path, matmul_all_reduce, matmul_reduce_scatter, recording
from fusedcomm.comm import transport
from fusedcomm.ops import fused
from fusedcomm.ops.begin import begin_all_gather_matmul

# A run on real ranks takes as long as it takes: no deadline, and nothing to call slow.
on_ranks = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
TILES = Case(4, (2,), 0, (40, 33, 0, 17), 70, 40, torch.bfloat16, True, 3, "fused", "shard", "at_once", True, 3)


def times(dtype: torch.dtype) -> float:
    # The interpreter truncates where torch rounds to bf16.
    return 3.0 if dtype == torch.bfloat16 else 2.0


over_each = pytest.mark.parametrize("carrier", CARRIERS)


@over_each
@on_ranks
@given(case=cases(("fused",)))
def test_all_gather_matmul_matches_reference(carrier, case):
    check_gather(case, run_ranks(case.world, hostile, carrier, run_gather, case), times(case.dtype))


@over_each
@on_ranks
@given(case=cases(("fused",)))
def test_matmul_reduce_scatter_matches_reference(carrier, case):
    check_scatter(case, run_ranks(case.world, hostile, carrier, run_scatter, case), times(case.dtype))


@over_each
@pytest.mark.parametrize(("run", "check"), [(run_gather, check_gather), (run_scatter, check_scatter)])
def test_many_tiles_match_reference_and_two_runs_are_bit_equal(carrier, run, check):
    first, second = (run_ranks(4, hostile, carrier, run, TILES) for _ in range(2))
    check(TILES, first, times(TILES.dtype))
    assert equal(first, second)


@pytest.mark.parametrize("activation", ["gelu", "silu", "swiglu"])
@pytest.mark.parametrize(
    ("dtype", "wgrad"), [(torch.float32, "autograd"), (torch.float16, "at_once"), (torch.bfloat16, "later")], ids=str
)
def test_input_activation_matches_reference(activation, dtype, wgrad):
    results = run_ranks(3, hostile, "shared", run_activated, activation, dtype, "fused", wgrad)
    check_activated(activation, dtype, results, times(dtype))


def run_calls(rank, world, num_calls):
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(8, 5, generator=generator, requires_grad=True)
    errors = []
    for call in range(num_calls):
        # Every few calls need larger buffers than all before.
        rows = 3 << (call // 2)
        x = torch.randn(world * rows, 8, generator=generator).requires_grad_()
        w = torch.randn(5, 8, generator=generator)
        late(rank, call)
        y = all_gather_matmul(x[rank * rows : (rank + 1) * rows], w, group=group, method="fused")
        late(rank, call + 1)
        z = matmul_reduce_scatter(y, v, group=group, method="fused")
        z.sum().backward()
        exact = world * linear(linear(x.double(), w.double()), v.double())[rank * rows : (rank + 1) * rows]
        errors.append((z - exact).norm() / exact.norm())
    return max(errors).item(), last_path().transport


@over_each
def test_many_calls_of_growing_size_in_a_row(carrier):
    for error, used in run_ranks(3, hostile, carrier, run_calls, 8):
        assert error < 1e-6
        assert used == carrier


def run_in_inference_mode(rank, world):
    group = dist.group.WORLD
    x, w = torch.randn(4, 6), torch.randn(5, 6)
    with torch.inference_mode():
        found = matmul_reduce_scatter(
            all_gather_matmul(x, w, group=group, method="fused"), w.t(), group=group, method="fused"
        )
    # What that has made is used again.
    x.requires_grad_()
    y = matmul_reduce_scatter(all_gather_matmul(x, w, group=group, method="fused"), w.t(), group=group, method="fused")
    y.sum().backward()
    return found, y.detach()


@over_each
def test_a_group_may_be_used_first_in_inference_mode(carrier):
    for found, y in run_ranks(2, hostile, carrier, run_in_inference_mode):
        assert torch.equal(found, y)


def test_gradient_flows_through_the_returned_gather():
    check_gathered_gradient("fused")


def run_weights(rank, world, num_weights):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 6, generator=generator)
    # Of several shapes, and every other one transposed.
    weights = [torch.randn(5 + index, 6, generator=generator) for index in range(num_weights)]
    weights = [w.t().contiguous().t() if index % 2 else w for index, w in enumerate(weights)]
    biases = [torch.randn(len(w), generator=generator) for w in weights]
    with patch.object(fused, "all_gather_matmul", wraps=fused.all_gather_matmul) as launches:
        ys = all_gather_matmul(x.chunk(world)[rank], weights, bias=biases, group=dist.group.WORLD, method="fused")
    for y, w, b in zip(ys, weights, biases, strict=True):
        assert_as_accurate(y, linear(x.double(), w.double(), b.double()), linear(x, w, b))
    return launches.call_count


@pytest.mark.parametrize(("num_weights", "num_launches"), [(1, 1), (3, 1), (4, 2)])
def test_up_to_three_weights_are_one_launch(num_weights, num_launches):
    assert run_ranks(2, run_weights, num_weights) == [num_launches] * 2


def gelu_tanh(x):
    return gelu(x, approximate="tanh")


def run_activation(rank, world, dtype):
    generator = torch.Generator().manual_seed(0)
    x, w, v = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((6, 6), (40, 6), (40, 6)))
    b, c = torch.randn(40, generator=generator).to(dtype), torch.randn(40, generator=generator).to(dtype)
    shard, group = x[3 * rank : 3 * rank + 3], dist.group.WORLD
    for name, activation in {"silu": silu, "gelu": gelu_tanh}.items():
        y = all_gather_matmul(shard, w, bias=b, group=group, activation=name, method="fused")
        exact, plain = linear(x.double(), w.double(), b.double()), linear(x, w, b)
        assert_as_accurate(y, activation(exact), activation(plain), times=times(dtype), name=name)
        # What needs a gradient keeps what the activation is applied to.
        grad = all_gather_matmul(
            shard, w.detach().requires_grad_(), bias=b, group=group, activation=name, method="fused"
        )
        assert_as_accurate(grad, activation(exact), activation(plain), times=times(dtype), name=name)
    y = all_gather_matmul(
        shard, [w, v.t().contiguous().t()], bias=[b, c], group=group, activation="swiglu", method="fused"
    )
    exact = silu(linear(x.double(), w.double(), b.double())) * linear(x.double(), v.double(), c.double())
    assert_as_accurate(y, exact, silu(linear(x, w, b)) * linear(x, v, c), times=times(dtype), name="swiglu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activations_are_those_of_torch(dtype):
    run_ranks(2, hostile, "shared", run_activation, dtype)


def run_all_reduce(rank, world, dtype, rows):
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(rows, 3, 7, generator=generator).to(dtype) for _ in range(world)]
    ws = [torch.randn(5, 7, generator=generator).to(dtype) for _ in range(world)]
    b = torch.randn(5, generator=generator).to(dtype)
    x, w, bias = xs[rank].requires_grad_(), ws[rank].requires_grad_(), b.detach().requires_grad_()
    y = matmul_all_reduce(x, w, bias=bias, group=dist.group.WORLD, method="fused")
    y.sum().backward()
    exact, plain = (
        torch.stack([linear(a.to(wide), c.to(wide)) for a, c in zip(xs, ws)]).sum(0) + b.to(wide)
        for wide in (torch.float64, dtype)
    )
    assert_as_accurate(y, exact, plain, times=times(dtype))
    torch.testing.assert_close(x.grad, w.detach().sum(0).expand_as(x))
    assert torch.equal(bias.grad, torch.full((5,), 3.0 * rows).to(dtype))
    assert last_path().method == "fused"
    return y.detach()


@over_each
@pytest.mark.parametrize(("world", "rows"), [(2, 5), (3, 1), (3, 11)])
def test_matmul_all_reduce_gives_all_ranks_the_same_bits(carrier, world, rows):
    results = run_ranks(world, hostile, carrier, run_all_reduce, torch.float32, rows)
    assert all(torch.equal(result, results[0]) for result in results)


def test_opcheck_passes():
    check_opcheck("fused")


def test_compiles_without_graph_breaks_to_the_same_bits():
    check_compiled("fused", "silu", "swiglu")


X, W = torch.ones(4, 6), torch.ones(5, 6)
REFUSED = {
    "float64": lambda g: all_gather_matmul(X.double(), W.double(), group=g, method="fused"),
    "reduce-scatter of float64": lambda g: matmul_reduce_scatter(X.double(), W.double(), group=g, method="fused"),
    "float64 begun": lambda g: begin_all_gather_matmul(X.double(), [W.double()], group=g, method="fused"),
}


def run_refused(rank, world):
    messages = {}
    for name, call in REFUSED.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are matched by the test
            call(dist.group.WORLD)
        messages[name] = str(caught.value)
    y = all_gather_matmul(torch.full((1, 2), float(rank)), torch.eye(2), group=dist.group.WORLD, method="fused")
    return messages, y[:, 0].tolist(), last_path()


def test_what_it_cannot_do_is_refused_and_leaves_the_group_usable():
    for messages, y, path in run_ranks(2, run_refused):
        for message in messages.values():
            assert "float32, bfloat16 or float16 but x has torch.float64" in message
        assert y == [0.0, 1.0]
        assert (path.method, path.transport, path.reason) == ("fused", "shared", "asked for")


MISMATCHES = {
    "rows": (
        lambda g: all_gather_matmul(X, W, group=g, method="fused"),
        lambda g: all_gather_matmul(X[:3], W, group=g, method="fused"),
        ["[4, 4", "[3, 3"],
    ),
    "op": (
        lambda g: all_gather_matmul(X[:2], W, group=g, method="fused"),
        lambda g: matmul_reduce_scatter(X, W, group=g, method="fused"),
        ["all_gather_matmul:", "matmul_reduce_scatter:"],
    ),
    "method": (
        lambda g: all_gather_matmul(X, W, group=g, method="fused"),
        lambda g: all_gather_matmul(X, W, group=g, method="chunked"),
        ["fused", "chunked"],
    ),
}


def run_mismatch(rank, world, name):
    # Transport and buffers are there, so that the ranks come to the calls themselves.
    for call in (MISMATCHES["rows"][0], lambda g: matmul_reduce_scatter(X, W, group=g, method="fused")):
        call(dist.group.WORLD)
    MISMATCHES[name][min(rank, 1)](dist.group.WORLD)


@over_each
@pytest.mark.parametrize("name", MISMATCHES)
def test_a_peer_that_calls_something_else_is_named_on_every_rank(carrier, name):
    for rank, error in enumerate(run_ranks(2, hostile, carrier, run_mismatch, name, return_exceptions=True)):
        assert isinstance(error, PeerError), error
        for part in [*MISMATCHES[name][2], f"rank {rank} call"]:
            assert part in str(error)


def run_chosen(rank, world, method, apart):
    group = dist.new_group()
    nodes = (0, 1) if apart else (0, 0)
    with patch.object(transport, "node_of_each_rank", lambda group: nodes):
        y = all_gather_matmul(torch.full((1, 2), float(rank)), torch.eye(2), group=group, method=method)
    return y[:, 0].tolist(), last_path()


CHOICES = [
    ("fused", False, "shared", "all ranks are on one machine"),
    ("fused", True, "c10d", "the ranks are on several machines"),
    ("fused:c10d", False, "c10d", "asked for"),
    ("fused:shared", False, "shared", "asked for"),
]


@pytest.mark.parametrize(("method", "apart", "carrier", "reason"), CHOICES)
def test_the_transport_is_chosen_or_asked_for(method, apart, carrier, reason):
    for y, path in run_ranks(2, run_chosen, method, apart):
        assert y == [0.0, 1.0]
        assert (path.method, path.transport, path.transport_reason) == ("fused", carrier, reason)


def run_recorded(rank, world):
    # Once before: agreeing on a transport takes time of the caller.
    for late_s in (0.0, 0.3 * rank):
        time.sleep(late_s)
        with recording() as record:
            all_gather_matmul(X, W, group=dist.group.WORLD, method="fused:c10d")
    return {(event.kind, event.thread) for event in record.events}


def test_what_a_thread_waits_for_that_sends_is_not_exposed():
    for found in run_ranks(2, run_recorded):
        assert ("transfer", "fusedcomm-pusher") in found
        assert ("wait", "fusedcomm-pusher") not in found


def run_impossible(rank, world):
    with pytest.raises(ValueError, match="'symmetric' carries cuda tensors, but these are on cpu; use 'fused:c10d'"):
        all_gather_matmul(X, W, group=dist.group.WORLD, method="fused:symmetric")


def test_a_transport_that_cannot_carry_the_tensors_is_refused():
    run_ranks(2, run_impossible)


def test_what_takes_gradients_may_raise():
    check_sink_that_raises("fused")
