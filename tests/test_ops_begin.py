"""The ops in two parts: to the bit what the whole ops compute, whatever else is under way, in forward and backward."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from op_cases import Wgrads

from fusedcomm import PeerError, all_gather_matmul, matmul_reduce_scatter
from fusedcomm.comm.pool import STAGING
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.ops.begin import begin_all_gather_matmul, begin_matmul_reduce_scatter

ROWS, LEAD, K, N = 13, 2, 6, 8


def leaves(rank, world, seed, rows=ROWS, dtype=torch.float32):
    """`(x_shard, w1, w2, w3, b1, b2, b3)` of an MLP: two weights share the gather, a third follows."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    own = chunk_sizes(rows, world)[rank]
    shapes = ((own, LEAD, K), (N, K), (N, K), (K, N), (N,), (N,), (K,))
    return [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def whole_block(tensors, sizes, **options):
    x, w1, w2, w3, b1, b2, b3 = tensors
    both = {"group": dist.group.WORLD, "sizes": sizes}
    a, b = all_gather_matmul(x, [w1, w2], bias=[b1, b2], **both, **options)
    options = {name: value for name, value in options.items() if name != "save"}
    return matmul_reduce_scatter(a.relu() * b, w3, bias=b3, **both, **options)


def begun_blocks(blocks, sizes, **options):
    """All blocks at once: each op is begun for every block before it is finished for any."""
    both = {"group": dist.group.WORLD, "sizes": sizes}
    gathers = [begin_all_gather_matmul(x, [w1, w2], biases=[b1, b2], **both, **options)
               for x, w1, w2, _, b1, b2, _ in blocks]  # fmt: skip
    inner = [a.relu() * b for a, b in (finish() for finish in gathers)]
    options = {name: value for name, value in options.items() if name != "save"}
    scatters = [
        begin_matmul_reduce_scatter(h, tensors[3], bias=tensors[6], **both, **options)
        for h, tensors in zip(inner, blocks)
    ]
    return [finish() for finish in scatters]


def run_both(rank, world, method, save, dtype, rows, late_rank, wgrad):
    sizes = chunk_sizes(rows, world)
    results = []
    for run in ("whole", "begun"):
        blocks = [leaves(rank, world, seed, rows, dtype) for seed in (1, 2, 3)]
        wgrads = Wgrads(wgrad)
        options = {"method": method, "save": save, "defer_wgrad": wgrads.defer}
        if rank == late_rank:
            time.sleep(0.05)
        if run == "whole":
            ys = [whole_block(tensors, sizes, **options) for tensors in blocks]
        else:
            ys = begun_blocks(blocks, sizes, **options)
        if rank == late_rank:
            time.sleep(0.05)
        sum((y * y).sum() for y in ys).backward()
        wgrads.run()
        results.append([y.detach() for y in ys] + [t.grad for tensors in blocks for t in tensors])
    return [torch.equal(a, b) for a, b in zip(*results)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("method", "save", "dtype", "rows", "wgrad"),
    [
        ("chunked", "shard", torch.float32, ROWS, "autograd"),
        ("chunked", "gathered", torch.bfloat16, ROWS, "at_once"),
        ("serial", "shard", torch.float32, ROWS, "autograd"),
        ("serial", "gathered", torch.float32, 2, "later"),
        ("chunked", "shard", torch.float32, 2048, "later"),
        ("auto", "shard", torch.float32, 0, "at_once"),
    ],
)
def test_begun_and_finished_it_is_the_whole_op_to_the_bit(world, method, save, dtype, rows, wgrad):
    for equal in run_ranks(world, run_both, method, save, dtype, rows, world - 1, wgrad):
        assert all(equal), equal


def run_partly_needed(rank, world, method):
    """Only some gradients are asked for: nothing may be sent that nobody waits for."""
    sizes = chunk_sizes(ROWS, world)
    found = []
    for wanted in ((0,), (3,), (1, 6), (2,), (0, 1, 2, 3)):
        tensors = leaves(rank, world, 1)
        ys = begun_blocks([tensors], sizes, method=method)
        some = torch.autograd.grad(ys[0].sum(), [tensors[i] for i in wanted])
        tensors = leaves(rank, world, 1)
        everything = torch.autograd.grad(whole_block(tensors, sizes, method=method).sum(), tensors)
        found.append(all(torch.equal(a, everything[i]) for a, i in zip(some, wanted)))
        for frozen in set(range(7)) - set(wanted):
            tensors[frozen].requires_grad_(False)
        begun_blocks([tensors], sizes, method=method)[0].sum().backward()
        found.append(all(torch.equal(tensors[i].grad, everything[i]) for i in wanted))
    return found


def test_gradients_that_nobody_needs_are_not_computed():
    for found in run_ranks(2, run_partly_needed, "chunked"):
        assert all(found), found


def run_many(rank, world):
    blocks = [leaves(rank, world, seed, 256) for seed in (1, 2)]
    allocations = []
    for _ in range(4):
        sum(y.sum() for y in begun_blocks(blocks, chunk_sizes(256, world), method="chunked")).backward()
        allocations.append(STAGING.num_allocations)
    return allocations


def test_staging_is_given_back():
    for allocations in run_ranks(2, run_many):
        assert len(set(allocations)) == 1


def run_ahead(rank, world):
    # Large enough for the sender thread, whose jobs are done one after the other.
    x, w = torch.ones(512, 256), torch.ones(4, 256)
    start = time.monotonic()
    first = begin_all_gather_matmul(x, [w], group=dist.group.WORLD, method="chunked")
    second = begin_all_gather_matmul(x, [w], group=dist.group.WORLD, method="chunked") if rank == 0 else None
    y = first()[0]
    elapsed_s = time.monotonic() - start
    if second is None:
        time.sleep(2)
        second = begin_all_gather_matmul(x, [w], group=dist.group.WORLD, method="chunked")
    return elapsed_s, y.unique().tolist(), second()[0].unique().tolist()


def test_finishing_does_not_wait_for_what_was_begun_later():
    for elapsed_s, first, second in run_ranks(2, run_ahead):
        assert first == second == [256.0]
        assert elapsed_s < 1.5


def run_left(rank, world, rows):
    """What was begun is never finished, as after an error of the caller's; then an op fails in its middle."""
    group = dist.group.WORLD
    x, w = torch.ones(rows, 64), torch.ones(8, 64)
    for _ in range(3):
        begin_all_gather_matmul(x, [w], group=group, method="chunked")
        begin_matmul_reduce_scatter(x, w, group=group, method="chunked")
    with patch.object(torch, "mm", side_effect=ArithmeticError), suppress(ArithmeticError):
        all_gather_matmul(x, w, group=group, method="chunked")
    y = all_gather_matmul(x, w, group=group, method="chunked")
    z = matmul_reduce_scatter(y, w.t(), group=group, method="chunked")
    return y.unique().tolist(), z.unique().tolist()


# Few rows are sent by the calling thread, many by the sender's.
@pytest.mark.parametrize("rows", [8, 2048])
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_never_finished_leaves_the_group_usable(world, rows):
    for y, z in run_ranks(world, run_left, rows, fresh_timeout_s=5.0):
        assert (y, z) == ([64.0], [world * 512.0])


def run_refused(rank, world):
    group = dist.group.WORLD
    x, w = torch.ones(4, 6), torch.ones(5, 6)
    calls = [
        partial(begin_all_gather_matmul, x, [w if rank else torch.ones(5, 7)], group=group),
        partial(begin_matmul_reduce_scatter, x, w if rank else torch.ones(5, 7), group=group),
        partial(begin_matmul_reduce_scatter, x, w, group=group, sizes=[4] * world),
        partial(begin_all_gather_matmul, x, [w], group=group, method="quick"),
        partial(begin_all_gather_matmul, x, [w, w], group=group, biases=[torch.ones(5)]),
        partial(begin_all_gather_matmul, x, [w], group=group, save="all"),
    ]
    messages = []
    for call in calls:
        try:
            call()()
        except (ValueError, PeerError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    y = begin_all_gather_matmul(torch.full((1, 2), float(rank)), [torch.eye(2)], group=group)()[0]
    return messages, y[:, 0].tolist()


def test_a_refused_call_reaches_the_peer_and_leaves_the_group_usable():
    for rank, (messages, y) in enumerate(run_ranks(2, run_refused)):
        kind = "PeerError" if rank else "ValueError"
        assert messages[0].startswith(f"{kind}: all_gather_matmul: ")
        assert messages[1].startswith(f"{kind}: matmul_reduce_scatter: ")
        assert all("w_shard has K=7" in message for message in messages[:2])
        assert "sum to 8 rows but x has 4" in messages[2]
        assert "method='quick' is unknown" in messages[3]
        assert "1 biases for 2 weights" in messages[4]
        assert "save='all' is unknown" in messages[5]
        assert y == [0.0, 1.0]


def run_compiled(rank, world):
    def call(x, w):
        return begin_all_gather_matmul(x, [w], group=dist.group.WORLD)()[0]

    try:
        torch.compile(call, fullgraph=True, backend="eager")(torch.ones(2, 3), torch.ones(4, 3))
    except Exception as error:
        return str(error)
    return ""


def test_compiling_it_is_refused():
    for message in run_ranks(2, run_compiled, timeout_s=120):
        assert "torch.compile cannot trace" in message
