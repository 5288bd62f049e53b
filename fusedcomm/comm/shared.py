"""Flags and chunks between ranks of one machine: every rank maps the others' buffers in /dev/shm.

`FlagTransport` for CPU tensors. A thread of each rank copies its chunks into the peers' buffers and raises their flags
there; interpreted kernels wait for flags and raise them. So the protocol runs between real processes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fusedcomm.comm.buffers import rounded_up
from fusedcomm.comm.channel import Channel
from fusedcomm.comm.flights import CountedLane, FlightTransport, Turn
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
        super().__init__(channel.rank, channel.world, torch.device("cpu"), Threads(channel.timeout_s))
        self._channel = channel
        self._first_epoch = first_epoch
        self._lanes: dict[str, CountedLane] = {}

    def take_turn(self, op: str, kind: str, signature: str, num_bytes: int) -> Turn:
        """As `FlightTransport.take_turn`.

        Raises:
            PeerError: a peer calls something else, is gone or late; in the first call of a size, else `finish` does.
            ValueError: the ranks do not share a machine, or it has too little shared memory.
        """
        self.refuse_if_failed(op)
        channel, lane = self._channel, self._lanes.get(kind)
        if lane is None or lane.num_bytes < num_bytes:
            # All ranks come to this together: a call's shapes are the same on all of them.
            num_bytes = rounded_up(num_bytes)
            channel.check_same(op, f"{op}: {kind} in {num_bytes} bytes of shared memory", self._device)
            by_rank = map_everywhere(channel, op, num_bytes, self._first_epoch)
            lane = CountedLane(num_bytes, by_rank, self.rank, self._first_epoch, self._device)
            self._lanes[kind] = lane
        turn = lane.next_turn()
        headers = channel.announce(op, channel.next_call(), f"{signature}, epoch {int(turn.epoch)}")
        return replace(turn, check_peers=headers.check)
