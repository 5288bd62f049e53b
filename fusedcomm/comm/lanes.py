"""Which buffers the calls of one kind use: each takes one on every rank, and gives it back when it is finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from fusedcomm.comm.buffers import Buffer
from fusedcomm.comm.ring import Step
from fusedcomm.comm.transport import Exchange

# A call leaves this one free: were the next to take what has just been read, its sender would have to wait for that.
_SPARE = 1
# Of each step of an exchange.
Rows: TypeAlias = Sequence[Tensor | None]


@dataclass(frozen=True)
class Turn:
    """What one call uses.

    Attributes:
        buffers: those of all ranks into which this one can write, and `mine`, its own.
        epoch, before: [1] int32, the call's epoch and the one before it, on this rank's device.
        release: gives the buffers back; the flight does when it is finished.
        check_peers: PeerError if a peer does not make this call, where that is not known yet.
        exchange: where rows travel as messages, opens those of the call: what leaves and what comes in at each step.
    """

    buffers: Sequence[Buffer]
    mine: Buffer
    epoch: Tensor
    before: Tensor
    release: Callable[[], None]
    check_peers: Callable[[], None] = lambda: None
    exchange: Callable[[Sequence[Step], Rows, Rows], Exchange] | None = None


class Lane:
    """The buffers of one kind of call, of one size, each with the number of its calls.

    A call takes those that have been free for longest. Ranks make and finish their calls in one order, and so take the
    same ones. The device counts: so a captured graph goes on counting when it is replayed. It stops when a kernel has
    waited in vain, which `status` says: what this rank computes from then on is void, and no flag may give it out for
    the rows of a call.
    """

    def __init__(self, num_bytes: int, first_epoch: int, status: Tensor) -> None:
        self.num_bytes = num_bytes
        self._first_epoch = first_epoch
        self._status = status
        self._free: deque[tuple[Sequence[Buffer], Buffer, Tensor]] = deque()

    @property
    def is_short(self) -> bool:
        """Whether the next call must be given another buffer."""
        return len(self._free) <= _SPARE

    def add(self, buffers: Sequence[Buffer], mine: Buffer) -> None:
        """One more, on all ranks at this point of their calls: as in `Turn`."""
        epochs = torch.tensor([self._first_epoch, self._first_epoch - 1], dtype=torch.int32, device=self._status.device)
        self._free.append((buffers, mine, epochs))

    def take(self, *, dry: bool = False) -> Turn:
        """For the next call. If it is `dry` the epoch, for which all flags are up, remains as it is."""
        taken = self._free.popleft()
        buffers, mine, epochs = taken
        if not dry:
            epochs.add_(self._status[0] == 0)
        return Turn(buffers, mine, epochs[:1], epochs[1:], lambda: self._free.append(taken))
