"""The choice that all ranks of a group agree on: asked for, remembered, or timed on the group itself.

`auto` times the candidates at the first call of a new kind, with the caller's own tensors: first `serial`, from which
and the link's rate a cost model says which others can be fast; then all of them in interleaved rounds, fewer where a
call takes long and more where it is short. The slowest rank counts, and one that overlaps must beat `serial` by more
than noise: three rounds of four must be faster than the median of `serial`. The choice is kept on disk
(`FUSEDCOMM_CACHE`, by default a folder in the user's cache) by shapes, dtype, machines and versions; it counts as known
only if every rank has the same one, from a link of about this rate.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import Channel, channel_of
from fusedcomm.comm.hierarchical import node_of_each_rank
from fusedcomm.comm.ring import Direction
from fusedcomm.comm.transport import flag_transport_of
from fusedcomm.tune.cost import (
    Choice,
    Seconds,
    asked_for,
    candidates,
    chunked,
    fused,
    serial,
    worth_timing,
)
from fusedcomm.tune.links import measure_links

_MAX_ROUNDS = 3
# Fewer rounds, but at least one, where timing would take longer than this.
_BUDGET_S = 20.0
# More of them where all take no longer than that: what is short differs by more from one time to the next.
_MAX_SHORT_ROUNDS = 15
_SHORT_BUDGET_S = 0.1
# What one more piece of a GEMM costs, besides streaming the weight from memory once more: a message and a launch.
_PIECE_S = {"cpu": 0.3e-3, "cuda": 20e-6}
_MEMORY_BYTES_PER_S = {"cpu": 5e9, "cuda": 1e12}
# An overlapped candidate must be this much faster than serial, in three rounds of four: less is noise.
_GAIN = 0.97
# What was timed on a link counts on one whose rate differs by less than this; a probe of a busy machine's loopback
# interface is off by several times.
_SAME_RATE = 10.0


class Tuner:
    """The choices of one group."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._known: dict[str, Choice] = {}
        # By type of device.
        self._links: dict[str, _Link] = {}

    def choose(
        self,
        op: str,
        method: str,
        *,
        rows: int,
        shapes: str,
        local: str,
        wire_bytes: int,
        weight_bytes: int,
        directions: Sequence[Direction],
        device: torch.device,
        can_fuse: bool,
        run: Callable[[Choice], object],
    ) -> Choice:
        """How this call is to run; every rank of the group calls it.

        `rows` are those of the GEMM; `shapes`, which must be the same on all ranks, and `local`, which need not, say
        what makes a call of one kind. A rank sends `wire_bytes` and multiplies by `weight_bytes`; its rows could take
        `directions` instead of pairs. `can_fuse` says whether one kernel could do it. `run` does the whole op
        in a given way; it is called only when the candidates have to be timed.
        """
        world = self._channel.world
        if method != "auto":
            return asked_for(method, world=world, rows=rows)
        options = candidates(world=world, rows=rows)
        if len(options) == 1:
            return options[0]
        key = f"{op} {shapes}, {local} on {device.type}"
        if key not in self._known:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return chunked("a graph is captured: nothing can be timed", world=world, rows=rows)
            # A peer that calls something else must be found before the collectives to come, which would hang.
            self._channel.check_same(op, f"{op}: auto, {shapes}", device)
            if device.type not in self._links:
                self._links[device.type] = self._measure_link(device)
            link = self._links[device.type]
            carrier = self._carrier(op, device) if can_fuse else ""
            if carrier:
                options.append(fused("timed", world=world, rows=rows, transport=carrier))
            wire_s = wire_bytes * 8e-6 / link.mbit_per_s
            piece_s = _PIECE_S[device.type] + weight_bytes / _MEMORY_BYTES_PER_S[device.type]
            timed = partial(self._time, options, wire_s, piece_s, directions, link.nodes, device, run)
            self._known[key] = self._agree(f"{key}, fused by {carrier or 'none'}", link, timed)
        return self._known[key]

    def _carrier(self, op: str, device: torch.device) -> str:
        """The transport of fused calls: symmetric memory or none. On a CPU kernels are interpreted."""
        if device.type == "cpu":
            return ""
        try:
            # By no other: over NCCL no GPU has run it.
            return flag_transport_of(self._channel.group, op, device, "symmetric").name
        except ValueError:
            # All ranks learn of it: the others are timed.
            return ""

    def _agree(self, key: str, link: _Link, timed: Callable[[], Choice]) -> Choice:
        key = f"{key}; hosts {link.nodes}"
        found: list[Any] = [None] * self._channel.world
        dist.all_gather_object(found, _read(key), group=self._channel.group)
        if found[0] is not None and all(other == found[0] for other in found):
            choice, mbit_per_s = found[0]
            if 1 / _SAME_RATE < mbit_per_s / link.mbit_per_s < _SAME_RATE:
                return choice
        choice = timed()
        _write(key, choice, link.mbit_per_s)
        return choice

    def _time(
        self,
        options: Sequence[Choice],
        wire_s: float,
        piece_s: float,
        directions: Sequence[Direction],
        nodes: Sequence[int],
        device: torch.device,
        run: Callable[[Choice], object],
    ) -> Choice:
        # The first call of all warms up.
        run(options[0])
        serial_s = _seconds(run, options[0], device)
        seconds = self._slowest([[serial_s, wire_s, piece_s]], device)[0]
        options = worth_timing(options, Seconds(*seconds), directions=directions, nodes=nodes)
        for option in options[1:]:
            run(option)
        num_rounds = _num_rounds(seconds[0] * len(options))
        rounds = [[_seconds(run, option, device) for option in options] for _ in range(num_rounds)]
        return fastest(options, self._slowest(rounds, device))

    def _slowest(self, seconds: Sequence[Sequence[float]], device: torch.device) -> list[list[float]]:
        """The largest over the ranks."""
        largest = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._channel.group)
        return largest.tolist()

    def _measure_link(self, device: torch.device) -> _Link:
        group = self._channel.group
        between = measure_links(group, None, group, device).across
        return _Link(list(node_of_each_rank(group)), between.bytes_per_s * 8e-6)


