"""A thread that runs jobs first in, first out."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable


class Worker:
    """Runs one job after the other on a daemon thread named `name`, until `close()` or the end of the process.

    In a forked process it begins anew, without its parent's jobs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = queue.SimpleQueue()
        # The thread must not keep this object alive, whose end may be what closes it.
        threading.Thread(target=_run, args=(self._jobs,), name=self._name, daemon=True).start()

    def submit(self, job: Callable[[], None]) -> threading.Event:
        """Run `job`, which must not raise, after all others; the event is set when it is over."""
        # Threads are not forked.
        if self._pid != os.getpid():
            self._start()
        done = threading.Event()
        self._jobs.put((job, done))
        return done

    def close(self) -> None:
        """End the thread after the jobs that it has."""
        self._jobs.put(None)


def _run(jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None]) -> None:
    while (entry := jobs.get()) is not None:
        job, done = entry
        job()
        done.set()
        # Else the last job's objects would live until the next one comes.
        del job, done, entry
