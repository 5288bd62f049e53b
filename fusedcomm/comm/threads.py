"""Where the ranks of processes on CPUs run: kernels are interpreted in the caller's thread, another one copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fusedcomm.comm.record import beside_computing, span
from fusedcomm.comm.worker import Worker
from fusedcomm.errors import PeerError
from fusedcomm.kernels.await_rows import await_rows
from fusedcomm.kernels.flags import Chunks
from fusedcomm.kernels.host_flags import is_up, raise_flag

# Between two looks at a flag by a thread, which must leave the processor to those who will raise it.
_LOOK_S = 50e-6
_CALIBRATION_POLLS = 200


class _Job:
    """What the copying thread is given."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._over: threading.Event = _copier().submit(self._run)

    def _run(self) -> None:
        try:
            # The caller may be in this mode, outside of which nobody could write to its views.
            with torch.inference_mode(), beside_computing():
                self._work()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Return when it is over; raises what it raised."""
        self._over.wait()
        if self._error is not None:
            raise self._error


class Threads:
    """`Place` of one rank."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_us = num_polls(timeout_s)
        self._timeout_s = timeout_s

    def mark(self) -> None:
        # What was done before is done.
        return None

    def wait(self, mark: _Job | None) -> None:
        if mark is not None:
            mark.wait()

    def send(self, rank: int, after: None, push: Callable[[], None]) -> _Job:
        return _Job(push)

    def beside(self, launch: Callable[[], object], send: Callable[[], None]) -> None:
        send()
        launch()

    def copy(self, what: str, source: Tensor, target: Tensor) -> None:
        with span("transfer", what, source.nbytes):
            target.copy_(source)

    def raise_flag(self, flags: Tensor, index: int, epoch: Tensor) -> None:
        raise_flag(flags, index, int(epoch))

    def await_chunk(self, op: str, chunks: Chunks, chunk: int, status: Tensor) -> None:
        epoch = int(chunks.epoch)
        deadline_s = time.monotonic() + self._timeout_s
        while not is_up(chunks.flags, chunk, epoch):
            if time.monotonic() > deadline_s:
                rank = chunk * chunks.world // chunks.num_chunks
                what = f"rank {rank} of the group did not come to chunk {chunk} of epoch {epoch}"
                raise PeerError(op, rank, chunk, f"{what} in {self._timeout_s:g} s")
            time.sleep(_LOOK_S)

    def await_arrivals(self, chunks: Chunks) -> None:
        # The kernels wait, beside the copying thread.
        return None


@cache
def _copier() -> Worker:
    return Worker("fusedcomm-pusher")


def num_polls(timeout_s: float) -> int:
    """How often an interpreted kernel may look at a flag, so that it waits for about as long."""
    return max(1, min(2**31 - 1, round(timeout_s / _poll_s())))


@cache
def _poll_s() -> float:
    """How long one look takes in the interpreter of this process, at its fastest."""
    words = {name: torch.zeros(1, dtype=torch.int32) for name in ("flags", "epoch")}
    chunks = Chunks(0, 1, starts=torch.tensor([0, 1]), **words)
    chunks.epoch.fill_(1)
    seconds = []
    for _ in range(3):
        start_s = time.perf_counter()
        status = torch.zeros(4, dtype=torch.int32)
        await_rows(chunks, 1, status=status, timeout_us=_CALIBRATION_POLLS)
        seconds.append(time.perf_counter() - start_s)
    return min(seconds) / _CALIBRATION_POLLS
