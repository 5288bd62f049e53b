"""Reduce-scatter and all-gather between the owners of a buffer's parts, by direct messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import channel_of
from fusedcomm.comm.collective import Pending
from fusedcomm.comm.pool import BufferPool
from fusedcomm.comm.stages import Job, Stages
from fusedcomm.comm.swap import Swap

_POOL = BufferPool()
# What a rank owns of a piece: contiguous tensors, one after the other.
Part = Sequence[Tensor]


class Owners:
    """What each rank of `group` owns is summed for it, or sent by it to all others.

    Every rank starts the same calls in the same order, with parts of the same sizes, from any thread. Per call a rank
    sends one message to each peer, and receives one: (W - 1) / W of the whole, the least possible. A part of several
    tensors is packed; a single one travels from and to where it lies. Sums are in fp32 in the order of ranks: the same
    bits in every run and however a buffer is cut.

    A call does not block. Its tensors may be touched again after `wait()` of what it returns. PeerError as `Swap`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._channel, self._rank, self._world = channel_of(group), group.rank(), group.size()
        # Each starts with the next one, so that not all send to the same.
        self._peers = [(self._rank + distance) % self._world for distance in range(1, self._world)]
        self._stages = Stages(2, "fusedcomm-owners")
        self._calls = 0

    def reduce(self, parts: Sequence[Part], device: torch.device) -> Pending:
        """Begin to replace this rank's part, of fp32 tensors, by its sum over the ranks; the others stay as they are.

        `parts` by rank.
        """
        self._calls += 1
        return self._stages.start([self._reduce(parts, self._calls)], device)

    def gather(self, parts: Sequence[Part], device: torch.device) -> Pending:
        """Begin to replace each part, by rank, by what its owner holds there."""
        self._calls += 1
        return self._stages.start([self._gather(parts, self._calls)], device)

    def _reduce(self, parts: Sequence[Part], call: int) -> Job:
        staged = _Staging()
        own = staged.packed(parts[self._rank])
        summands = {peer: staged.take(own) for peer in self._peers} if own.numel() else {}
        swap = Swap(self._channel, "reduce-scatter", call, "summands", summands)
        swap.send(self._not_empty({peer: staged.packed(parts[peer]) for peer in self._peers}))
        yield
        swap.receive()
        if summands:
            terms = [own if rank == self._rank else summands[rank] for rank in range(self._world)]
            add_in_order(terms, own, staged.take)
            _unpack(own, parts[self._rank])
        swap.finish()
        staged.give_back()

    def _gather(self, parts: Sequence[Part], call: int) -> Job:
        staged = _Staging()
        theirs = self._not_empty({peer: staged.room_for(parts[peer]) for peer in self._peers})
        swap = Swap(self._channel, "all-gather", call, "part", theirs)
        own = staged.packed(parts[self._rank])
        swap.send(dict.fromkeys(self._peers, own) if own.numel() else {})
        yield
        swap.receive()
        for peer, wire in theirs.items():
            _unpack(wire, parts[peer])
        swap.finish()
        staged.give_back()

    def _not_empty(self, by_peer: dict[int, Tensor]) -> dict[int, Tensor]:
        return {peer: tensor for peer, tensor in by_peer.items() if tensor.numel()}


def add_in_order(terms: Sequence[Tensor], own: Tensor, take: Callable[[Tensor], Tensor]) -> None:
    """The sum of `terms`, in their order, into `own`, which is one of them; `take` lends a buffer like it."""
    # `own` may take the sum as soon as its own summand is in.
    total = own if own is terms[0] or own is terms[1] else take(own)
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total += term
    if total is not own:
        own.copy_(total)


class _Staging:
    """The buffers of one call."""

    def __init__(self) -> None:
        self._taken: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        self._taken.append(_POOL.take((like.numel(),), like))
        return self._taken[-1]

    def room_for(self, part: Part) -> Tensor:
        """[n]: the part itself, or where several tensors are packed."""
        if len(part) == 1:
            return part[0]
        if not part:
            return torch.empty(0)
        self._taken.append(_POOL.take((sum(tensor.numel() for tensor in part),), part[0]))
        return self._taken[-1]

    def packed(self, part: Part) -> Tensor:
        wire = self.room_for(part)
        if len(part) > 1:
            torch.cat(list(part), out=wire)
        return wire

    def give_back(self) -> None:
        while self._taken:
            _POOL.give(self._taken.pop())


def _unpack(wire: Tensor, part: Part) -> None:
    if len(part) > 1:
        for tensor, values in zip(part, wire.split([tensor.numel() for tensor in part])):
            tensor.copy_(values)