@dataclass(frozen=True)
class _Link:
    """The machine of each rank, and the rate between neighbours."""

    nodes: list[int]
    mbit_per_s: float


def _num_rounds(round_s: float) -> int:
    """In how many rounds of about so many seconds candidates are timed."""
    long, short = int(_BUDGET_S / round_s), int(_SHORT_BUDGET_S / round_s)
    return max(1, min(_MAX_ROUNDS, long), min(_MAX_SHORT_ROUNDS, short))


def fastest(options: Sequence[Choice], rounds: Sequence[Sequence[float]]) -> Choice:
    """The option, of which the first is serial, that is the fastest by the seconds of each in every round."""
    columns = torch.tensor(rounds, dtype=torch.float64)
    medians, uppers = (columns.quantile(share, dim=0).tolist() for share in (0.5, 0.75))
    best = min(range(1, len(options)), key=medians.__getitem__)
    gain = medians[0] / medians[best]
    # A median alone may be low by luck.
    if uppers[best] > _GAIN * medians[0]:
        return serial(f"timed: overlapping gains nothing (x{gain:.2f})")
    way = "" if options[best].direction == "pairs" else f", {options[best].direction}"
    return replace(options[best], reason=f"timed: x{gain:.2f} over serial{way}")


def _seconds(run: Callable[[Choice], object], option: Choice, device: torch.device) -> float:
    start_s = time.perf_counter()
    run(option)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s


_tuners: weakref.WeakKeyDictionary[ProcessGroup, Tuner] = weakref.WeakKeyDictionary()


def tuner_of(group: ProcessGroup) -> Tuner:
    """The group's one tuner."""
    tuner = _tuners.get(group)
    if tuner is None:
        tuner = _tuners[group] = Tuner(channel_of(group))
    return tuner


def _cache_path(key: str) -> Path:
    """RuntimeError where neither a folder is named nor the user has a home."""
    from fusedcomm import __version__

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} x{os.cpu_count()}"
    whole = f"{key}; {machine}, {torch.get_num_threads()} threads; torch {torch.__version__}, fusedcomm {__version__}"
    folder = os.environ.get("FUSEDCOMM_CACHE")
    if not folder:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedcomm"
    return Path(folder) / f"{hashlib.sha256(whole.encode()).hexdigest()[:32]}.json"


def _read(key: str) -> tuple[Choice, float] | None:
    try:
        entry = json.loads(_cache_path(key).read_text())
        choice = Choice(**entry["choice"])
        return replace(choice, nodes=tuple(choice.nodes)), float(entry["mbit_per_s"])
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        # No home, or absent, torn or of another version: not known.
        return None


def _write(key: str, choice: Choice, mbit_per_s: float) -> None:
    try:
        path = _cache_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps({"choice": asdict(choice), "mbit_per_s": mbit_per_s}))
        unfinished.replace(path)
    except (OSError, RuntimeError):
        # A home that is not there, or cannot be written to, costs the next process a few timed calls.
        return
