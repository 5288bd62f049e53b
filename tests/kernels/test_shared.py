from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import RankFailure, assert_as_accurate, run_ranks
from hostile import NEAR_WRAP, delayed_deliveries, late
from peers import CONFIG
from torch.nn.functional import linear

from fusedcomm.comm import shared_memory
from fusedcomm.comm.channel import Channel, channel_of
from fusedcomm.comm.exchanged import ExchangedTransport
from fusedcomm.comm.flights import _Flight
from fusedcomm.comm.shared import SharedTransport
from fusedcomm.errors import PeerError
from fusedcomm.kernels.all_gather_matmul import all_gather_matmul
from fusedcomm.kernels.await_rows import await_rows
from fusedcomm.kernels.host_flags import is_up
from fusedcomm.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.kernels.reduce import reduce
from fusedcomm.ops.fused import FusedCall, Gather

GRID = {"config": CONFIG, "num_programs": 2}


def transport_of(first_epoch: int = NEAR_WRAP) -> SharedTransport:
    return SharedTransport(channel_of(dist.group.WORLD), first_epoch)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def delayed(rank, world, function, *args):
    with delayed_deliveries(rank):
        return function(rank, world, *args)


def gather_often(rank, world, sizes, pieces, features):
    transport = transport_of()
    for call in range(7):
        late(rank, call)
        x = numbers(call, sum(sizes), features)
        start = sum(sizes[:rank])
        flight = transport.gather("op", f"op {call}", x[start : start + sizes[rank]], sizes, pieces)
        w, y = numbers(100 + rank, 20, features), torch.full((sum(sizes), 20), float("nan"))
        late(rank, -call)
        all_gather_matmul(
            flight.x_full, w, y, chunks=flight.chunks, status=flight.status, timeout_us=flight.timeout_us, **GRID
        )
        await_rows(flight.chunks, sum(sizes), status=flight.status, timeout_us=flight.timeout_us)
        assert torch.equal(flight.x_full, x)
        # What the next but one call must replace. Our own rows may still be on their way from here.
        flight.x_full[:start], flight.x_full[start + sizes[rank] :] = float("nan"), float("nan")
        flight.finish()
        assert_as_accurate(y, linear(x.double(), w.double()), linear(x, w))


@pytest.mark.parametrize(("sizes", "pieces"), [([37], 2), ([37, 40], 1), ([0, 33, 5], 3), ([20, 0, 64, 1], 2)], ids=str)
def test_gathered_rows_are_those_of_their_call(sizes, pieces):
    run_ranks(len(sizes), delayed, gather_often, sizes, pieces, 24)


def scatter_once(transport, call, rank, sizes, pieces, features):
    world, rows = len(sizes), sum(sizes)
    x = [numbers(10 * call + source, rows, 24) for source in range(world)]
    w = [numbers(100 + source, features, 24) for source in range(world)]
    flight = transport.scatter("op", f"op {call}", x[0], features, sizes, pieces)
    flight.y_partial.fill_(float("nan"))
    flags = {"chunks": flight.chunks, "counters": flight.counters}
    flight.produce(lambda: matmul_reduce_scatter(x[rank], w[rank], flight.y_partial, **flags, **GRID))
    late(rank, -call)
    await_rows(flight.arrivals, world * sizes[rank], status=flight.status, timeout_us=flight.timeout_us)
    y = torch.full((sizes[rank], features), float("nan"))
    reduce(flight.summands, y)
    # What the next but one call must replace.
    flight.summands.fill_(float("nan"))
    flight.finish()
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    exact = torch.stack([linear(a[own].double(), b.double()) for a, b in zip(x, w)]).sum(0)
    plain = torch.stack([linear(a[own], b) for a, b in zip(x, w)]).sum(0)
    assert_as_accurate(y, exact, plain)


def scatter_often(rank, world, sizes, pieces, features):
    transport = transport_of()
    for call in range(7):
        late(rank, call)
        scatter_once(transport, call, rank, sizes, pieces, features)


@pytest.mark.parametrize(("sizes", "pieces"), [([37], 2), ([37, 40], 1), ([0, 33, 5], 3), ([20, 0, 64, 1], 2)], ids=str)
def test_scattered_sums_are_those_of_their_call(sizes, pieces):
    run_ranks(len(sizes), delayed, scatter_often, sizes, pieces, 20)


class Unchecked(SharedTransport):
    """Its thread does not wait until peers make the call: only what else keeps a copy back does."""

    def take_turn(self, *args):
        turn = super().take_turn(*args)
        # Kept, with the receives that are posted.
        self.turns = [*getattr(self, "turns", []), turn]
        return replace(turn, check_peers=lambda: None)


