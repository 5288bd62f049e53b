"""What an op asks of the wire, and the choice of who provides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.comm.c10d import GlooExchange, NcclExchange
from fusedcomm.comm.channel import Channel, channel_of
from fusedcomm.comm.ring import Step


class Exchange(Protocol):
    """The transfers of one op call on one rank.

    Planned when it is made: `outgoing[i]` leaves and `incoming[i]` is filled at step `i` (`None`: nothing to move).
    All tensors are contiguous and must stay untouched from `send(i)`, or from `start()` for `incoming`, to `finish()`.
    """

    def start(self) -> None:
        """Agree with the peers that all make this call, and be ready to receive. Does not block."""

    def send(self, index: int) -> None:
        """`outgoing[index]` is complete (on the current stream): let it go. Steps are sent in order. Does not block."""

    def wait(self, index: int) -> None:
        """Return when `incoming[index]` may be read (on the current stream)."""

    def finish(self) -> None:
        """Return when every buffer may be used again (on the current stream)."""


def open_exchange(
    group: ProcessGroup,
    op: str,
    signature: str,
    steps: Sequence[Step],
    outgoing: Sequence[Tensor | None],
    incoming: Sequence[Tensor | None],
    device: torch.device,
    *,
    overlapped: bool,
    paced: bool,
) -> Exchange:
    """The exchange for tensors on `device`: NCCL's for CUDA, gloo's for the CPU.

    `overlapped` says whether the caller computes meanwhile; without, nothing runs beside it. With `paced` a
    distance's rows leave only when those from the distance before have come in, which keeps messages to several peers
    from sharing the link; right where everything is ready to leave at once.

    Raises:
        ValueError: the group has no backend for that device.
    """
    channel: Channel = channel_of(group)
    backend = channel.backend_of(op, device)
    kind = NcclExchange if backend == "nccl" else GlooExchange
    return kind(channel, op, signature, steps, outgoing, incoming, overlapped, paced)
