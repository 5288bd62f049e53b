"""How fast the links between and inside nodes are, measured on the group that will use them."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import channel_of
from fusedcomm.comm.swap import Swap
from fusedcomm.tune.cost import Link, Links

_OP = "measuring links"
_ROUNDS = 5
_LARGE_BYTES = 2**20


def measure_links(
    group: ProcessGroup, in_node: ProcessGroup | None, across: ProcessGroup | None, device: torch.device
) -> Links:
    """The links of `group`, whose levels are as `level_groups` made them; the same result on every rank.

    On each level every rank sends to the next one, all at once, as they do later on: 64 bytes to find the latency,
    1 MiB to find the rate, 5 times each. Of each time the slowest rank's counts, and of those the best, since a busy
    machine only adds to it.
    """
    times_s = torch.tensor([_ring_times_s(in_node, device), _ring_times_s(across, device)], dtype=torch.float64)
    times_s = times_s.to(device)
    dist.all_reduce(times_s, dist.ReduceOp.MAX, group=group)
    inside, between = (_link(*level) for level in times_s.amin(1).tolist())
    per_node = 1 if in_node is None else in_node.size()
    # The ranks of a node have sent through its link together.
    return Links(inside, Link(between.latency_s, between.bytes_per_s * per_node))


def _link(small_s: float, large_s: float) -> Link:
    # A level of one rank took no time, and has no link.
    return Link(small_s, _LARGE_BYTES / large_s if large_s else float("inf"))


def _ring_times_s(group: ProcessGroup | None, device: torch.device) -> list[tuple[float, float]]:
    """Seconds to pass a small and a large message on, of each round."""
    if group is None:
        return [(0.0, 0.0)] * _ROUNDS
    small, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (64, _LARGE_BYTES))
    # The first round connects. Large messages of slower ranks would hold up small ones: one kind after the other.
    small_s = [_pass_on_s(group, call, small) for call in range(_ROUNDS + 1)]
    large_s = [_pass_on_s(group, call, large) for call in range(_ROUNDS)]
    return list(zip(small_s[1:], large_s))


def _pass_on_s(group: ProcessGroup, call: int, message: Tensor) -> float:
    rank, world = group.rank(), group.size()
    swap = Swap(channel_of(group), _OP, call, "message", {(rank - 1) % world: torch.empty_like(message)})
    begin_s = time.perf_counter()
    swap.send({(rank + 1) % world: message})
    swap.receive()
    swap.finish()
    if message.is_cuda:
        torch.cuda.synchronize(message.device)
    return time.perf_counter() - begin_s
