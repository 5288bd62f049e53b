"""Virtual ranks that speak the flag protocol in one process: at the same time on a GPU, in turns on the CPU."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_as_accurate
from place import DEVICE, INTERPRETED, TIMES, configs, only_on_gpu, randn
from torch import Tensor
from torch.nn.functional import linear

from fusedcomm.comm.simulated import SimulatedTransport, Simulation
from fusedcomm.errors import PeerError
from fusedcomm.kernels.all_gather_matmul import all_gather_matmul
from fusedcomm.kernels.await_rows import await_rows
from fusedcomm.kernels.flags import read_status
from fusedcomm.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.kernels.reduce import reduce

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
# Two calls of a buffer later, epochs have crossed 2^31 and so changed their sign.
NEAR_WRAP = 2**31 - 2
NUM_CALLS = 3 if INTERPRETED else 7
SIZES = [(37,), (37, 40), (20, 0, 64, 1)]
if not INTERPRETED:
    SIZES = [(900,), (700, 411), (300, 0, 517, 130), (257,) * 8, (513, 100, 0, 777, 64, 128, 300, 1)]
FEATURES, COLUMNS = (24, 20) if INTERPRETED else (192, 1500)


def simulate(sizes, **options) -> Simulation:
    num_bytes = len(sizes) * max(1, *sizes) * max(FEATURES, COLUMNS) * DTYPE.itemsize
    return Simulation(len(sizes), DEVICE, buffer_bytes=num_bytes, first_epoch=NEAR_WRAP, **options)


def grid(device, transport: SimulatedTransport) -> dict:
    config = configs(device, DTYPE)[0]
    # In the interpreter programs run one after the other.
    programs = 2 if INTERPRETED else device.num_programs(config, DTYPE.itemsize, transport.communication_sms)
    return {"config": config, "num_programs": programs}


def gather_calls(device, sizes, pieces, shards: list[Tensor]):
    """What a rank does: its products of gathered rows, and those rows, call by call."""

    # Drawn here: a captured graph has no place for generators.
    weights = [randn(100 + rank, COLUMNS, FEATURES, dtype=DTYPE) for rank in range(len(sizes))]

    def rank_of(transport: SimulatedTransport) -> list[tuple[Tensor, Tensor]]:
        own = slice(sum(sizes[: transport.rank]), sum(sizes[: transport.rank + 1]))
        w, results = weights[transport.rank], []
        for call, x in enumerate(shards):
            flight = transport.gather("op", f"op {call}", x[own], sizes, pieces)
            y = x.new_full((sum(sizes), COLUMNS), float("nan"))
            waits = {"status": flight.status, "timeout_us": flight.timeout_us}
            all_gather_matmul(flight.x_full, w, y, chunks=flight.chunks, **waits, **grid(device, transport))
            await_rows(flight.chunks, sum(sizes), **waits)
            x_full = flight.x_full.clone()
            # What the next but one call must replace. Our own rows may still be on their way from here.
            flight.x_full[: own.start], flight.x_full[own.stop :] = float("nan"), float("nan")
            flight.finish()
            results.append((x_full, y))
        return results

    return rank_of


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gathered_rows_are_those_of_their_call(device, sizes, pieces):
    simulation = simulate(sizes)
    shards = [randn(call, sum(sizes), FEATURES, dtype=DTYPE) for call in range(NUM_CALLS)]
    function = gather_calls(device, sizes, pieces, shards)
    simulation.warm_up(function)
    for rank, results in enumerate(simulation.run(function)):
        w = randn(100 + rank, COLUMNS, FEATURES, dtype=DTYPE)
        for x, (x_full, y) in zip(shards, results):
            assert torch.equal(x_full, x)
            assert_as_accurate(y, linear(x.double(), w.double()), linear(x, w), times=TIMES[DTYPE])


def operands(call: int, rank: int, rows: int) -> tuple[Tensor, Tensor]:
    x = randn(10 * call + rank, rows, FEATURES, dtype=DTYPE)
    return x, randn(100 + rank, COLUMNS, FEATURES, dtype=DTYPE, scale=FEATURES**-0.5)


def scatter_calls(device, sizes, pieces, inputs):
    """What a rank does: the sums of its own rows, call by call. `inputs[call][rank]` are x and w."""

    def rank_of(transport: SimulatedTransport) -> list[Tensor]:
        results = []
        for call, by_rank in enumerate(inputs):
            x, w = by_rank[transport.rank]
            flight = transport.scatter("op", f"op {call}", x, COLUMNS, sizes, pieces)
            flight.y_partial.fill_(float("nan"))

            def launch(x=x, w=w, flight=flight) -> None:
                flags = {"chunks": flight.chunks, "counters": flight.counters}
                matmul_reduce_scatter(x, w, flight.y_partial, **flags, **grid(device, transport))

            flight.produce(launch)
            own = sizes[transport.rank]
            waits = {"status": flight.status, "timeout_us": flight.timeout_us}
            await_rows(flight.arrivals, len(sizes) * own, **waits)
            y = x.new_full((own, COLUMNS), float("nan"))
            reduce(flight.summands, y)
            flight.summands.fill_(float("nan"))
            flight.finish()
            results.append(y)
        return results

    return rank_of


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scattered_sums_are_those_of_their_call(device, sizes, pieces):
    world, rows = len(sizes), sum(sizes)
    inputs = [[operands(call, rank, rows) for rank in range(world)] for call in range(NUM_CALLS)]
    simulation = simulate(sizes)
    function = scatter_calls(device, sizes, pieces, inputs)
    simulation.warm_up(function)
    for rank, results in enumerate(simulation.run(function)):
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        for by_rank, y in zip(inputs, results):
            exact = sum(linear(x[own].double(), w.double()) for x, w in by_rank)
            plain = sum(linear(x[own], w).float() for x, w in by_rank).to(DTYPE)
            assert_as_accurate(y, exact, plain, times=TIMES[DTYPE])


@only_on_gpu
def test_a_captured_simulation_replays(device):
    sizes = SIZES[2]
    simulation = simulate(sizes)
    x = randn(0, sum(sizes), FEATURES, dtype=DTYPE)
    function = gather_calls(device, sizes, 2, [x])
    simulation.warm_up(function)
    found = []
    replay = device.capture(lambda: found.append(simulation.run(function)))
    for seed in range(1, 5):
        x.copy_(randn(seed, *x.shape, dtype=DTYPE))
        replay()
        simulation.check()
        # The capture came last: its results are what replays fill.
        assert all(torch.equal(x_full, x) for ((x_full, _),) in found[-1])


def test_a_rank_that_stays_away_is_an_error_and_no_hang(device):
    simulation = simulate((30, 30), timeout_s=0.05)
    shards = [randn(0, 60, FEATURES, dtype=DTYPE)]
    present = gather_calls(device, (30, 30), 1, shards)
    simulation.warm_up(present)
    message = "which no rank can send now" if INTERPRETED else "virtual rank 0 waited in vain"
    with pytest.raises(PeerError, match=message):
        simulation.run(lambda transport: present(transport) if transport.rank == 0 else None)


def test_a_rank_that_has_waited_in_vain_gives_out_no_more_rows(device):
    simulation = simulate((30, 30), timeout_s=0.05)
    calls = gather_calls(device, (30, 30), 1, [randn(0, 60, FEATURES, dtype=DTYPE)])
    simulation.warm_up(calls)
    first, second = (transport.status for transport in simulation.transports)
    first[0] = 1
    message = "rank 1 waits for chunk 0" if INTERPRETED else "virtual rank 0 waited in vain"
    with pytest.raises(PeerError, match=message):
        simulation.run(calls)
    # Its rows are void, whatever they look like: the other one says who has not sent any.
    assert INTERPRETED or read_status(second)[:3] == ("all_gather_matmul", 0, 0)


def test_ranks_that_call_different_things_are_told(device):
    simulation = simulate((30, 30), timeout_s=0.05)
    x = randn(0, 30, FEATURES, dtype=DTYPE)
    with pytest.raises(PeerError, match="rank 1 calls 'b', an earlier rank 'a'"):
        simulation.run(lambda transport: transport.gather("op", "ab"[transport.rank], x, (30, 30), 1))


def test_a_call_that_is_too_large_is_refused(device):
    x = randn(0, 500, FEATURES, dtype=DTYPE)
    simulation = Simulation(2, DEVICE, buffer_bytes=1000)
    with pytest.raises(ValueError, match=r"op: needs \d+ bytes, the simulation's buffers have 1000; make more"):
        simulation.transports[0].gather("op", "op", x, (500, 500), 1)