def read_late(rank, world, with_barrier):
    """Rank 1 reads its rows of call 1 when rank 0 has been through it and is in call 4, on the same buffer."""
    transport = Unchecked(channel_of(dist.group.WORLD), NEAR_WRAP)
    group = dist.group.WORLD

    def begin(*calls):
        return [transport.gather("op", f"op {call}", numbers(call, 8, 4), [8, 8], 1) for call in calls]

    without = nullcontext() if with_barrier else patch.object(_Flight, "_await_done", lambda self, peer: None)
    with without:
        first, second = begin(1, 2)
        if rank == 0:
            for flight in (first, second):
                await_rows(flight.chunks, 16, status=flight.status, timeout_us=flight.timeout_us)
                flight.finish()
            third, fourth = begin(3, 4)
            dist.barrier(group)
            if not with_barrier:
                return None
        else:
            dist.barrier(group)
            # Long enough for rank 0's thread to have copied, if nothing stops it.
            deadline_s = time.monotonic() + (0.3 if with_barrier else 30)
            epoch = int(first.chunks.epoch) + 1
            while not is_up(first.chunks.flags, 0, epoch) and time.monotonic() < deadline_s:
                time.sleep(0.001)
            await_rows(first.chunks, 16, status=first.status, timeout_us=first.timeout_us)
            found = next(call for call in (1, 4) if torch.equal(first.x_full[:8], numbers(call, 8, 4)))
            if not with_barrier:
                return found
            first.finish()
            second.finish()
            third, fourth = begin(3, 4)
        arrived = []
        for call, flight in ((3, third), (4, fourth)):
            await_rows(flight.chunks, 16, status=flight.status, timeout_us=flight.timeout_us)
            arrived.append(torch.equal(flight.x_full, numbers(call, 8, 4).repeat(2, 1)))
            flight.finish()
    return all(arrived), found if rank else None


def test_rows_that_were_not_read_are_not_overwritten():
    assert run_ranks(2, read_late, True) == [(True, None), (True, 1)]


def test_without_the_reuse_barrier_they_would_be():
    assert run_ranks(2, read_late, False, fresh_timeout_s=30.0) == [None, 4]


def gather_unread(rank, world):
    """Whether rows that nobody reads are all there when their buffer is given back, though rank 1 is late."""
    transport = Unchecked(channel_of(dist.group.WORLD), NEAR_WRAP)
    for call in (1, 2):
        x = numbers(call, 16, 1, 4)
        time.sleep(0.3 * (call - 1) * rank)
        gather = Gather(FusedCall(f"op {call}", transport, (8, 8), 1), x[8 * rank : 8 * rank + 8])
        gather.finish()
        complete = torch.equal(gather.full, x)
    return complete


def test_rows_that_nobody_reads_are_waited_for():
    assert run_ranks(2, gather_unread) == [True, True]


def names_left() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("fusedcomm-*")}


def lose_peer(rank, world, how):
    """The last rank is lost in some way; what the others get from their calls."""
    transport = transport_of()
    lost = rank == world - 1
    if how == "while buffers are made" and lost:
        with patch.object(shared_memory, "_create", lambda *args: os.kill(os.getpid(), signal.SIGKILL)):
            gather_once(transport, rank, world, 1)
    gather_once(transport, rank, world, 1)
    if how == "between calls" and lost:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "silent" and lost:
        time.sleep(6)
        return
    if how == "does not deliver" and lost:
        with patch.object(_Flight, "_deliver", lambda *args: None):
            gather_once(transport, rank, world, 2)
    gather_once(transport, rank, world, 2)
    return


def gather_once(transport, rank, world, call):
    flight = transport.gather("op", f"op {call}", numbers(rank, 6, 4), [6] * world, 2)
    await_rows(flight.chunks, 6 * world, status=flight.status, timeout_us=flight.timeout_us)
    flight.finish()


@pytest.mark.parametrize("how", ["while buffers are made", "between calls", "silent", "does not deliver"])
def test_a_lost_peer_is_an_error_on_all_others_and_leaves_no_memory_behind(how):
    before = names_left()
    first, second, lost = run_ranks(3, lose_peer, how, return_exceptions=True, fresh_timeout_s=3.0, timeout_s=40)
    for error in (first, second):
        assert isinstance(error, PeerError), error
        assert error.rank == 2 or how == "between calls"
    if how in ("while buffers are made", "between calls"):
        assert isinstance(lost, RankFailure)
    if how == "does not deliver":
        # The kernel itself has given up.
        assert f"rank 2 of the group did not deliver chunk 4 of epoch {NEAR_WRAP + 1}" in str(first)
        assert (first.rank, first.chunk) == (2, 4)
    assert names_left() <= before


def fail_twice(rank, world):
    transport = transport_of()
    messages = []
    for call in range(3):
        try:
            gather_once(transport, rank, world, 10 * rank if call == 1 else call)
        except PeerError as error:
            messages.append(str(error))
    return messages


def test_after_an_error_every_call_repeats_it():
    for first, second in run_ranks(2, fail_twice):
        assert "call different things" in first
        assert "an earlier call of this group failed (op: the ranks of the group call different things" in second


def fail_at_the_start(rank, world):
    transport = ExchangedTransport(channel_of(dist.group.WORLD), "op", torch.device("cpu"))
    gone = PeerError("op", 1, -1, "rank 1 of the group is gone")
    with patch.object(Channel, "announce", side_effect=gone), pytest.raises(PeerError, match="is gone"):
        gather_once(transport, rank, world, 1)
    with pytest.raises(PeerError, match=r"an earlier call of this group failed .*rank 1 of the group is gone"):
        gather_once(transport, rank, world, 2)


def test_after_an_error_before_its_first_message_a_transport_over_messages_repeats_it():
    run_ranks(2, fail_at_the_start)


def map_elsewhere(rank, world, folder):
    if rank == 1:
        shared_memory._FOLDER = Path(folder)
    try:
        with pytest.raises(ValueError, match="the ranks must run on one machine") as caught:
            gather_once(transport_of(), rank, world, 1)
    finally:
        shared_memory._FOLDER = Path("/dev/shm")
    return str(caught.value)


def test_ranks_that_do_not_share_memory_are_told(tmp_path):
    before = names_left()
    for message in run_ranks(2, map_elsewhere, str(tmp_path)):
        assert "rank 0 cannot use the group's shared memory: [Errno 2] No such file" in message
    assert names_left() <= before
    assert not list(tmp_path.iterdir())
