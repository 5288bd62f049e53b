"""The processes that a benchmark times: one per rank, each on its core and its node, driven through a pipe.

What the parent tells them, and what they answer, goes through pipes, so the links carry nothing but what is measured.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.bench.errors import BenchError
from fusedcomm.bench.shaped_network import enter_namespace
from fusedcomm.comm.pool import keep_freed_memory
from fusedcomm.train.launch import start_fork_server

# Also slow links must end: 10 minutes carry 750 MB at 0.01 Gbit/s.
_TIMEOUT_S = 600.0
# Python, torch and gloo's buffers of one rank, before any tensor.
_RANK_BYTES = 300 * 2**20
_MAX_RANKS_PER_CORE = 8


@dataclass(frozen=True)
class Seat:
    """Where a rank runs: its core (None: any), its network interface, and that one's namespace (None: this one)."""

    core: int | None
    interface: str
    namespace: str | None


@dataclass
class RankState:
    """What a rank keeps from task to task."""

    rank: int
    world: int
    kept: dict[str, Any] = field(default_factory=dict)


class RankError(BenchError):
    """A rank raised, or died."""


class Ranks:
    """`len(seats)` processes with a default gloo group that run one task after another; a context manager.

    A task is a module's function `task(state, *args)`. All ranks are killed when the block ends, when one of them
    fails, and when this process dies.
    """

    def __init__(self, seats: Sequence[Seat]) -> None:
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory(prefix="fusedcomm-bench-")
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[connection.Connection] = []
        store = Path(self._folder.name) / "store"
        try:
            for rank, seat in enumerate(seats):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, len(seats), seat, store, theirs), daemon=True)
                # The checker takes the pipe for that of Windows.
                self._pipes.append(ours)  # pyright: ignore[reportArgumentType]
                self._processes.append(process)
                process.start()
                theirs.close()
            self._replies()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """`task(state, *args)` on every rank at once; the results by rank. RankError if one fails."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((task, args))
            except OSError:
                raise self._death_of(rank) from None
        return self._replies()

    def close(self) -> None:
        """End every rank now."""
        # Started ones alone have a process to end.
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        self._folder.cleanup()

    def _replies(self) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            for ready in connection.wait(list(waiting)):
                rank = waiting[ready]  # pyright: ignore[reportArgumentType]
                try:
                    succeeded, value = self._pipes[rank].recv()
                except (EOFError, OSError):
                    raise self._death_of(rank) from None
                if not succeeded:
                    raise RankError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self._pipes))]

    def _death_of(self, rank: int) -> RankError:
        self._processes[rank].join(5)
        return RankError(f"rank {rank} died with exit code {self._processes[rank].exitcode}")


def check_world(world: int) -> None:
    """BenchError unless this machine can hold so many ranks."""
    if world < 2:
        raise BenchError(f"--world {world}: communication needs at least 2 ranks")
    num_cores = len(cores())
    most = _MAX_RANKS_PER_CORE * num_cores
    if world > most:
        raise BenchError(
            f"--world {world}: too many ranks for the {num_cores} cores of this machine (at most {most}); "
            "choose a smaller world"
        )
    available = available_bytes()
    if available is not None and world * _RANK_BYTES > available:
        raise BenchError(
            f"--world {world}: {world} ranks take {world * _RANK_BYTES / 2**30:.1f} GiB before any tensor, but "
            f"{available / 2**30:.1f} GiB are free; choose a smaller world"
        )


def available_bytes() -> int | None:
    """Memory that new processes can have; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(values[0]) * 1024 if values else None


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_of(world: int) -> list[int | None]:
    """One core per rank, each core for as many ranks as the others; None where processes cannot be pinned."""
    if not hasattr(os, "sched_setaffinity"):
        return [None] * world
    usable = cores()
    return [usable[rank % len(usable)] for rank in range(world)]


def loopback_name() -> str:
    """`lo`, or `lo0` on BSDs."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


def sleep_until(start_s: float) -> None:
    """Until `time.perf_counter()`, which all processes of a machine share, shows `start_s`."""
    time.sleep(max(0.0, start_s - time.perf_counter()))


def _serve(rank: int, world: int, seat: Seat, store: Path, pipe: connection.Connection) -> None:
    # Ctrl-C goes to every process of a terminal; the parent ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Both are per thread: before there are others.
    if seat.namespace is not None:
        enter_namespace(seat.namespace)
    if seat.core is not None:
        os.sched_setaffinity(0, {seat.core})
    threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    torch.set_num_threads(1)
    # As the trainer's ranks do.
    keep_freed_memory()
    # torch renames its collectives; the new names are not in every version that we run with.
    warnings.simplefilter("ignore", FutureWarning)
    os.environ["GLOO_SOCKET_IFNAME"] = seat.interface
    # `auto` decides for this link, not for one that an earlier benchmark had.
    os.environ["FUSEDCOMM_CACHE"] = str(store.parent / "tuner")
    state = RankState(rank, world)
    task, args = _join, (store,)
    while True:
        try:
            reply = (True, task(state, *args))
        except Exception:
            reply = (False, traceback.format_exc())
        try:
            pipe.send(reply)
            task, args = pipe.recv()
        except (EOFError, OSError):
            # Past destructors, which might wait for peers.
            os._exit(0)


def _join(state: RankState, store: Path) -> None:
    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), state.world),
        rank=state.rank,
        world_size=state.world,
        timeout=timeout,
    )
    # Connects every pair now, not in the first measurement.
    dist.barrier()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
