"""method="fused" between real processes over symmetric memory; ranks share a GPU where there are fewer GPUs."""

from __future__ import annotations

import os
import time
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import assert_as_accurate, run_ranks
from place import INTERPRETED, randn
from torch import Tensor
from torch.nn.functional import gelu

from fusedcomm import PeerError, all_gather_matmul, last_path, matmul_reduce_scatter
from fusedcomm.comm.transport import flag_transport_of
from fusedcomm.tune import cost

pytestmark = pytest.mark.skipif(INTERPRETED, reason="symmetric memory is that of GPUs; tests/kernels has CPU ranks")
# Read by torch in the ranks, which inherit it; two on one GPU are refused without.
os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

DTYPE = torch.bfloat16
LEAD, HIDDEN, INNER = 2, 256, 336
# Uneven, with an empty shard; a shard is cut into one to three chunks.
SIZES = [(300, 411), (200, 0, 317)]


def on_gpu(rank, world, function, *args):
    """`function(rank, world, *args)` on this rank's GPU, with several chunks a shard."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with patch.object(cost, "_ROWS_PER_FUSED_CHUNK", 100), patch.object(cost, "_MAX_FUSED_CHUNKS", 3):
        return function(rank, world, *args)


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
                assert_as_accurate(*tensors, name=f"rank {self.rank} {name}")


def forward(x: Tensor, up: Tensor, down: Tensor, sizes: tuple[int, ...], group=None, method="fused") -> Tensor:
    group = group or dist.group.WORLD
    hidden = all_gather_matmul(x, up, group=group, sizes=sizes, activation="gelu", method=method)
    return matmul_reduce_scatter(hidden, down, group=group, sizes=sizes, method=method)


def run(leaves: list[Tensor], sizes: tuple[int, ...], dy: Tensor, function=forward) -> list[Tensor]:
    y = function(*leaves, sizes)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def run_block(rank, world, sizes):
    blocks = [Block(sizes, rank, seed) for seed in range(5)]
    leaves = [block.leaves() for block in blocks]
    # In a row, so that both buffers are used again while others still read them.
    results = [run(own, sizes, block.dy[block.own]) for block, own in zip(blocks, leaves)]
    flag_transport_of(dist.group.WORLD, "test", torch.device("cuda")).check()
    for block, result in zip(blocks, results):
        block.check(result)
    return last_path()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ops_and_gradients_agree_with_torch(sizes):
    for path in run_ranks(len(sizes), on_gpu, run_block, sizes, timeout_s=120):
        assert (path.method, path.transport) == ("fused", "symmetric"), path.transport_reason


def run_over_nccl(rank, world, sizes):
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    blocks = [Block(sizes, rank, seed) for seed in range(5)]
    call = partial(forward, group=group, method="fused:c10d")
    for block, result in [(block, run(block.leaves(), sizes, block.dy[block.own], call)) for block in blocks]:
        block.check(result)
    flag_transport_of(group, "test", torch.device("cuda"), "c10d").check()
    return last_path()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ops_and_gradients_agree_with_torch_over_nccl(sizes):
    if torch.cuda.device_count() < len(sizes):
        pytest.skip(f"NCCL refuses two ranks on one GPU: {len(sizes)} ranks, {torch.cuda.device_count()} GPUs")
    for path in run_ranks(len(sizes), on_gpu, run_over_nccl, sizes, timeout_s=120):
        assert (path.method, path.transport, path.transport_reason) == ("fused", "c10d", "asked for")


def run_growing(rank, world):
    for call in range(4):
        block = Block((40 << call,) * world, rank, call)
        result = run(block.leaves(), block.sizes, block.dy[block.own])
        block.check(result)


def test_buffers_grow_with_the_calls():
    run_ranks(2, on_gpu, run_growing, timeout_s=120)


def run_captured(rank, world, sizes):
    first = Block(sizes, rank, 0)
    leaves, dy = first.leaves(), first.dy[first.own].clone()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(leaves, sizes, dy)
    with torch.cuda.graph(graph, stream=stream):
        results = run(leaves, sizes, dy)
    for seed in range(1, 5):
        block = Block(sizes, rank, seed)
        with torch.no_grad():
            for leaf, value in zip([*leaves, dy], [*block.leaves(), block.dy[block.own]]):
                leaf.copy_(value)
        graph.replay()
        block.check(results)
        # Calls outside of the graph use the same buffers, and count on from there.
        block.check(run(leaves, sizes, dy))


def test_a_captured_forward_and_backward_replays():
    run_ranks(2, on_gpu, run_captured, SIZES[0], timeout_s=120)


def run_capture_unprepared(rank, world):
    x = torch.ones(16, 64, device="cuda", dtype=DTYPE)
    with pytest.raises(ValueError, match="run it once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        all_gather_matmul(x, x, group=dist.group.WORLD, method="fused")


def test_a_capture_of_what_has_not_run_before_is_refused():
    run_ranks(2, on_gpu, run_capture_unprepared)


def run_compiled(rank, world, sizes):
    block = Block(sizes, rank, 0)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    block.check(run(block.leaves(), sizes, block.dy[block.own], compiled))


def test_compiles_without_graph_breaks():
    run_ranks(2, on_gpu, run_compiled, SIZES[0], timeout_s=120)


def run_mismatch(rank, world):
    group = dist.new_group()
    x = torch.ones(16 + rank, 64, device="cuda", dtype=DTYPE)
    with pytest.raises(PeerError) as caught:
        all_gather_matmul(x, x, group=group, method="fused")
    return str(caught.value)


def test_a_peer_that_calls_something_else_is_named_on_every_rank():
    for message in run_ranks(2, on_gpu, run_mismatch):
        assert "sizes=[16, 16]" in message
        assert "sizes=[17, 17]" in message


def run_alone(rank, world, timeout_s):
    group, x = dist.group.WORLD, torch.ones(300, 64, device="cuda", dtype=DTYPE)
    all_gather_matmul(x, x, group=group, method="fused")
    transport = flag_transport_of(group, "test", torch.device("cuda"))
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


def test_a_rank_that_stays_away_is_an_error_and_no_hang():
    run_ranks(2, on_gpu, run_alone, 5.0, fresh_timeout_s=5.0)
