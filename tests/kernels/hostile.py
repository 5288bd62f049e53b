"""What may go wrong between ranks, made to happen: delays, stale rows, numbers that wrap, several chunks a shard."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from fusedcomm.comm import shared_memory, transport
from fusedcomm.comm.channel import channel_of
from fusedcomm.comm.exchanged import ExchangedTransport
from fusedcomm.comm.flights import FlightTransport, _Flight
from fusedcomm.comm.shared import SharedTransport
from fusedcomm.tune import cost

# A buffer's second call has the largest number of 32 bits, its third the smallest.
NEAR_WRAP = 2**31 - 3
# In whatever dtype, bytes of these are NaN.
_NAN = 255


def late(rank: int, call: int) -> None:
    """A delay that differs from rank to rank and from call to call, and now and then is long."""
    time.sleep(random.Random(f"{rank} {call}").choice([0, 0, 0.002, 0.03]))


@contextmanager
def delayed_deliveries(rank: int) -> Iterator[None]:
    """Each chunk of this rank leaves at some other time."""
    deliver, chance = _Flight._deliver, random.Random(rank)

    def deliver_late(self: _Flight, *args: Any) -> None:
        time.sleep(chance.choice([0, 0, 0.01]))
        deliver(self, *args)

    with patch.object(_Flight, "_deliver", deliver_late):
        yield


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """What a call has not received is NaN: buffers are when they are made, and again when they were read."""
    create, finish = shared_memory._create, _Flight.finish

    def create_poisoned(path, num_bytes, world, epoch):
        create(path, num_bytes, world, epoch)
        shared_memory._map(path, num_bytes, world).data.fill_(_NAN)

    def finish_poisoned(self: _Flight) -> None:
        # Raised again by `finish` itself.
        with suppress(Exception):
            self._place.wait(self._sent)
        # Our rows have been sent, all others were read, and the peers are not told yet.
        self._turn.mine.data.fill_(_NAN)
        finish(self)

    with patch.object(shared_memory, "_create", create_poisoned), patch.object(_Flight, "finish", finish_poisoned):
        yield


# Those between processes on CPUs.
CARRIERS = ("shared", "c10d")


def hostile(rank: int, world: int, carrier: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function(rank, world, *args)` on a transport of its own, with all of that."""
    group = dist.group.WORLD
    channel = channel_of(group)
    with ExitStack() as stack:
        stack.enter_context(delayed_deliveries(rank))
        stack.enter_context(poisoned_buffers())
        stack.enter_context(patch.object(cost, "_ROWS_PER_FUSED_CHUNK", 2))
        stack.enter_context(patch.object(cost, "_MAX_FUSED_CHUNKS", 3))
        if carrier == "shared":
            made: FlightTransport = SharedTransport(channel, NEAR_WRAP)
        else:
            made = ExchangedTransport(channel, "test", torch.device("cpu"), NEAR_WRAP)
        carriers = transport._carriers[group] = transport._Carriers(channel)
        carriers._automatic["cpu"] = made
        # Other tests of the same processes choose for themselves.
        stack.callback(transport._carriers.pop, group)
        return function(rank, world, *args)
