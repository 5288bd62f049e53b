"""Fused ops that are begun and finished apart, several of them under way at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from hostile import CARRIERS, hostile
from test_nn_transformer import GROUPED, with_dropout
from test_nn_turns import run_halves
from test_ops_begin import ROWS, begun_blocks, leaves, run_both, run_partly_needed

from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.comm.transport import flag_transport_of


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    ("world", "save", "dtype", "rows", "wgrad"),
    [
        (2, "shard", torch.float32, ROWS, "at_once"),
        (3, "gathered", torch.bfloat16, ROWS, "autograd"),
        (3, "shard", torch.float16, 2, "later"),
        (2, "shard", torch.float32, 0, "autograd"),
    ],
    ids=str,
)
def test_begun_and_finished_it_is_the_whole_op_to_the_bit(carrier, world, save, dtype, rows, wgrad):
    for equal in run_ranks(world, hostile, carrier, run_both, "fused", save, dtype, rows, world - 1, wgrad):
        assert all(equal), equal


def test_gradients_that_nobody_needs_are_not_computed():
    for found in run_ranks(2, run_partly_needed, "fused"):
        assert all(found), found


def run_many(rank, world, num_blocks):
    blocks = [leaves(rank, world, seed) for seed in range(num_blocks)]
    numbers = []
    for _ in range(3):
        sum(y.sum() for y in begun_blocks(blocks, chunk_sizes(ROWS, world), method="fused")).backward()
        lanes = flag_transport_of(dist.group.WORLD, "test", torch.device("cpu"))._lanes
        numbers.append([len(lanes[kind]._free) for kind in ("gather", "scatter")])
    return numbers


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_there_is_one_buffer_more_than_calls_under_way(num_blocks):
    for numbers in run_ranks(2, hostile, "shared", run_many, num_blocks):
        assert numbers == [[num_blocks + 1] * 2] * 3


def test_halves_in_turns_are_the_halves_one_after_the_other_to_the_bit():
    config = with_dropout(GROUPED, checkpointing="full")
    for equal, paths in run_ranks(2, run_halves, config, 3, "fused", "shard", torch.float32):
        assert all(equal), equal
        assert paths == {"all_gather_matmul:fused over shared": 8, "matmul_reduce_scatter:fused over shared": 8}
