"""The transfer queue: pieces leave in the planned order, within the window, behind urgent ones; failures reach all."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from torch import Tensor

from fusedcomm.comm.collective import AllReduce, Pending
from fusedcomm.comm.plan import Forecast, Piece, plan
from fusedcomm.comm.queue import URGENT, TransferQueue
from fusedcomm.comm.worker import Worker


class Wire:
    """Transfers that end when the test says so; notes what was started."""

    def __init__(self, free: bool = False) -> None:
        self.started: list[Piece] = []
        self._may_end = threading.Semaphore(1_000_000 if free else 0)

    def start(self, piece: Piece) -> Pending:
        self.started.append(piece)
        return self

    def wait(self) -> None:
        assert self._may_end.acquire(timeout=10)

    def end(self, count: int) -> None:
        for _ in range(count):
            self._may_end.release()

    def await_started(self, count: int) -> None:
        deadline = time.monotonic() + 10
        while len(self.started) < count and time.monotonic() < deadline:
            time.sleep(1e-3)
        # Time for one too many to start.
        time.sleep(0.01)
        assert len(self.started) == count, self.started


def pieces(*transfers: int, num_bytes: int = 64) -> list[Piece]:
    """One piece each time a transfer is named."""
    count = dict.fromkeys(transfers, 0)
    order = []
    for transfer in transfers:
        start = count[transfer] * num_bytes
        count[transfer] += 1
        order.append(Piece(transfer, start, start + num_bytes, transfer))
    return order


def test_queue_keeps_the_planned_order_and_the_window():
    wire, queue = Wire(), TransferQueue("test")
    order = pieces(1, 0, 0, 1, 2)
    queue.begin(order, window_bytes=128)
    queue.submit(0, wire.start)
    queue.submit(2, wire.start)
    wire.await_started(0)
    queue.submit(1, wire.start)
    wire.await_started(2)
    wire.end(1)
    wire.await_started(3)
    wire.end(4)
    for transfer in (2, 1, 0):
        queue.wait(transfer)
    assert wire.started == order


def test_queue_lets_a_piece_pass_that_is_larger_than_the_window():
    wire, queue = Wire(free=True), TransferQueue("test")
    queue.begin(pieces(0, 0), window_bytes=1)
    queue.submit(0, wire.start)
    queue.wait(0)


def test_queue_waits_for_the_transfer_that_a_piece_leaves_after():
    wire, queue = Wire(free=True), TransferQueue("test")
    queue.begin([Piece(0, 0, 64, after=1), Piece(1, 0, 64, after=1)], window_bytes=128)
    queue.submit(0, wire.start)
    wire.await_started(0)
    queue.submit(1, wire.start)
    queue.wait(0)
    queue.wait(1)


def test_queue_holds_bulk_back_while_an_urgent_transfer_passes():
    wire, queue = Wire(free=True), TransferQueue("test")
    queue.begin(pieces(0, 0), window_bytes=64)
    with URGENT.passing():
        queue.submit(0, wire.start)
        assert wire.started == []
    queue.wait(0)
    # An urgent transfer that does not end starves nothing.
    queue.begin(pieces(0, 0), window_bytes=64)
    with URGENT.passing():
        queue.submit(0, wire.start)
        queue.wait(0)
    assert len(wire.started) == 4


def test_queue_forgets_a_step_that_was_given_up():
    wire, queue = Wire(free=True), TransferQueue("test")
    queue.begin(pieces(0, 1), window_bytes=64)
    queue.submit(0, wire.start)
    queue.begin(pieces(1, 0), window_bytes=64)
    queue.submit(0, wire.start)
    with pytest.raises(RuntimeError, match="transfer 0 is waited for before transfer 1, which leaves first"):
        queue.wait(0)
    queue.submit(1, wire.start)
    queue.wait(0)


def test_queue_tells_everybody_of_a_failure():
    class Broken(Wire):
        def wait(self) -> None:
            raise ValueError("peer gone")

    queue = TransferQueue("test")
    queue.begin(pieces(0, 1, 2), window_bytes=64)
    for transfer in range(3):
        queue.submit(transfer, Broken().start)
    for transfer in range(3):
        with pytest.raises(ValueError, match="peer gone"):
            queue.wait(transfer)


def test_queue_of_nothing_ends():
    queue = TransferQueue("test")
    queue.begin([], window_bytes=64)
    queue.submit(0, Wire().start)
    queue.wait(0)


def test_queue_ends_its_thread_with_itself():
    queue = TransferQueue("short-lived")
    queue.begin(pieces(0), window_bytes=64)
    queue.submit(0, Wire(free=True).start)
    queue.wait(0)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "fusedcomm-short-lived"]
    del queue
    thread.join(10)
    assert not thread.is_alive()


def test_a_worker_works_on_in_a_forked_process():
    worker = Worker("forked")

    def work() -> None:
        os._exit(0 if worker.submit(lambda: None).wait(5) else 1)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(20)
    assert process.exitcode == 0


def _sum_with_delays(rank: int, world: int, seed: int) -> list[Tensor]:
    """Transfers become ready in another order and at other times on every rank; each holds its number."""
    jitter = random.Random(seed * world + rank)
    forecasts = [Forecast(index / 10, 1 - index / 10, 64 * (5 + index)) for index in range(6)]
    order = plan(forecasts, bytes_per_s=1e4, piece_bytes=128)
    queue, collective = TransferQueue("gradients"), AllReduce(dist.group.WORLD)
    buffers = [torch.full((forecast.num_bytes // 4,), float(index)) for index, forecast in enumerate(forecasts)]
    queue.begin(order, window_bytes=256)
    for index in jitter.sample(range(6), 6):
        time.sleep(jitter.random() * 5e-3)
        if jitter.random() < 0.3:
            threading.Thread(target=_be_urgent, args=(jitter.random() * 5e-3,)).start()
        flat = buffers[index]
        queue.submit(index, lambda piece, flat=flat: collective.start(flat[piece.start // 4 : piece.stop // 4], 0))
    for index in range(6):
        queue.wait(index)
    return buffers


def _be_urgent(seconds: float) -> None:
    with URGENT.passing():
        time.sleep(seconds)


@pytest.mark.parametrize("seed", range(4))
def test_queue_sums_what_belongs_together_whatever_the_delays(seed):
    for buffers in run_ranks(3, _sum_with_delays, seed):
        for index, flat in enumerate(buffers):
            assert torch.equal(flat, torch.full_like(flat, 3.0 * index))
