"""Which layout of a configuration is fastest on a cluster, among all that fit its memory and learn the same."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from fusedcomm.parallel.schedule import SCHEDULES
from fusedcomm.plan.cluster import Cluster
from fusedcomm.plan.simulate import PassModel, Prediction, refuse_unknown
from fusedcomm.train.config import CheckpointingConfig, Config, DataParallelConfig
from fusedcomm.train.layout import divisors, layouts, problems
from fusedcomm.train.modes import mode_problems
from fusedcomm.train.sections import ConfigError, Section

# What allocators, buffers of transfers and kernels' code take of a GPU.
_USABLE_MEMORY = 0.9
# More than so many shorten the bubble by next to nothing.
_MAX_MICRO_BATCHES_PER_STAGE = 8


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits, and what to expect of it."""

    config: Config
    prediction: Prediction


@dataclass
class Found:
    """The fastest first; of all that were looked at, how many do not fit the memory, and the least that one needs."""

    best: list[Candidate] = field(default_factory=list)
    num_seen: int = 0
    num_too_large: int = 0
    least_gib: float = float("inf")


def search(config: Config, cluster: Cluster, *, top: int) -> Found:
    """The `top` fastest layouts of the configuration on all of the cluster's ranks.

    Varied is what changes no result beyond rounding: the degrees of the mesh, micro-batches, the schedule and when it
    computes weight gradients, whether optimizer state is shared, recomputation where there is none, by which algorithm
    gradients are summed, and, where nothing is clipped, whether sums arrive in the next forward. Samples a step and all
    else stay as they are.

    Raises:
        ConfigError: the configuration asks for what is not modelled, or no layout of it fits the number of ranks.
    """
    refuse_unknown(config)
    found = Found()
    limit_gib = _USABLE_MEMORY * cluster.memory_per_gpu
    candidates = []
    for config_of_pass in _passes(config, cluster.world):
        way = PassModel(config_of_pass, cluster)
        for data in _data_modes(config_of_pass, cluster):
            candidate = _with(config_of_pass, "data_parallel", data)
            if any(mode_problems(candidate)):
                continue
            prediction = way.predict(data)
            found.num_seen += 1
            found.least_gib = min(found.least_gib, prediction.memory_gib)
            if prediction.memory_gib > limit_gib:
                found.num_too_large += 1
            else:
                candidates.append(Candidate(candidate, prediction))
    if not found.num_seen:
        raise ConfigError([f"no layout fits {cluster.world} ranks; nearest: {_why(config, cluster.world)}"])
    # Of equally fast ones the first, which is the simplest.
    found.best = heapq.nsmallest(top, candidates, key=lambda candidate: round(candidate.prediction.step_s, 6))
    return found


def _why(config: Config, world: int) -> str:
    """What hinders the layout that has the fewest mistakes."""
    return min((problems(candidate) for candidate in layouts(config, world)), key=len)[0]


def _passes(config: Config, world: int) -> Iterator[Config]:
    """Every way through the model that can run, the simplest first; replicas do what is the simplest."""
    for mesh in layouts(config, world):
        data = mesh.parallel_config.data_parallel
        simplest = data.model_copy(update={"mode": "replicate", "overlap": "backward", "algorithm": "ring"})
        for piped in _pipelines(_with(mesh, "data_parallel", simplest)):
            yield from (candidate for candidate in _recomputations(piped) if not problems(candidate))


def _pipelines(config: Config) -> Iterator[Config]:
    parallel = config.parallel_config
    pipeline = parallel.pipeline_parallel.model_copy(update={"stages_per_rank": None, "stage_layers": None})
    samples = config.train.global_batch // parallel.data_parallel.size // config.train.accumulation
    most = samples if pipeline.depth == 1 else _MAX_MICRO_BATCHES_PER_STAGE * pipeline.depth
    ways = [("1f1b", "by_schedule")]
    if pipeline.depth > 1:
        ways = [(schedule, when) for schedule in SCHEDULES for when in ("by_schedule", "at_end")]
    for micro_batches in divisors(samples) if samples else []:
        for schedule, when in ways if micro_batches <= most else []:
            update = {"micro_batches": micro_batches, "schedule": schedule, "weight_gradients": when}
            yield _with(config, "pipeline_parallel", pipeline.model_copy(update=update))


def _recomputations(config: Config) -> Iterator[Config]:
    yield config
    if config.train.activation_checkpointing == CheckpointingConfig():
        train = config.train.model_copy(update={"activation_checkpointing": CheckpointingConfig(others="full")})
        yield config.model_copy(update={"train": train})


def _data_modes(config: Config, cluster: Cluster) -> Iterator[DataParallelConfig]:
    simplest = config.parallel_config.data_parallel
    yield simplest
    if simplest.size > 1:
        # Where a group has several ranks on each of several nodes.
        if config.parallel_config.tensor_parallel.size < cluster.gpu_per_node < cluster.world:
            yield simplest.model_copy(update={"algorithm": "hierarchical"})
        yield simplest.model_copy(update={"overlap": "backward+forward"})
        yield simplest.model_copy(update={"mode": "zero1"})


def _with(config: Config, name: str, section: Section) -> Config:
    """The configuration with another section of `parallel_config`."""
    parallel = config.parallel_config.model_copy(update={name: section})
    return config.model_copy(update={"parallel_config": parallel})
