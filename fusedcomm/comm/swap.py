"""Messages between ranks that know from one another what comes next: no headers, so as few as there can be.

For collectives whose order and sizes all ranks have agreed on beforehand. Over gloo a message's tag is a hash of the
call, its step and its size: it can only meet the receive of the very same one, and anything else ends in a time-out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, Work

from fusedcomm.comm.channel import Channel, payload_tag
from fusedcomm.comm.record import note


class Swap:
    """At most one message from, and one to, each peer of the channel's group.

    It is ready to receive into `receives` (by peer, contiguous) from the start on. `send` comes once, also with nothing
    to send; then `receive` waits for what peers sent, and `finish` for what was sent to them. Each of them raises
    PeerError if a peer is gone.
    """

    def __init__(self, channel: Channel, op: str, call: int, step: str, receives: Mapping[int, Tensor]) -> None:
        self._channel, self._group, self._op = channel, channel.group, op
        self._call, self._step = call, step
        self._receives = receives
        self._sends: Mapping[int, Tensor] = {}
        self._start_s = 0.0
        self._sent: dict[int, Work] = {}
        self._received: dict[int, Work] = {}
        self._on_gpu: list[Work] = []
        for peer, tensor in receives.items():
            # NCCL starts both directions together.
            if not tensor.is_cuda:
                self._received[peer] = self._begin(self._group.recv, tensor, peer)

    def send(self, sends: Mapping[int, Tensor]) -> None:
        """Let `sends` (by peer, contiguous) go; they must not change before `finish`. Does not block."""
        self._sends = sends
        self._start_s = time.perf_counter()
        transfers = [P2POp(dist.isend, tensor, group=self._group, group_peer=peer) for peer, tensor in sends.items()]
        if any(tensor.is_cuda for tensor in (*sends.values(), *self._receives.values())):
            for peer, tensor in self._receives.items():
                transfers.append(P2POp(dist.irecv, tensor, group=self._group, group_peer=peer))
            self._on_gpu = dist.batch_isend_irecv(transfers)
            return
        for peer, tensor in sends.items():
            self._sent[peer] = self._begin(self._group.send, tensor, peer)

    def receive(self) -> None:
        """Return when all of `receives` may be read (on the current stream).

        Raises:
            PeerError: a peer died, or is later than the group's time-out.
        """
        for work in self._on_gpu:
            work.wait()
        for peer, work in self._received.items():
            self._channel.wait_for(work, self._op, peer, self._call, f"did not deliver its {self._step}")
        if self._receives:
            num_bytes = sum(tensor.nbytes for tensor in self._sends.values())
            note("transfer", f"{self._op} {self._step}", self._start_s, num_bytes)

    def finish(self) -> None:
        """Return when what was sent may be overwritten (on the current stream); PeerError as `receive`."""
        for peer, work in self._sent.items():
            self._channel.wait_for(work, self._op, peer, self._call, f"did not take this rank's {self._step}")

    def _begin(self, transfer: Callable[[list[Tensor], int, int], Work], tensor: Tensor, peer: int) -> Work:
        tag = payload_tag(self._call, f"{self._op} {self._step} {tensor.nbytes}")
        return self._channel.begin(transfer, tensor, self._op, peer, tag, self._call)
