"""The command `fusedcomm plan`: measure or read the cluster, search, try the best, and say what was found."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from fusedcomm.plan.cluster import Cluster, load_cluster
from fusedcomm.plan.measure import measure, time_step
from fusedcomm.plan.report import describe_cluster, describe_search, table_of, write_json
from fusedcomm.plan.search import search
from fusedcomm.train.config import Config, dump_config
from fusedcomm.train.launch import check_machine, on_ranks
from fusedcomm.train.layout import coordinates
from fusedcomm.train.outputs import file_problems
from fusedcomm.train.place import Place, init_distributed
from fusedcomm.train.sections import ConfigError


@dataclass(frozen=True)
class PlanRequest:
    """What the command line asks for."""

    config_path: Path
    cluster_path: Path | None
    num_ranks: int | None
    top: int
    tries: int
    json_path: Path | None
    best_path: Path | None


class _RanksFailed(Exception):
    """They have said why; the argument is the exit code."""


def run(request: PlanRequest, config: Config, place: Place | None) -> int:
    """The exit code: 1 where no layout fits the memory, or a rank failed.

    Under a launcher its ranks are measured, and the first one goes on alone.

    Raises:
        ConfigError: what cannot be planned, read or written, in whole lines.
    """
    _check(request, place)
    try:
        cluster = _cluster(request, config, place)
        if cluster is None:
            return 0
        print(describe_cluster(cluster), flush=True)
        try:
            found = search(config, cluster, top=request.top)
        except ConfigError as error:
            raise ConfigError([f"{request.config_path}: {line}" for line in error.lines]) from error
        print(describe_search(found, cluster), flush=True)
        measured_s = [_timed_s(candidate.config) for candidate in found.best[: request.tries]]
    except _RanksFailed as failure:
        return failure.args[0]
    if not found.best:
        return 1
    # Where the output is no terminal, nothing is cut to the width of one.
    Console(width=None if sys.stdout.isatty() else 160).print(table_of(found.best, measured_s))
    if request.json_path is not None:
        write_json(request.json_path, cluster, found.best, measured_s)
    if request.best_path is not None:
        fastest = measured_s.index(min(measured_s)) if measured_s else 0
        request.best_path.write_text(dump_config(found.best[fastest].config), encoding="utf-8")
    return 0


def _check(request: PlanRequest, place: Place | None) -> None:
    if place is None or place.rank == 0:
        outputs = (("--json", request.json_path), ("--write", request.best_path))
        if lines := [line for option, path in outputs for line in file_problems(option, path)]:
            raise ConfigError(lines)
    if place is not None and request.tries:
        raise ConfigError(["--try: starts ranks itself, once for each layout; call it without a launcher"])
    if request.cluster_path is not None and request.num_ranks is not None:
        raise ConfigError(["--ranks: is for what is measured; the file of --cluster says how many there are"])
    if place is not None and request.num_ranks not in (None, place.world):
        raise ConfigError([f"--ranks {request.num_ranks}: the launcher has started {place.world}; leave it out"])


def _cluster(request: PlanRequest, config: Config, place: Place | None) -> Cluster | None:
    """As described, or measured; None on all ranks of a launcher but the first."""
    is_first = place is None or place.rank == 0
    if request.cluster_path is not None:
        return _described(request.cluster_path, may_try=request.tries > 0) if is_first else None
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    world = place.world if place is not None else request.num_ranks or num_gpus or config.parallel_config.world
    if place is None:
        check_machine(world)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        _on_ranks(measure, config, path, place, world, lambda rank: f"of {world}")
        return load_cluster(path) if is_first else None


def _described(path: Path, *, may_try: bool) -> Cluster:
    try:
        cluster = load_cluster(path)
        if may_try:
            check_machine(cluster.world)
    except ConfigError as error:
        raise ConfigError([f"--cluster {path}: {line}" for line in error.lines]) from error
    return cluster


def _timed_s(config: Config) -> float:
    parallel = config.parallel_config
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds"
        _on_ranks(time_step, config, path, None, parallel.world, lambda rank: coordinates(parallel, rank))
        return float(path.read_text(encoding="utf-8"))


def _on_ranks(
    task: Callable[..., None],
    config: Config,
    path: Path,
    place: Place | None,
    world: int,
    describe_rank: Callable[[int], str],
) -> None:
    """Run `task`; what it finds is in the file then."""
    if code := on_ranks(_run_rank, (task, config, path), place, world=world, describe_rank=describe_rank):
        raise _RanksFailed(code)


def _run_rank(task: Callable[..., None], config: Config, path: Path) -> None:
    task(config, path, device=init_distributed(config.train.startup_timeout_s))
