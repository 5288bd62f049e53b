"""method="fused" between real processes: over symmetric memory, where ranks share a GPU if there are fewer, and NCCL.

Interpreted, CPU ranks do the same, small, over shared memory and gloo.
"""

from __future__ import annotations

import os
import time
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import assert_as_accurate, run_ranks
from place import DEVICE, INTERPRETED, TIMES, capture, only_on_gpu, randn
from torch import Tensor
from torch.nn.functional import gelu, linear

from fusedcomm import PeerError, all_gather_matmul, last_path, matmul_all_reduce, matmul_reduce_scatter
from fusedcomm.comm.transport import flag_transport_of
from fusedcomm.ops.begin import begin_all_gather_matmul, begin_matmul_reduce_scatter
from fusedcomm.tune import cost

# Read by torch in the ranks, which inherit it; two on one GPU are refused without.
os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
LEAD, HIDDEN, INNER = (2, 24, 20) if INTERPRETED else (2, 256, 336)
# Uneven, with an empty shard; a shard is cut into one to three chunks.
SIZES = [(9, 12), (5, 0, 8)] if INTERPRETED else [(300, 411), (200, 0, 317)]
ROWS_PER_CHUNK = 4 if INTERPRETED else 100
# What is chosen here, and what has to be asked for.
CARRIERS = ("shared" if INTERPRETED else "symmetric", "c10d")
over_each = pytest.mark.parametrize("carrier", CARRIERS)


def run_on(carrier: str, world: int, function, *args) -> list:
    """`function(rank, world, carrier, *args)` on every rank, if the carrier can run here."""
    if carrier == "c10d" and not INTERPRETED and torch.cuda.device_count() < world:
        pytest.skip(f"NCCL refuses two ranks on one GPU: {world} ranks, {torch.cuda.device_count()} GPUs")
    return run_ranks(world, in_place, function, carrier, *args, timeout_s=120)


def in_place(rank, world, function, *args):
    """`function(rank, world, *args)` on this rank's GPU, with several chunks a shard."""
    if not INTERPRETED:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with patch.object(cost, "_ROWS_PER_FUSED_CHUNK", ROWS_PER_CHUNK), patch.object(cost, "_MAX_FUSED_CHUNKS", 3):
        return function(rank, world, *args)


def opened(carrier: str) -> dict:
    """The group and the method by which ops run on it."""
    if carrier != "c10d":
        return {"group": dist.group.WORLD, "method": "fused"}
    group = dist.new_group(backend=None if INTERPRETED else "cpu:gloo,cuda:nccl")
    return {"group": group, "method": "fused:c10d"}


class Block:
    """Column-parallel with GELU, then row-parallel: every rank's weights, and all rows of the input."""

    def __init__(self, sizes: tuple[int, ...], rank: int, seed: int) -> None:
        world, seed = range(len(sizes)), 1000 * seed
        self.sizes, self.rank = sizes, rank
        self.own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        self.x = randn(seed, sum(sizes), LEAD, HIDDEN, dtype=DTYPE)
        self.dy = randn(seed + 1, sum(sizes), LEAD, HIDDEN, dtype=DTYPE)
        self.up = [randn(seed + 10 + owner, INNER, HIDDEN, dtype=DTYPE, scale=HIDDEN**-0.5) for owner in world]
        self.down = [randn(seed + 20 + owner, HIDDEN, INNER, dtype=DTYPE, scale=INNER**-0.5) for owner in world]

    def leaves(self) -> list[Tensor]:
        """This rank's."""
        own = [self.x[self.own], self.up[self.rank], self.down[self.rank]]
        return [tensor.clone().requires_grad_() for tensor in own]

    def expected(self, dtype: torch.dtype) -> list[Tensor]:
        """This rank's rows of the output, and the gradients of its leaves, in plain torch."""
        x, *weights = (tensor.detach().to(dtype).requires_grad_() for tensor in (self.x, *self.up, *self.down))
        pairs = zip(weights[: len(self.up)], weights[len(self.up) :])
        parts = [gelu(x @ up.t(), approximate="tanh") @ down.t() for up, down in pairs]
        y = torch.stack(parts).to(torch.promote_types(dtype, torch.float32)).sum(0).to(dtype)
        up, down = weights[self.rank], weights[len(self.up) + self.rank]
        dx, dup, ddown = torch.autograd.grad(y, [x, up, down], self.dy.to(dtype))
        return [y.detach()[self.own], dx[self.own], dup, ddown]

    def check(self, results: list[Tensor]) -> None:
        exact, plain = self.expected(torch.float64), self.expected(DTYPE)
        for name, *tensors in zip(["y", "dx", "dup", "ddown"], results, exact, plain):
            if tensors[0].numel():
                assert_as_accurate(*tensors, times=TIMES[DTYPE], name=f"rank {self.rank} {name}")


