"""The choice that all ranks of a group agree on: asked for, remembered, or timed on the group itself.

`auto` times the candidates at the first call of a new kind, with the caller's own tensors: interleaved rounds, the
slowest rank counts, and one that overlaps must beat `serial` by more than noise. The choice is kept on disk
(`FUSEDCOMM_CACHE`, by default a folder in the user's cache) by shapes, dtype, machines and versions; it counts as known
only if every rank has the same one, from a link of about this rate.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import Channel, channel_of
from fusedcomm.tune.cost import Choice, candidates, check_method, chunked, serial

_ROUNDS = 3
# An overlapped candidate must be this much faster than serial: less is noise.
_GAIN = 0.97
_PROBE_BYTES = 1 << 19
_PROBES = 8
# What was timed on a link counts on one whose rate differs by less than this; a probe of a busy machine's loopback
# interface is off by several times.
_SAME_RATE = 10.0


class Tuner:
    """The choices of one group."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._known: dict[str, Choice] = {}
        self._link: _Link | None = None

    def choose(
        self,
        op: str,
        method: str,
        *,
        rows: int,
        shapes: str,
        local: str,
        device: torch.device,
        run: Callable[[Choice], object],
    ) -> Choice:
        """How this call is to run; every rank of the group calls it.

        `rows` are those of the GEMM; `shapes`, which must be the same on all ranks, and `local`, which need not, say
        what makes a call of one kind. `run` does the whole op in a given way; it is called only when the candidates
        have to be timed.
        """
        check_method(method)
        world = self._channel.world
        if method == "serial":
            return serial("asked for")
        if method == "chunked":
            return chunked("asked for", world=world, rows=rows)
        options = candidates(world=world, rows=rows)
        if len(options) == 1:
            return options[0]
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return chunked("a graph is captured: nothing can be timed", world=world, rows=rows)
        key = f"{op} {shapes}, {local}"
        if key not in self._known:
            # A peer that calls something else must be found before the collectives to come, which would hang.
            self._channel.check_same(op, f"{op}: auto, {shapes}", device)
            self._known[key] = self._agree(key, options, device, run)
        return self._known[key]

    def _agree(
        self, key: str, options: Sequence[Choice], device: torch.device, run: Callable[[Choice], object]
    ) -> Choice:
        if self._link is None:
            self._link = self._measure_link(device)
        path = _cache_path(f"{key}; hosts {self._link.hosts}")
        found: list[Any] = [None] * self._channel.world
        dist.all_gather_object(found, _read(path), group=self._channel.group)
        if found[0] is not None and all(other == found[0] for other in found):
            choice, mbit_per_s = found[0]
            if 1 / _SAME_RATE < mbit_per_s / self._link.mbit_per_s < _SAME_RATE:
                return choice
        choice = self._time(options, device, run)
        _write(path, choice, self._link.mbit_per_s)
        return choice

    def _time(self, options: Sequence[Choice], device: torch.device, run: Callable[[Choice], object]) -> Choice:
        seconds = torch.zeros(_ROUNDS, len(options), dtype=torch.float64)
        # Round -1 warms up.
        for attempt in range(-1, _ROUNDS):
            for index, option in enumerate(options):
                start_s = time.perf_counter()
                run(option)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if attempt >= 0:
                    seconds[attempt, index] = time.perf_counter() - start_s
        slowest = seconds.to(device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self._channel.group)
        medians = [statistics.median(column) for column in slowest.t().tolist()]
        best = min(range(1, len(options)), key=medians.__getitem__)
        gain = medians[0] / medians[best]
        if medians[best] > _GAIN * medians[0]:
            return serial(f"timed: overlapping gains nothing (x{gain:.2f})")
        return Choice("chunked", options[best].num_chunks, f"timed: x{gain:.2f} over serial")

    def _measure_link(self, device: torch.device) -> _Link:
        world, rank, group = self._channel.world, self._channel.rank, self._channel.group
        out = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
        into = torch.empty_like(out)
        seconds = torch.zeros(_PROBES, dtype=torch.float64, device=device)
        for attempt in range(_PROBES):
            start_s = time.perf_counter()
            transfers = [
                dist.P2POp(dist.isend, out, group=group, group_peer=(rank + 1) % world),
                dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % world),
            ]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[attempt] = time.perf_counter() - start_s
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
        hosts: list[Any] = [None] * world
        dist.all_gather_object(hosts, socket.gethostname(), group=group)
        return _Link([hosts.index(host) for host in hosts], _PROBE_BYTES * 8e-6 / seconds.min().item())


@dataclass(frozen=True)
class _Link:
    """Who shares a machine (each rank's first one on it), and the rate between neighbours."""

    hosts: list[int]
    mbit_per_s: float


_tuners: weakref.WeakKeyDictionary[ProcessGroup, Tuner] = weakref.WeakKeyDictionary()


def tuner_of(group: ProcessGroup) -> Tuner:
    """The group's one tuner."""
    tuner = _tuners.get(group)
    if tuner is None:
        tuner = _tuners[group] = Tuner(channel_of(group))
    return tuner


def _cache_path(key: str) -> Path:
    from fusedcomm import __version__

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} x{os.cpu_count()}"
    whole = f"{key}; {machine}, {torch.get_num_threads()} threads; torch {torch.__version__}, fusedcomm {__version__}"
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedcomm"
    return (
        Path(os.environ.get("FUSEDCOMM_CACHE") or default) / f"{hashlib.sha256(whole.encode()).hexdigest()[:32]}.json"
    )


def _read(path: Path) -> tuple[Choice, float] | None:
    try:
        entry = json.loads(path.read_text())
        return Choice(**entry["choice"]), float(entry["mbit_per_s"])
    except (OSError, ValueError, TypeError, KeyError):
        # Absent, torn or of another version: not known.
        return None


def _write(path: Path, choice: Choice, mbit_per_s: float) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps({"choice": asdict(choice), "mbit_per_s": mbit_per_s}))
        unfinished.replace(path)
    except OSError:
        # A home that cannot be written to costs the next process a few timed calls.
        return
