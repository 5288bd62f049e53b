"""Many jobs of a few steps each, where one job's step waits for the wire while another's keeps it busy."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cache, partial

import torch

from fusedcomm.comm.collective import Pending
from fusedcomm.comm.worker import Worker

# A job as a generator: it stops (`yield`) where its next step begins, at whose beginning it usually waits.
Job = Iterator[None]

# Jobs under way at a time: enough for every stage, and a bound on the staging buffers.
_MAX_JOBS = 8


class Stages:
    """Runs jobs of `num_steps` steps. All ranks start the same jobs in the same order.

    On the CPU step i of all jobs runs on thread i, first in first out: gloo's transfers cannot be polled, so each place
    at which a job may wait needs a thread. No circle can close, since a step waits only for what peers send in the step
    before, of the same job. On a GPU all steps are issued at once on a side stream, in the order in which such threads
    would run if they kept time.

    After a job has failed no other one goes on: they all fail with the same error.
    """

    def __init__(self, num_steps: int, name: str) -> None:
        self._num_steps = num_steps
        self._workers = [Worker(f"{name}-{index}") for index in range(num_steps)]
        self._room = threading.Semaphore(_MAX_JOBS)
        self._error: Exception | None = None
        # Failed jobs: gloo may still use their buffers.
        self._unfinished: list[Job] = []

    def start(self, jobs: Sequence[Job], device: torch.device) -> Pending:
        """Begin with `jobs`; returns what waits for them all. Does not block."""
        if device.type == "cuda":
            return self._start_on_stream(jobs, device)
        pending = _OnThreads(len(jobs))
        for job in jobs:
            self._workers[0].submit(partial(self._run_step, job, 0, pending))
        return pending

    def _run_step(self, job: Job, index: int, pending: _OnThreads) -> None:
        if index == 0:
            self._room.acquire()
        try:
            if self._error is not None:
                raise self._error
            next(job)
        except StopIteration:
            pass
        except Exception as error:
            self._error = pending.error = error
            self._unfinished.append(job)
        else:
            self._workers[index + 1].submit(partial(self._run_step, job, index + 1, pending))
            return
        self._room.release()
        pending.job_ended()

    def __del__(self) -> None:
        for worker in self._workers:
            worker.close()

    def _start_on_stream(self, jobs: Sequence[Job], device: torch.device) -> Pending:
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for job in wavefront(jobs, self._num_steps):
                next(job, None)
            done = torch.cuda.Event()
            done.record(stream)
        return _OnStream(done)


def wavefront(jobs: Sequence[Job], num_steps: int) -> Iterator[Job]:
    """Whose next step to run: in each turn every job under way takes one, the newest first, and one job joins."""
    for turn in range(len(jobs) + num_steps - 1):
        yield from reversed(jobs[max(0, turn - num_steps + 1) : turn + 1])


class _OnThreads:
    def __init__(self, num_jobs: int) -> None:
        self.error: Exception | None = None
        self._num_left = num_jobs
        self._lock = threading.Lock()
        self._done = threading.Event()
        if num_jobs == 0:
            self._done.set()

    def job_ended(self) -> None:
        # The jobs of one start end on whichever threads their last steps, or their failures, were on.
        with self._lock:
            self._num_left -= 1
            if self._num_left == 0:
                self._done.set()

    def wait(self) -> None:
        # Every step's own waits are bounded by the group's time-out.
        self._done.wait()
        if self.error is not None:
            raise self.error


class _OnStream:
    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
