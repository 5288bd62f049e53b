"""All-reduce in log2(W) rounds, for buffers so small that latency is all their cost."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import channel_of
from fusedcomm.comm.collective import Pending
from fusedcomm.comm.pool import BufferPool
from fusedcomm.comm.stages import Job, Stages
from fusedcomm.comm.swap import Swap

_OP = "tree all-reduce"
_POOL = BufferPool()


class Tree:
    """`Collective` by recursive doubling: in round i a rank swaps its sum so far with `rank ^ 2^i`.

    All of the buffer travels in each of the log2(W) rounds, where a ring moves less than twice the buffer in 2 (W - 1)
    rounds. If W is no power of two, the ranks beyond the largest one, P, first give their summands to `rank - P`, and
    get the sum from there: two rounds more.

    Sums are in fp32 in the order of the tree, ((g0 + g1) + (g2 + g3)) + ..., with g0 + gP in place of g0 where there is
    a rank P: the same bits on every rank and in every run. PeerError as `Swap`.

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._channel, self._rank, self._world = channel_of(group), group.rank(), group.size()
        self._stages = Stages(1, "fusedcomm-tree")
        self._calls = 0

    def start(self, flat: Tensor, offset: int) -> Pending:
        """Begin to replace `flat` by its sum over the group."""
        self._calls += 1
        jobs = [self._sum(flat, self._calls)] if flat.numel() else []
        return self._stages.start(jobs, flat.device)

    def _sum(self, flat: Tensor, call: int) -> Job:
        power = 1 << (self._world.bit_length() - 1)
        peers = [self._rank ^ (1 << bit) for bit in range(power.bit_length() - 1)]
        if self._rank >= power:
            back = self._swap(call, "sum", {self._rank - power: flat})
            self._send_once(call, "summand", self._rank - power, flat)
            back.send({})
            back.receive()
            return
        has_extra = self._rank + power < self._world
        sources = [self._rank + power, *peers] if has_extra else peers
        # Round by round the other half of the sum comes in here, and this half is added to it.
        staged = [_POOL.take((flat.numel(),), flat) for _ in sources]
        names = [f"round {index}" for index in range(len(peers))]
        swaps = [
            self._swap(call, name, {source: buffer})
            for name, source, buffer in zip(["summand", *names] if has_extra else names, sources, staged)
        ]
        total = flat
        for swap, source, buffer in zip(swaps, sources, staged):
            swap.send({source: total} if source < power else {})
            swap.receive()
            total = torch.add(total, buffer, out=buffer)
        for swap in swaps:
            swap.finish()
        flat.copy_(total)
        for buffer in staged:
            _POOL.give(buffer)
        if has_extra:
            self._send_once(call, "sum", self._rank + power, flat)
        # A generator, whose only step this is.
        yield from ()

    def _swap(self, call: int, step: str, receives: dict[int, Tensor]) -> Swap:
        return Swap(self._channel, _OP, call, step, receives)

    def _send_once(self, call: int, step: str, peer: int, tensor: Tensor) -> None:
        swap = self._swap(call, step, {})
        swap.send({peer: tensor})
        swap.finish()
