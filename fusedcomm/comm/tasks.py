"""Tasks that take turns: each in a thread of its own, of which one runs at a time, until it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fusedcomm.errors import PeerError

Result = TypeVar("Result")


class _Task:
    """A thread that runs when it is told to."""

    def __init__(self, number: int, task: Callable[[], Any]) -> None:
        self.number = number
        # What it waits for.
        self.ready: Callable[[], bool] = lambda: True
        self.what = ""
        # Set if that can never come.
        self.in_vain = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = False
        self._task = task
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, name=f"fusedcomm-rank-{number}", daemon=True).start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.result = self._task()
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._stopped.release()

    def resume(self) -> None:
        """Let it run until it waits or is over."""
        self._go.release()
        self._stopped.acquire()

    def pause(self) -> None:
        """In its own thread: wait until it is told to go on."""
        self._stopped.release()
        self._go.acquire()


class Turns:
    """Runs tasks in turns, in their order."""

    def __init__(self) -> None:
        self._running: _Task | None = None

    def run(self, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
        """Every task's result.

        A task whose wait can never end, because no other one can go on either, gets a PeerError there. Raises the first
        error of any task, when all are over.
        """
        waiting = [_Task(number, task) for number, task in enumerate(tasks)]
        results: list[Any] = [None] * len(tasks)
        first_error: BaseException | None = None
        while waiting:
            able = [task for task in waiting if task.ready()]
            if not able:
                waiting[0].in_vain = True
            for task in able or waiting[:1]:
                self._running = task
                task.resume()
                first_error = first_error or task.error
                results[task.number] = task.result
            waiting = [task for task in waiting if not task.is_over]
        if first_error is not None:
            raise first_error
        return results

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """In a task: let the others run until `ready()`, which they are to bring about."""
        task = self._running
        assert task is not None
        task.ready = ready
        while not ready():
            if task.in_vain:
                raise PeerError("simulated", -1, -1, f"rank {task.number} waits for {what}, which no rank can send now")
            task.pause()
        task.ready = lambda: True
