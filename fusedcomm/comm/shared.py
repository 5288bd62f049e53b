"""Flags and chunks between ranks of one machine: every rank maps the others' buffers in /dev/shm.

`FlagTransport` for CPU tensors. A thread of each rank copies its chunks into the peers' buffers and raises their flags
there; interpreted kernels wait for flags and raise them. So the protocol runs between real processes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fusedcomm.comm.buffers import Buffer
from fusedcomm.comm.channel import Channel
from fusedcomm.comm.flights import FlightTransport
from fusedcomm.comm.lanes import Turn
from fusedcomm.comm.shared_memory import map_everywhere
from fusedcomm.comm.threads import Threads


class SharedTransport(FlightTransport):
    """`FlagTransport` of one group over shared memory; its calls are calls of the group's `Channel`.

    Args:
        first_epoch: that of all buffers before the first call.
    """

    name = "shared"
    communication_sms = 0

    def __init__(self, channel: Channel, first_epoch: int = 0) -> None:
        super().__init__(channel.rank, channel.world, torch.device("cpu"), Threads(channel.timeout_s), first_epoch)
        self._channel = channel

    def take_turn(self, op: str, kind: str, signature: str, num_bytes: int) -> Turn:
        """As `FlightTransport.take_turn`.

        Raises:
            PeerError: a peer calls something else, is gone or late; where buffers are made, else `finish` does.
            ValueError: the ranks do not share a machine, or it has too little shared memory.
        """
        self.refuse_if_failed(op)
        turn = self.lane(op, kind, num_bytes).take()
        headers = self._channel.announce(op, self._channel.next_call(), f"{signature}, epoch {int(turn.epoch)}")
        return replace(turn, check_peers=headers.check)

    def make_buffer(self, op: str, kind: str, num_bytes: int) -> tuple[list[Buffer], Buffer]:
        self._channel.check_same(op, f"{op}: {kind} in {num_bytes} bytes of shared memory", self._device)
        by_rank = map_everywhere(self._channel, op, num_bytes, self._first_epoch)
        return by_rank, by_rank[self.rank]
