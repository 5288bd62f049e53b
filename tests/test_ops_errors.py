"""Wrong calls end in an error that names both sides, on every rank: never in a hang, an abort or a wrong sum."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import RankFailure, run_ranks

from fusedcomm import PeerError, all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from fusedcomm.comm import c10d
from fusedcomm.comm.c10d import GlooExchange
from fusedcomm.comm.channel import Channel, calm_gloo, channel_of
from fusedcomm.ops import all_to_all, reduce_scatter
from fusedcomm.ops.chunked import new_call
from fusedcomm.tune.cost import serial


@pytest.fixture(scope="module", autouse=True)
def group_of_one():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


X, W = torch.randn(4, 6), torch.randn(5, 6)

BAD_CALLS = [
    (lambda g: all_gather_matmul(X, torch.randn(5, 7), group=g), "w_shard has K=7 but x_shard has K=6"),
    (
        lambda g: all_gather_matmul(X, W.double(), group=g),
        "dtype torch.float64 but x_shard has torch.float32",
    ),
    (lambda g: all_gather_matmul(X.int(), W.int(), group=g), "dtype torch.int32"),
    (lambda g: all_gather_matmul(X, W.to("meta"), group=g), "is on meta but x_shard is on cpu"),
    (lambda g: all_gather_matmul(X, W, group=g, dim=1), "dim=1 is the last one"),
    (lambda g: all_gather_matmul(X, W, group=g, dim=-1), "the last one"),
    (lambda g: all_gather_matmul(X, W, group=g, dim=2), "dim=2 is out of range for 2 dimensions"),
    (lambda g: all_gather_matmul(X[0], W, group=g), "at least 2 dimensions"),
    (lambda g: all_gather_matmul(X, W[0], group=g), r"weights are \[N, K\]"),
    (lambda g: all_gather_matmul(X, [], group=g), "empty list"),
    (
        lambda g: all_gather_matmul(X, W, group=g, bias=torch.randn(4)),
        r"bias has shape \[4\] but its weight has N=5",
    ),
    (lambda g: all_gather_matmul(X, [W, W], group=g, bias=[torch.randn(5)]), "1 biases for 2 weights"),
    (lambda g: all_gather_matmul(X, W, group=g, sizes=[3]), r"gives rank 0 3 rows but its shard has 4"),
    (lambda g: all_gather_matmul(X, W, group=g, sizes=[4, 4]), "each of the 1 ranks"),
    (lambda g: all_gather_matmul(X, W, group=g, method="quick"), "method='quick' is unknown"),
    (lambda g: all_gather_matmul(X, W, group=g, save="all"), "save='all' is unknown"),
    (lambda g: all_gather_matmul(X, W, group=g, activation="relu"), "activation='relu' is unknown"),
    (lambda g: all_gather_matmul(X, W, group=g, activation="swiglu"), "needs two weights of one shape"),
    (lambda g: matmul_reduce_scatter(X, torch.randn(5, 7), group=g), "w_shard has K=7 but x has K=6"),
    (lambda g: matmul_reduce_scatter(X, W, group=g, sizes=[3]), r"sum to 3 rows but x has 4"),
    (lambda g: matmul_reduce_scatter(X, W, group=g, dim=1), "dim=1 is the last one"),
    # In fp32, in which sums are taken, it would be rounded.
    (lambda g: reduce_scatter(X.long(), group=g), "reduce_scatter: x has dtype torch.int64"),
    (lambda g: matmul_reduce_scatter(X, W, group=g, input_activation="relu"), "activation='relu' is unknown"),
    (
        lambda g: matmul_reduce_scatter([X, X], W, group=g),
        r"x is \[4, 6\] float32 and \[4, 6\] float32; it must be two",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_input_is_a_value_error_with_the_numbers(call, message):
    with pytest.raises(ValueError, match=message):
        call(dist.group.WORLD)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have other schedulers elsewhere")
def test_where_threads_may_not_be_rescheduled_they_stay_as_they_are(monkeypatch):
    asked = []

    def forbid(thread, *args):
        asked.append(thread)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbid)
    calm_gloo()
    assert asked


def run_fused(rank, world):
    messages = []
    for op in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are matched by the test
            op(X, W, group=dist.group.WORLD, method="fused")
        messages.append(str(caught.value))
    # Refused by all ranks, they leave the group usable.
    y = all_gather_matmul(torch.full((1, 2), float(rank)), torch.eye(2), group=dist.group.WORLD)
    return messages, y[:, 0].tolist()


def test_fused_on_the_cpu_is_refused_where_kernels_are_not_interpreted():
    for messages, y in run_ranks(2, run_fused):
        for message in messages:
            assert "method='fused' on CPU tensors needs Triton's interpreter" in message
            assert "use method='chunked'" in message
        assert y == [0.0, 1.0]


def gather(x, w, **options):
    return lambda: all_gather_matmul(x, w, group=dist.group.WORLD, **options)


def scatter(x, w, **options):
    return lambda: matmul_reduce_scatter(x, w, group=dist.group.WORLD, **options)


def move(rows, dtype):
    world = dist.get_world_size()
    sizes = {"gather_sizes": [rows] * world, "scatter_sizes": [2] * world}
    x = torch.ones(rows, 2 * world, dtype=dtype)
    return lambda: all_to_all(x, group=dist.group.WORLD, gather_dim=0, scatter_dim=1, **sizes)


# What rank 0 calls, what the others call, and what every message must name.
MISMATCHES = {
    "rows": (lambda: gather(torch.ones(4, 6), W), lambda: gather(torch.ones(3, 6), W), ["[4, 4", "[3, 3"]),
    "features": (
        lambda: gather(torch.ones(4, 6), torch.ones(5, 6)),
        lambda: gather(torch.ones(4, 7), torch.ones(5, 7)),
        ["1, 6]", "1, 7]"],
    ),
    "dtype": (
        lambda: gather(torch.ones(4, 6), W),
        lambda: gather(torch.ones(4, 6).bfloat16(), W.bfloat16()),
        ["float32", "bfloat16"],
    ),
    "op": (
        lambda: gather(torch.ones(4, 6), W),
        lambda: scatter(torch.ones(8, 6), W),
        ["all_gather_matmul:", "matmul_reduce_scatter:"],
    ),
    "rows of a move": (lambda: move(3, W.dtype), lambda: move(2, W.dtype), ["from dim 0 [3, 3", "from dim 0 [2, 2"]),
    "dtype of a move": (lambda: move(3, W.dtype), lambda: move(3, torch.half), ["float32", "float16"]),
    "method": (
        lambda: gather(torch.ones(4, 6), W, method="serial"),
        lambda: gather(torch.ones(4, 6), W, method="chunked"),
        ["serial", "chunked"],
    ),
}


def run_mismatch(rank, world, name):
    first, others, _ = MISMATCHES[name]
    (first if rank == 0 else others)()()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MISMATCHES)
def test_a_peer_that_calls_something_else_is_named_on_every_rank(world, name):
    errors = run_ranks(world, run_mismatch, name, return_exceptions=True)
    for rank, error in enumerate(errors):
        assert isinstance(error, PeerError), error.trace
        for part in MISMATCHES[name][2] + [f"rank {rank} call"]:
            assert part in str(error)


def run_long(rank, world, place):
    words = [f"size {number}" for number in range(200)]
    words[place] = f"of rank {rank}"
    with pytest.raises(PeerError, match="call different things") as caught:
        channel_of(dist.group.WORLD).check_same("op", " ".join(words), torch.device("cpu"))
    return str(caught.value)


@pytest.mark.parametrize("place", [0, 100, 199])
def test_calls_that_differ_anywhere_in_a_long_signature_are_told_apart(place):
    for message in run_ranks(2, run_long, place):
        # There is no room for its middle.
        assert place == 100 or ("of rank 0" in message and "of rank 1" in message)


WRONG = {
    "weight": ({"w_shard": torch.randn(5, 7)}, "w_shard has K=7 but x_shard has K=6"),
    "bias": ({"bias": [None, None]}, "2 biases for 1 weights"),
}


def run_refused(rank, world, name):
    group = dist.group.WORLD
    messages = []
    # First rank 1 alone refuses its input, then all ranks do; the call after that must be right.
    for bad_ranks in ({1}, set(range(world))):
        try:
            all_gather_matmul(X, group=group, **({"w_shard": W} | (WRONG[name][0] if rank in bad_ranks else {})))
        except (ValueError, PeerError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    y = all_gather_matmul(torch.full((1, 2), float(rank)), torch.eye(2), group=group)
    return messages, y[:, 0].tolist()


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_call_reaches_the_peers_and_leaves_the_group_usable(name):
    for rank, (messages, y) in enumerate(run_ranks(3, run_refused, name)):
        alone, together = messages
        told = "ValueError: " if rank == 1 else "PeerError: all_gather_matmul: rank 1 refused: "
        assert alone.startswith(f"{told}all_gather_matmul: {WRONG[name][1]}")
        assert together.startswith("ValueError")
        assert y == [0.0, 1.0, 2.0]


def run_on_another_gpu(rank, world):
    like = SimpleNamespace(device=torch.device("cuda", rank), dtype=torch.float32)
    with patch.object(torch.cuda, "current_device", lambda: 0):
        new_call("op", dist.group.WORLD, (1, 1), like, serial("asked for"))


def test_tensors_of_another_gpu_than_the_current_one_are_refused():
    first, second = run_ranks(2, run_on_another_gpu, return_exceptions=True)
    assert first is None
    assert isinstance(second, ValueError)
    assert "op: the tensors are on cuda:1, but the current GPU is cuda:0" in str(second)


def run_refused_beside_nccl(rank, world):
    channel = channel_of(dist.group.WORLD)
    if rank == 1:
        channel.refuse("op", "w_shard has K=7")
        return
    with (
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch.object(c10d, "_side_stream", lambda index: None),
    ):
        exchange = c10d.NcclExchange(channel, "op", "a gather", [], [], [], True, True)
        with pytest.raises(PeerError, match="rank 1 refused: op: w_shard has K=7"):
            exchange.start()


def test_in_a_group_that_has_gloo_too_a_refused_call_is_known_before_nccl_waits_for_it():
    run_ranks(2, run_refused_beside_nccl, fresh_timeout_s=20.0)


@pytest.mark.parametrize("check_all", [False, True])
def test_what_a_graph_captures_has_been_agreed_upon_before(check_all):
    channel, device = channel_of(dist.group.WORLD), torch.device("cuda", 0)
    with (
        patch.object(channel, "_check_all", check_all),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        with pytest.raises(ValueError, match=r"op: a CUDA graph is captured.* run it once before .new call"):
            channel.agree_on_device("op", 1, "new call", device)
        with patch.object(channel, "_agreed", {"known call"}):
            channel.agree_on_device("op", 2, "known call", device)


def run_absent(rank, world):
    if rank == 1:
        time.sleep(4)
        return
    all_gather_matmul(X, W, group=dist.group.WORLD)


def test_a_peer_that_never_calls_is_named_within_the_time_out():
    start = time.monotonic()
    error = run_ranks(2, run_absent, return_exceptions=True, fresh_timeout_s=2.0)[0]
    assert isinstance(error, PeerError)
    assert error.rank == 1
    assert "rank 1 of the group did not call the operation" in str(error)
    assert time.monotonic() - start < 15


def run_killed(rank, world):
    group = dist.group.WORLD
    x, w = torch.randn(512, 4, 64), torch.randn(64, 64)
    all_gather_matmul(x, w, group=group)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        matmul_reduce_scatter(torch.randn(1536, 4, 64), w, group=group)


def test_a_killed_peer_ends_the_others_with_an_error():
    start = time.monotonic()
    errors = run_ranks(3, run_killed, return_exceptions=True, fresh_timeout_s=5.0)
    assert isinstance(errors[2], RankFailure)
    assert "exit code -9" in str(errors[2])
    for error in errors[:2]:
        assert isinstance(error, PeerError), error.trace
        assert error.op == "matmul_reduce_scatter"
    # Whoever waited for the dead rank names it; the other may see the first one leave.
    assert any(error.rank == 2 for error in errors[:2])
    assert time.monotonic() - start < 25


MOMENTS = {"announced": (Channel, "announce"), "started": (GlooExchange, "start")}


def run_ended(rank, world, moment, call):
    owner, name = MOMENTS[moment]
    unharmed = getattr(owner, name)

    def ended(self, *args):
        result = unharmed(self, *args)
        if rank == 1:
            time.sleep(0.5)
            os._exit(9)
        # Until it shows that rank 1 is gone.
        time.sleep(2)
        return result

    setattr(owner, name, ended)
    call(torch.ones(8, 6), W, group=dist.group.WORLD, method="serial")


@pytest.mark.parametrize("call", [all_gather_matmul, matmul_all_reduce])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_peer_that_ends_in_the_middle_of_a_call_is_named(moment, call):
    error = run_ranks(2, run_ended, moment, call, return_exceptions=True, fresh_timeout_s=20)[0]
    assert isinstance(error, PeerError), error.trace
    assert error.rank == 1


def run_refused_where_torch_chose_the_backend(rank, world):
    # As `init_process_group()` without a backend makes it.
    group = dist.new_group(backend="undefined")
    with pytest.raises(ValueError if rank == 1 else PeerError, match="w_shard has K=7"):
        all_gather_matmul(X, torch.randn(5, 7) if rank == 1 else W, group=group)


def test_a_refused_call_reaches_the_peers_where_torch_chose_the_backend():
    # Long before the group's time-out, torch's half an hour.
    run_ranks(2, run_refused_where_torch_chose_the_backend, timeout_s=40)


def run_refused_alone(rank, world):
    if rank == 1:
        os._exit(9)
    time.sleep(2)
    all_gather_matmul(X, torch.randn(5, 7), group=dist.group.WORLD)


def test_a_refused_call_says_why_also_when_a_peer_is_gone():
    error = run_ranks(2, run_refused_alone, return_exceptions=True, fresh_timeout_s=20)[0]
    assert isinstance(error, ValueError), error.trace
    assert "w_shard has K=7" in str(error)


def run_empty(rank, world):
    group = dist.group.WORLD
    w = torch.randn(5, 6, requires_grad=True)
    x = torch.empty(0, 6, requires_grad=True)
    y = all_gather_matmul(x, w, group=group)
    z = matmul_reduce_scatter(torch.empty(0, 6), w, group=group)
    (y.sum() + z.sum()).backward()
    return y.shape, z.shape, x.grad.shape, w.grad.abs().sum().item()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_empty_tensors_work(world):
    for y, z, dx, dw in run_ranks(world, run_empty):
        assert (y, z, dx, dw) == ((0, 5), (0, 5), (0, 6), 0.0)
