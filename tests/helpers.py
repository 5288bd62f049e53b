"""What the tests share: a pool of real ranks, and the rule that says when a result is accurate enough."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CONTEXT = multiprocessing.get_context("forkserver")
# Torch is imported once, by the fork server; a rank then starts in milliseconds.
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "fusedcomm.ops"])
# Of a rank of the pool: each group has three.
_MAX_THREADS = 150


class RankFailure(AssertionError):
    """One or more ranks raised; the message holds every rank's traceback."""


def _serve(rank: int, world: int, store_path: str, timeout_s: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            function, args = pickle.loads(task)
            reply = (True, function(rank, world, *args))
        except Exception as error:
            error.add_note(traceback.format_exc()) if hasattr(error, "add_note") else None
            reply = (False, (error, traceback.format_exc()))
        try:
            payload = pickle.dumps(reply)
        except Exception as error:
            payload = pickle.dumps((False, (RuntimeError(f"{error}; reply was {reply}"), str(reply))))
        pipe.send_bytes(payload)


class RankPool:
    """`world` processes that share a default gloo group and run one function after another."""

    def __init__(self, world: int, timeout_s: float = 30.0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store_path = os.path.join(self._folder.name, "store")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, world, store_path, timeout_s, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """Every rank's result, or its exception in place of one; a dead or late rank is an exception too."""
        task = pickle.dumps((function, args))
        for pipe in self.pipes:
            pipe.send_bytes(task)
        deadline = time.monotonic() + timeout_s
        return [self._reply(rank, deadline) for rank in range(len(self.pipes))]

    def _reply(self, rank: int, deadline: float) -> Any:
        try:
            if not self.pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                return RankFailure(f"rank {rank} gave no result in time")
            succeeded, value = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            return RankFailure(f"rank {rank} died with exit code {self.processes[rank].exitcode}")
        if succeeded:
            return value
        error, trace = value
        error.trace = trace
        return error

    @property
    def is_worn(self) -> bool:
        """Whether so many groups were made that gloo's threads for them, which never end, take time of their own."""
        threads = [Path(f"/proc/{process.pid}/task") for process in self.processes]
        return any(folder.exists() and len(list(folder.iterdir())) > _MAX_THREADS for folder in threads)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()


_pools: dict[int, RankPool] = {}


@atexit.register
def _close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    return_exceptions: bool = False,
    fresh_timeout_s: float | None = None,
) -> list[Any]:
    """Run `function(rank, world, *args)` on `world` ranks with a default gloo group; returns results by rank.

    The ranks live on from call to call. A call in which one of them failed ends them all, so that nothing
    of it leaks into the next. `fresh_timeout_s` asks for ranks of their own whose group has that time-out.
    """
    if fresh_timeout_s is not None:
        pool = RankPool(world, fresh_timeout_s)
    else:
        pool = _pools.pop(world, None) or RankPool(world)
    results = pool.run(function, args, timeout_s)
    errors = {rank: value for rank, value in enumerate(results) if isinstance(value, BaseException)}
    if errors or fresh_timeout_s is not None or pool.is_worn:
        pool.close()
    else:
        _pools[world] = pool
    if errors and not return_exceptions:
        raise RankFailure("\n".join(f"rank {rank}: {getattr(error, 'trace', error)}" for rank, error in errors.items()))
    return results


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference over that of the reference, in fp64."""
    difference = (actual.detach().double() - reference.detach().double()).norm().item()
    norm = reference.detach().double().norm().item()
    return difference / norm if norm else difference


def assert_as_accurate(
    actual: Tensor,
    reference: Tensor,
    plain: Tensor,
    *,
    times: float = 2.0,
    terms: Tensor | None = None,
    name: str = "result",
) -> None:
    """`actual` may miss the fp64 `reference` by `times` what `plain` torch misses it by, and one ulp.

    `plain` is plain torch's result in the working dtype, which sets the ulp. The ulp is one of the result, or of
    `terms` (the same computation on absolute values, in fp64): a sum whose terms cancel loses what its terms were
    rounded by, and in a tensor of few elements luck alone decides whether plain torch lost as much.
    """
    assert actual.shape == reference.shape, f"{name}: shape {actual.shape}, not {reference.shape}"
    assert actual.dtype == plain.dtype, f"{name}: {actual.dtype}, not {plain.dtype}"
    error = relative_error(actual, reference)
    norm = reference.detach().double().norm().item()
    growth = terms.detach().double().norm().item() / norm if terms is not None and norm else 1.0
    limit = times * relative_error(plain, reference) + torch.finfo(plain.dtype).eps * max(1.0, growth)
    assert error <= limit, f"{name}: relative error {error:.3g} exceeds {limit:.3g}"
