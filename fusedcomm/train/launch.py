"""One machine's ranks: started, watched, and all ended when one fails, the user says so or the launcher dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

from fusedcomm.train.place import Place, leave_distributed
from fusedcomm.train.sections import ConfigError

# Imported once, by the fork server: a rank then starts in milliseconds.
_PRELOAD = ["torch", "torch.distributed", "fusedcomm.cli", "fusedcomm.train.loop", "fusedcomm.train.verify"]
# More CPU ranks than this per core is a layout meant for a cluster.
_MAX_RANKS_PER_CORE = 16
# From the order to end until a rank that does not is killed.
_END_S = 2.0


def start_fork_server() -> None:
    """Begin to import what ranks need, in the process that they will be forked from; returns at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # Ctrl-C goes to every process of a terminal. Ranks end when the launcher, not the terminal, tells them.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        from multiprocessing.forkserver import ensure_running

        ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def check_machine(world: int) -> None:
    """ConfigError unless this machine has a GPU for each of so many ranks, or, without GPUs, cores enough."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = _MAX_RANKS_PER_CORE * (os.cpu_count() or 1)
    if num_gpus and world > num_gpus:
        raise ConfigError(
            [
                f"parallel_config: {world} ranks but this machine has {num_gpus} GPUs; use --fit, change a degree, "
                "start on several machines with torchrun, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
            ]
        )
    if not num_gpus and world > most:
        raise ConfigError(
            [
                f"parallel_config: {world} ranks are too many for the {os.cpu_count()} cores of this machine (at most "
                f"{most}); change a degree, or start on several machines with torchrun, mpirun or srun"
            ]
        )


@dataclass
class _Rank:
    """One rank as the launcher sees it."""

    number: int
    process: ForkServerProcess
    reports: connection.Connection
    result: int | None = None
    failed_at_s: float = 0.0
    failure: str = ""
    trace: str = ""

    def _read_report(self) -> None:
        """What the rank says at its end; nothing if it was killed before it could."""
        try:
            self.result, self.failed_at_s, self.failure, self.trace = self.reports.recv()
        except (EOFError, OSError):
            return

    def finish(self) -> None:
        self.process.join()
        if self.reports.poll():
            self._read_report()
        if self.result is None and not self.failure:
            # It stays at the front of the failures: peers that lost it report later, but are noticed at once.
            self.failure = _cause_of_death(self.process.exitcode)

    @property
    def failed(self) -> bool:
        return bool(self.failure)


def _cause_of_death(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"ended with exit code {exitcode} and no report"
    try:
        return f"was ended by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was ended by signal {-exitcode}"


def on_ranks(
    task: Callable[..., int | None],
    args: Sequence[Any],
    place: Place | None,
    *,
    world: int,
    describe_rank: Callable[[int], str],
) -> int:
    """`task(*args)` on every rank: here if a launcher started this process as one, else by `run_ranks`."""
    if place is None:
        return run_ranks(task, args, world=world, describe_rank=describe_rank)
    os.environ.update(place.environment())
    code = task(*args) or 0
    leave_distributed()
    return code


def run_ranks(
    task: Callable[..., int | None],
    args: Sequence[Any],
    *,
    world: int,
    describe_rank: Callable[[int], str],
    grace_s: float = 5.0,
) -> int:
    """Run `task(*args)` on `world` new ranks of this machine and wait for them; returns the exit code.

    The task finds its place in the environment, as under torchrun, and joins the others by `init_distributed`. The exit
    code is the largest that a task returned (None counts as 0). SIGINT and SIGTERM end every rank (exit code 128 +
    signal). When a rank raises or dies, the others have `grace_s` to report what they saw and are then ended; who
    failed, and why, goes to stderr under `describe_rank`'s words, and the exit code is 1. Ranks also end when this
    process is killed.
    """
    import torch.distributed as dist

    start_fork_server()
    ranks: list[_Rank] = []
    with _caught_signals() as caught:
        # Ours, on a free port: it closes with this process, and no rank's end takes it from the others.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            for number in range(world):
                if not caught.numbers:
                    ranks.append(_start_rank(number, world, store.port, task, args))
            _watch(ranks, caught, grace_s)
        finally:
            _end(ranks)
    if caught.numbers:
        name = signal.Signals(caught.numbers[0]).name
        print(f"fusedcomm: {name}: all {len(ranks)} ranks ended", file=sys.stderr)
        return 128 + caught.numbers[0]
    if any(rank.failed for rank in ranks):
        _print_failures(ranks, describe_rank)
        return 1
    return max(rank.result or 0 for rank in ranks)


def _start_rank(number: int, world: int, port: int, task: Callable[..., int | None], args: Sequence[Any]) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    place = Place("fusedcomm", number, world, number, world, "127.0.0.1", port)
    environment = {**place.environment(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(environment, theirs, task, args), name=f"rank {number}")
    process.start()
    theirs.close()
    # The checker takes the pipe for that of Windows.
    return _Rank(number, process, ours)  # pyright: ignore[reportArgumentType]


def _watch(ranks: Sequence[_Rank], caught: _Caught, grace_s: float) -> None:
    """Until all have ended, a signal came in, or one has failed and the others had `grace_s`."""
    running = list(ranks)
    deadline_s = None
    while running and not caught.numbers:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            return
        connection.wait([caught.wakeup, *(rank.process.sentinel for rank in running)], left_s)
        for rank in [rank for rank in running if not rank.process.is_alive()]:
            rank.finish()
            running.remove(rank)
            if rank.failed and deadline_s is None:
                deadline_s = time.monotonic() + grace_s


def _end(ranks: Sequence[_Rank]) -> None:
    running = [rank.process for rank in ranks if rank.process.is_alive()]
    for process in running:
        process.terminate()
    deadline_s = time.monotonic() + _END_S
    for process in running:
        process.join(max(0.0, deadline_s - time.monotonic()))
    for process in running:
        if process.is_alive():
            process.kill()
        process.join()


def _print_failures(ranks: Sequence[_Rank], describe_rank: Callable[[int], str]) -> None:
    failed = sorted((rank for rank in ranks if rank.failed), key=lambda rank: rank.failed_at_s)
    if failed[0].trace:
        print(failed[0].trace, file=sys.stderr)
    for rank in failed:
        print(f"fusedcomm: rank {rank.number} ({describe_rank(rank.number)}) {rank.failure}", file=sys.stderr)
    if ended := [rank.number for rank in ranks if rank.result is None and not rank.failed]:
        print(f"fusedcomm: ended the others: {', '.join(map(str, ended))}", file=sys.stderr)


@dataclass
class _Caught:
    """Signals that came in, and a file descriptor that becomes readable with the first."""

    wakeup: int
    numbers: list[int] = field(default_factory=list)


@contextmanager
def _caught_signals() -> Iterator[_Caught]:
    """Note SIGINT and SIGTERM instead of dying of them."""
    reader, writer = os.pipe()
    caught = _Caught(reader)

    def note(number: int, _frame: object) -> None:
        if not caught.numbers:
            caught.numbers.append(number)
            os.write(writer, b"!")

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _rank_main(
    environment: dict[str, str], reports: connection.Connection, task: Callable[..., int | None], args: Sequence[Any]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_launcher, name="launcher watch", daemon=True).start()
    os.environ.update(environment)
    try:
        result = task(*args) or 0
        leave_distributed()
    # Not Exception: torch's CheckpointException is none.
    except BaseException as error:
        # Short enough for the pipe's buffer: the launcher reads only once this process has ended.
        summary = " ".join(str(error).split())[:2000]
        trace = traceback.format_exc()[-10_000:]
        reports.send((None, time.time(), f"raised {type(error).__name__}: {summary}", trace))
        sys.stdout.flush()
        sys.stderr.flush()
        # Past destructors, which might wait for peers.
        os._exit(1)
    reports.send((result, 0.0, "", ""))


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    connection.wait([launcher.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
