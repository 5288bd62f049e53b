"""Reduce-scatter and all-gather of equal shares by direct messages: what must travel, and nothing else.

gloo's own reduce-scatter moves twice the bytes. Here each rank sends every other one its part of that one's share, and
the owner adds in fp32 in the order of ranks, so that the sum does not depend on who came first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from fusedcomm.comm.collective import Pending
from fusedcomm.comm.pool import STAGING


class Shares:
    """Both directions, over one group whose ranks start the same ones in the same order.

    Shapes per rank, W ranks: `parts` is [W, n] with contiguous rows; row r is rank r's share.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._rank, self._world = group.rank(), group.size()

    def start_scatter(self, parts: Tensor) -> Pending:
        """Begin to put the sum over the ranks into this rank's own row; the other rows stay as they are."""
        incoming = {peer: STAGING.take((parts.shape[1],), parts) for peer in self._peers()}
        transfers = [P2POp(dist.isend, parts[peer], group=self._group, group_peer=peer) for peer in self._peers()]
        transfers += [
            P2POp(dist.irecv, tensor, group=self._group, group_peer=peer) for peer, tensor in incoming.items()
        ]
        return _Scatter(dist.batch_isend_irecv(transfers), parts[self._rank], self._rank, incoming)

    def start_gather(self, parts: Tensor) -> Pending:
        """Begin to fill the other ranks' rows with their owners' content."""
        own = parts[self._rank]
        transfers = [P2POp(dist.isend, own, group=self._group, group_peer=peer) for peer in self._peers()]
        transfers += [P2POp(dist.irecv, parts[peer], group=self._group, group_peer=peer) for peer in self._peers()]
        return _Gather(dist.batch_isend_irecv(transfers))

    def _peers(self) -> list[int]:
        # To the right first, so that not all ranks send to the same one.
        return [(self._rank + distance) % self._world for distance in range(1, self._world)]


@dataclass
class _Gather:
    works: list[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass
class _Scatter:
    works: list[Work]
    own: Tensor
    rank: int
    incoming: dict[int, Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        total = self.own if self.rank == 0 else self.incoming[0]
        for peer in range(1, len(self.incoming) + 1):
            total.add_(self.own if peer == self.rank else self.incoming[peer])
        self.own.copy_(total)
        for tensor in self.incoming.values():
            STAGING.give(tensor)