def whole(x: Tensor, up: Tensor, down: Tensor, sizes: tuple[int, ...], group=None, method="fused") -> Tensor:
    both = {"group": group or dist.group.WORLD, "sizes": sizes, "method": method}
    hidden = all_gather_matmul(x, up, activation="gelu", **both)
    return matmul_reduce_scatter(hidden, down, **both)


def begun(x: Tensor, up: Tensor, down: Tensor, sizes: tuple[int, ...], group, method: str) -> Tensor:
    """The same in two halves: each op is begun for both before it is finished for one."""
    both = {"group": group, "sizes": sizes, "method": method}
    gathers = [begin_all_gather_matmul(half, [up], **both) for half in x.split(1, dim=1)]
    hidden = [gelu(finish()[0], approximate="tanh") for finish in gathers]
    scatters = [begin_matmul_reduce_scatter(half, down, **both) for half in hidden]
    return torch.cat([finish() for finish in scatters], dim=1)


STEPS = {"whole": whole, "begun": begun}


def run(leaves: list[Tensor], sizes: tuple[int, ...], dy: Tensor, function=whole) -> list[Tensor]:
    y = function(*leaves, sizes)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def run_block(rank, world, carrier, sizes, step):
    options = opened(carrier)
    blocks = [Block(sizes, rank, seed) for seed in range(5)]
    leaves = [block.leaves() for block in blocks]
    function = partial(STEPS[step], **options)
    # In a row, so that all buffers are used again while others still read them.
    results = [run(own, sizes, block.dy[block.own], function) for block, own in zip(blocks, leaves)]
    flag_transport_of(options["group"], "test", DEVICE, options["method"].partition(":")[2]).check()
    for block, result in zip(blocks, results):
        block.check(result)
    return last_path()


@over_each
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ops_and_gradients_agree_with_torch(carrier, step, sizes):
    for path in run_on(carrier, len(sizes), run_block, sizes, step):
        assert (path.method, path.transport) == ("fused", carrier), path.transport_reason


def run_all_reduce(rank, world, carrier):
    rows = sum(SIZES[0])
    xs = [randn(owner, rows, LEAD, INNER, dtype=DTYPE) for owner in range(world)]
    ws = [randn(10 + owner, HIDDEN, INNER, dtype=DTYPE, scale=INNER**-0.5) for owner in range(world)]
    y = matmul_all_reduce(xs[rank], ws[rank], **opened(carrier))
    exact = sum(linear(x.double(), w.double()) for x, w in zip(xs, ws))
    plain = sum(linear(x, w).float() for x, w in zip(xs, ws)).to(DTYPE)
    assert_as_accurate(y, exact, plain, times=TIMES[DTYPE])
    return y.cpu()


@over_each
def test_all_ranks_get_the_same_bits_of_a_whole_sum(carrier):
    first, second = run_on(carrier, 2, run_all_reduce)
    assert torch.equal(first, second)


def run_growing(rank, world):
    for call in range(4):
        block = Block(((3 if INTERPRETED else 40) << call,) * world, rank, call)
        result = run(block.leaves(), block.sizes, block.dy[block.own])
        block.check(result)


