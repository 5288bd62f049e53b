"""The queue of a step's transfers: urgent ones pass at once, bulk leaves piece by piece in the order agreed on.

Urgent is what computing waits for (kinds tp and pp): it starts when it is asked for, and while it is under way no new
piece of bulk (kind dp) starts. Bulk leaves in the order of `comm.plan`, as far as it is ready and the window of bytes
under way allows. Delays change when a piece leaves, never which one is next, so the ranks of a group always start the
same ones in the same order.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from fusedcomm.comm.collective import Pending
from fusedcomm.comm.plan import Piece
from fusedcomm.comm.record import note
from fusedcomm.comm.worker import Worker

# Bulk is not held back for longer at a time: it has its own time by which it is needed.
_MAX_HOLD_S = 0.05


class Urgent:
    """The urgent transfers of this process that are under way."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Hold bulk back while the block runs: an urgent transfer, from its start to its end."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """An urgent transfer starts; `end` must follow, from whichever thread, also when it fails."""
        with self._changed:
            self._count += 1

    def end(self) -> None:
        with self._changed:
            self._count -= 1
            if self._count == 0:
                self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        return self._count > 0

    def wait_until_idle(self, limit_s: float) -> None:
        """Return when no urgent transfer is under way, or after `limit_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, max(0.0, limit_s))


# One per process, as its ranks' links are.
URGENT = Urgent()


@dataclass(eq=False)
class _Transfer:
    start: Callable[[Piece], Pending]
    event: torch.cuda.Event | None
    num_left: int
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class _Flight:
    pending: Pending
    piece: Piece
    start_s: float


class TransferQueue:
    """Bulk transfers of one group, step after step.

        queue.begin(order, window_bytes)
        queue.submit(0, start)      # whenever transfer 0 is ready; start(piece) starts one piece of it
        queue.wait(0)

    Pieces are started by the thread that makes a start possible: the one that submits, or the queue's own, which also
    waits for what is under way. `start` must not block.
    """

    def __init__(self, name: str, device: torch.device | str = "cpu") -> None:
        self._name = name
        device = torch.device(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._order: Sequence[Piece] = ()
        self._next = 0
        self._window_bytes = 0
        self._transfers: dict[int, _Transfer] = {}
        self._flights: deque[_Flight] = deque()
        self._held_since_s: float | None = None
        self._worker: Worker | None = None
        self._working = False
        self._error: Exception | None = None
        # When the first of the pieces under way started; what the step's have taken together.
        self._busy_since_s = 0.0
        self._busy_s, self._busy_bytes = 0.0, 0

    def begin(self, order: Sequence[Piece], window_bytes: int) -> None:
        """Start a step. What a step that was given up on has under way is waited for, and the rest of it forgotten."""
        with self._lock:
            self._order = ()
            self._next = 0
        self._drain()
        with self._lock:
            self._order, self._window_bytes = order, window_bytes
            self._transfers = {}
            self._busy_s, self._busy_bytes = 0.0, 0

    def submit(self, transfer: int, start: Callable[[Piece], Pending]) -> None:
        """Transfer number `transfer` is ready (on the current stream): let its pieces go when it is their turn."""
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record()
        with self._lock:
            count = sum(piece.transfer == transfer for piece in self._order)
            entry = self._transfers[transfer] = _Transfer(start, event, count)
            if count == 0 or self._error is not None:
                entry.done.set()
            self._release()
            wake = not self._working and self._has_work()
            self._working |= wake
        if wake:
            if self._worker is None:
                self._worker = Worker(f"fusedcomm-{self._name}")
                weakref.finalize(self, self._worker.close)
            self._worker.submit(self._work)

    def wait(self, transfer: int) -> None:
        """Return when all pieces of the transfer are over (on the current stream).

        Raises:
            RuntimeError: it can never be, since a transfer that must leave earlier has not been submitted.
            Exception: what a piece raised.
        """
        with self._lock:
            missing = self._missing_before(transfer)
            entry = self._transfers.get(transfer)
        if missing is not None or entry is None:
            raise RuntimeError(
                f"{self._name}: transfer {transfer} is waited for before transfer "
                f"{transfer if missing is None else missing}, which leaves first, was submitted"
            )
        # Ends, as every piece does, at the latest with its group's time-out.
        entry.done.wait()
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    @property
    def bytes_per_s(self) -> float:
        """The rate of this step so far, over the time in which anything was under way; 1 if nothing was."""
        with self._lock:
            return max(1.0, self._busy_bytes / self._busy_s) if self._busy_s else 1.0

    def _missing_before(self, transfer: int) -> int | None:
        last = max((place for place, piece in enumerate(self._order) if piece.transfer == transfer), default=-1)
        for piece in self._order[self._next : last + 1]:
            for needed in (piece.transfer, piece.after):
                if needed not in self._transfers:
                    return needed
        return None

    def _has_work(self) -> bool:
        return bool(self._flights) or self._held_since_s is not None

    def _release(self) -> None:
        """Start what may start now; the lock is held, so that no other thread starts the one after it."""
        self._held_since_s, held_since_s = None, self._held_since_s
        while self._next < len(self._order) and self._error is None:
            piece = self._order[self._next]
            entry = self._transfers.get(piece.transfer)
            if entry is None or piece.after not in self._transfers:
                return
            under_way = sum(flight.piece.num_bytes for flight in self._flights)
            if self._flights and under_way + piece.num_bytes > self._window_bytes:
                return
            now_s = time.perf_counter()
            if URGENT.is_busy and (held_since_s is None or now_s - held_since_s < _MAX_HOLD_S):
                self._held_since_s = now_s if held_since_s is None else held_since_s
                return
            held_since_s = None
            self._start(entry, piece)

    def _start(self, entry: _Transfer, piece: Piece) -> None:
        self._next += 1
        start_s = time.perf_counter()
        if not self._flights:
            self._busy_since_s = start_s
        try:
            with self._on_stream():
                if self._stream is not None and entry.event is not None:
                    self._stream.wait_event(entry.event)
                pending = entry.start(piece)
        except Exception as error:
            self._fail(error)
            return
        self._flights.append(_Flight(pending, piece, start_s))

    def _work(self) -> None:
        """On the queue's thread: see every flight to its end, and start what its end allows."""
        while True:
            with self._lock:
                self._release()
                flight = self._flights[0] if self._flights else None
                held_since_s = self._held_since_s
                if flight is None and held_since_s is None:
                    self._working = False
                    return
            if flight is not None:
                self._land(flight)
            elif held_since_s is not None:
                URGENT.wait_until_idle(held_since_s + _MAX_HOLD_S - time.perf_counter())

    def _land(self, flight: _Flight) -> None:
        error = None
        try:
            with self._on_stream():
                flight.pending.wait()
            if self._stream is not None:
                self._stream.synchronize()
        except Exception as caught:
            error = caught
        note("transfer", self._name, flight.start_s, flight.piece.num_bytes)
        with self._lock:
            self._flights.popleft()
            self._busy_bytes += flight.piece.num_bytes
            if not self._flights:
                self._busy_s += time.perf_counter() - self._busy_since_s
            if error is not None:
                self._fail(error)
            entry = self._transfers[flight.piece.transfer]
            entry.num_left -= 1
            if entry.num_left == 0:
                entry.done.set()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _fail(self, error: Exception) -> None:
        """The group is of no more use: all that wait hear of it."""
        self._error = self._error or error
        for entry in self._transfers.values():
            entry.done.set()

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._working:
                    return
            # Each flight ends with its group's time-out at the latest.
            time.sleep(1e-4)
