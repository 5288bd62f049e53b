"""What happened when: spans of computing, transferring and waiting, and which path each op took.

Metrics and traces read them. Nothing is kept unless a `recording()` is open; on CUDA a span measures the host's
side, and waits of a stream are measured by CUDA events where they are issued.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

# A "stage" is one action of a pipeline's schedule, around the computing and waiting in it.
Kind = Literal["compute", "transfer", "wait", "stage"]


@dataclass(frozen=True)
class Event:
    """One span on one thread; times are `time.perf_counter()` seconds, shared by all ranks of a machine."""

    kind: Kind
    name: str
    start_s: float
    end_s: float
    num_bytes: int
    thread: str


# Two recordings of the same events are still two.
@dataclass(eq=False)
class Recording:
    """Events and path counts since `recording()` was entered; filled by every thread of the process."""

    events: list[Event] = field(default_factory=list)
    paths: Counter[str] = field(default_factory=Counter)
    stream_waits: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def exposed_s(self, prefix: str = "") -> float:
        """Seconds in which computing stood still for a transfer, or for those whose name begins with `prefix`.

        Synchronises with the GPU if one was waited for.
        """
        waits = [event for event in self.events if event.kind == "wait" and event.name.startswith(prefix)]
        total = sum(event.end_s - event.start_s for event in waits)
        for name, begin, end in self.stream_waits:
            if name.startswith(prefix):
                end.synchronize()
                total += begin.elapsed_time(end) / 1e3
        return total

    def clear(self) -> None:
        self.events.clear()
        self.paths.clear()
        self.stream_waits.clear()


@dataclass(frozen=True)
class Path:
    """Which method ran an op, with how many chunks per shard, why, and who carried them."""

    op: str
    method: str
    num_chunks: int
    reason: str
    # "gloo", "nccl", "shared", ...; "none" in a group of one.
    transport: str = "none"
    # Of a fused call: why by this transport.
    transport_reason: str = ""


_open: list[Recording] = []
# Whether what a thread does now runs beside computing.
_beside = threading.local()
_last_path: list[Path] = []


@contextmanager
def recording() -> Iterator[Recording]:
    """Collect the process's events until the block ends; recordings may be nested, each gets all events."""
    record = Recording()
    _open.append(record)
    try:
        yield record
    finally:
        _open.remove(record)


@contextmanager
def span(kind: Kind, name: str, num_bytes: int = 0) -> Iterator[None]:
    """Note the block as one event of every open recording; costs next to nothing when there is none."""
    if not _open or (kind == "wait" and _is_beside()):
        yield
        return
    start_s = time.perf_counter()
    try:
        yield
    finally:
        note(kind, name, start_s, num_bytes)


def note(kind: Kind, name: str, start_s: float, num_bytes: int = 0) -> None:
    """Note what began at `start_s` and is over now."""
    event = Event(kind, name, start_s, time.perf_counter(), num_bytes, threading.current_thread().name)
    for record in _open:
        record.events.append(event)


@contextmanager
def beside_computing() -> Iterator[None]:
    """In the block this thread, or its current stream, keeps no computing waiting: its waits are not noted."""
    before, _beside.is_so = _is_beside(), True
    try:
        yield
    finally:
        _beside.is_so = before


def _is_beside() -> bool:
    return getattr(_beside, "is_so", False)


@contextmanager
def wait_span(name: str, device: torch.device) -> Iterator[None]:
    """Note the block as a wait of the host, or where `device` is a GPU as one of its current stream, by its clock."""
    if device.type != "cuda":
        with span("wait", name):
            yield
        return
    stream = torch.cuda.current_stream()
    if not _open or _is_beside() or torch.cuda.is_current_stream_capturing():
        yield
        return
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    yield
    end.record(stream)
    for record in _open:
        record.stream_waits.append((name, begin, end))


def note_path(path: Path) -> None:
    """Remember which way an op went, for `last_path()` and the step log."""
    _last_path[:] = [path]
    # Where there was a choice of transports, theirs too.
    method = f"{path.method} over {path.transport}" if path.transport_reason else path.method
    for record in _open:
        record.paths[f"{path.op}:{method}"] += 1


def last_path() -> Path | None:
    """The way that the process's latest op call went, and why; None before the first."""
    return _last_path[0] if _last_path else None