def test_buffers_grow_with_the_calls():
    run_ranks(2, in_place, run_growing, timeout_s=120)


def run_captured(rank, world, carrier, sizes, step):
    first = Block(sizes, rank, 0)
    leaves, dy, function = first.leaves(), first.dy[first.own].clone(), partial(STEPS[step], **opened(carrier))
    results, replay = capture(lambda: run(leaves, sizes, dy, function))
    for seed in range(1, 5):
        block = Block(sizes, rank, seed)
        with torch.no_grad():
            for leaf, value in zip([*leaves, dy], [*block.leaves(), block.dy[block.own]]):
                leaf.copy_(value)
        replay()
        block.check(results)
        # Calls outside of the graph use the same buffers, and count on from there.
        block.check(run(leaves, sizes, dy, function))


@over_each
@pytest.mark.parametrize("step", STEPS)
def test_a_captured_forward_and_backward_replays(carrier, step):
    run_on(carrier, 2, run_captured, SIZES[0], step)


def run_capture_unprepared(rank, world):
    x = torch.ones(16, 64, device=DEVICE, dtype=DTYPE)
    with pytest.raises(ValueError, match="run it once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        all_gather_matmul(x, x, group=dist.group.WORLD, method="fused")


@only_on_gpu
def test_a_capture_of_what_has_not_run_before_is_refused():
    run_ranks(2, in_place, run_capture_unprepared)


def run_compiled(rank, world, sizes):
    block = Block(sizes, rank, 0)
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    block.check(run(block.leaves(), sizes, block.dy[block.own], compiled))


def test_compiles_without_graph_breaks():
    run_ranks(2, in_place, run_compiled, SIZES[0], timeout_s=120)


def run_mismatch(rank, world):
    group = dist.new_group()
    x = torch.ones(16 + rank, 64, device=DEVICE, dtype=DTYPE)
    with pytest.raises(PeerError) as caught:
        all_gather_matmul(x, x, group=group, method="fused")
    return str(caught.value)


def test_a_peer_that_calls_something_else_is_named_on_every_rank():
    for message in run_ranks(2, in_place, run_mismatch):
        assert "sizes=[16, 16]" in message
        assert "sizes=[17, 17]" in message


def run_alone(rank, world, timeout_s):
    group, x = dist.group.WORLD, torch.ones(300, 64, device=DEVICE, dtype=DTYPE)
    all_gather_matmul(x, x, group=group, method="fused")
    transport = flag_transport_of(group, "test", DEVICE)
    transport.check()
    if rank == 0:
        begin_s = time.monotonic()
        all_gather_matmul(x, x, group=group, method="fused")
        with pytest.raises(PeerError, match="rank 1 of the group did not deliver chunk") as caught:
            transport.check()
        assert caught.value.rank == 1
        assert timeout_s / 2 < time.monotonic() - begin_s < 3 * timeout_s
        with pytest.raises(PeerError, match="an earlier call of this group failed"):
            all_gather_matmul(x, x, group=group, method="fused")


@only_on_gpu
def test_a_rank_that_stays_away_is_an_error_and_no_hang():
    run_ranks(2, in_place, run_alone, 5.0, fresh_timeout_s=5.0)


def run_late(rank, world, timeout_s):
    group, x = dist.group.WORLD, torch.ones(300, 64, device=DEVICE, dtype=DTYPE)
    all_gather_matmul(x, x, group=group, method="fused")
    transport = flag_transport_of(group, "test", DEVICE)
    transport.check()
    time.sleep(2 * timeout_s * rank)
    # Rank 0 gives the first up, and has begun the second by then.
    for _ in range(2):
        all_gather_matmul(x, x, group=group, method="fused")
    with pytest.raises(PeerError, match=f"rank {1 - rank} of the group did not deliver chunk"):
        transport.check()


@only_on_gpu
def test_a_rank_that_was_waited_for_in_vain_is_given_no_void_rows():
    run_ranks(2, in_place, run_late, 5.0, fresh_timeout_s=5.0)
