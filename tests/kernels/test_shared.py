from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import assert_as_accurate, run_ranks
from peers import CONFIG
from torch.nn.functional import linear

from fusedcomm.comm.channel import channel_of
from fusedcomm.comm.shared import SharedTransport, _SharedFlight
from fusedcomm.kernels.all_gather_matmul import all_gather_matmul
from fusedcomm.kernels.await_rows import await_rows
from fusedcomm.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.kernels.reduce import reduce

GRID = {"config": CONFIG, "num_programs": 2}
# Three calls of a buffer later, epochs have crossed 2^31 and so changed their sign.
NEAR_WRAP = 2**31 - 2


def transport_of(first_epoch: int = NEAR_WRAP) -> SharedTransport:
    return SharedTransport(channel_of(dist.group.WORLD), first_epoch)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def late(rank: int, call: int) -> None:
    """A delay that differs from rank to rank and from call to call, and now and then is long."""
    time.sleep(random.Random(f"{rank} {call}").choice([0, 0, 0.002, 0.03]))


@contextmanager
def delayed_deliveries(rank: int) -> Iterator[None]:
    """Each chunk of this rank leaves at some other time."""
    deliver, chance = _SharedFlight._deliver, random.Random(rank)

    def deliver_late(self: _SharedFlight, *args: Any) -> None:
        time.sleep(chance.choice([0, 0, 0.01]))
        deliver(self, *args)

    with patch.object(_SharedFlight, "_deliver", deliver_late):
        yield


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
