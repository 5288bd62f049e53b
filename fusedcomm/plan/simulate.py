"""How long a step of a configuration takes on a cluster, and what a rank holds: on paper, before anything runs.

Each part is asked of those who run it: the ops' model of what hides behind a GEMM, the schedule's own table, the model
of the sums' algorithms, and the order in which gradients leave. What they do not know is not in it: how fast GEMMs of
other shapes are, and what ranks of one machine take from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import permutations

from fusedcomm.comm.plan import Forecast, lateness, pace_of, plan
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.parallel.schedule import stage_to_rank
from fusedcomm.parallel.table import Action, Table, build_table, simulate
from fusedcomm.plan import memory
from fusedcomm.plan.cluster import Cluster
from fusedcomm.plan.stage import PASSES, Pass, PassSeconds, StageModel
from fusedcomm.train.config import Config, DataParallelConfig
from fusedcomm.train.layout import stages_of
from fusedcomm.train.sections import ConfigError
from fusedcomm.tune.cost import Link, Links, all_reduce_s, fastest_algorithm

# AdamW reads gradient, weight and both moments, and writes all but the first: bytes of memory for each weight.
UPDATE_BYTES = 28
# However busy tensor-parallel transfers keep a link, sums get this share of it.
_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class Prediction:
    """What to expect of a step.

    Attributes:
        step_s: from one step to the next.
        idle: share of forward and backward in which a rank waits for other stages, a mean over them.
        tensor_s: what tensor-parallel transfers add to the computing of the busiest stage.
        data_s: what computing waits for gradients, and for weights that others have stepped.
        memory_gib: of the fullest rank.
    """

    step_s: float
    idle: float
    tensor_s: float
    data_s: float
    memory_gib: float


def refuse_unknown(config: Config) -> None:
    """ConfigError for settings whose time or memory is not modelled."""
    data = config.parallel_config.data_parallel
    asked = {
        "mode": (data.mode, data.mode == "fsdp", "replicate or zero1"),
        "sync": (data.sync, data.sync != "every_step", "every_step"),
        "compression": (data.compression, data.compression != "none", "none"),
        "compression_in_node": (data.compression_in_node, data.compression_in_node != "none", "none"),
    }
    lines = [
        f"parallel_config.data_parallel.{name}: plan does not know how long {value} takes; use {remedy}"
        for name, (value, is_unknown, remedy) in asked.items()
        if is_unknown
    ]
    if lines:
        raise ConfigError(lines)


def predict(config: Config, cluster: Cluster) -> Prediction:
    """For a configuration that fits `cluster.world` ranks; ConfigError as `refuse_unknown`."""
    refuse_unknown(config)
    return PassModel(config, cluster).predict(config.parallel_config.data_parallel)


class PassModel:
    """Forward and backward of a configuration on a cluster, whatever its replicas share and when they sum."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self._config, self._cluster = config, cluster
        self._shape = config.transformer()
        parallel = config.parallel_config
        self._tensor, self._pipeline = parallel.tensor_parallel, parallel.pipeline_parallel
        self._tp, self._pp, self._dp = self._tensor.size, self._pipeline.depth, parallel.data_parallel.size
        self._stages = stages_of(config)
        per_rank = len(self._stages) // self._pp
        self._rank_of_stage = stage_to_rank(self._pipeline.schedule, pp=self._pp, stages_per_rank=per_rank)
        samples = config.train.global_batch // self._dp // config.train.accumulation
        # The largest sets the pace.
        self._tokens = chunk_sizes(samples, self._pipeline.micro_batches)[0] * config.data.seq_len
        self._table = _table(
            self._pipeline.schedule, self._pp, self._pipeline.micro_batches, per_rank, self._pipeline.weight_gradients
        )
        self._model = StageModel(
            self._shape,
            self._tensor,
            tokens=self._tokens,
            itemsize=memory.itemsize(config),
            link=self._tensor_link(),
            flops_per_s=cluster.tflops_per_gpu * 1e12,
            overhead_s=cluster.overhead_us * 1e-6,
        )
        self._seconds = [{kind: self._of_stage(stage, kind) for kind in PASSES} for stage in range(len(self._stages))]
        pairs = permutations(range(self._pp), 2)
        self._hops_s = {pair: self._hop_s(*pair) for pair in pairs}
        self._run = simulate(self._table, self._duration)
        self._end_s = max(self._run.ends.values())

    def predict(self, data: DataParallelConfig) -> Prediction:
        """With as many replicas, which share and sum as `data` says."""
        passes, ranks = self._config.train.accumulation, range(self._pp)
        shares = data.size if data.mode == "zero1" else 1
        data_s = max(self._waits_for_data_s(rank, data) for rank in ranks) if data.size > 1 else 0.0
        return Prediction(
            step_s=passes * self._end_s + data_s + max(self._update_s(rank, shares) for rank in ranks),
            idle=sum(self._run.idle) / self._pp,
            tensor_s=passes * max(self._tensor_s(rank) for rank in ranks),
            data_s=data_s,
            memory_gib=max(self._bytes(rank, shares) for rank in ranks) / 2**30,
        )

    def _of_stage(self, stage: int, kind: Pass) -> PassSeconds:
        return self._model.seconds(kind, self._stages[stage], **self._ends_of(stage))

    def _ends_of(self, stage: int) -> dict[str, bool]:
        """Which ends of the model it has."""
        return {"first": stage == 0, "last": stage == len(self._stages) - 1}

    def _duration(self, action: Action) -> float:
        if action.kind in PASSES:
            return self._seconds[action.stage][action.kind].total
        there = action.stage + (1 if action.kind == "SEND_F" else -1)
        return self._hops_s[self._rank_of_stage[action.stage], self._rank_of_stage[there]]

    def _hop_s(self, rank: int, peer: int) -> float:
        """Activations of a micro-batch, or their gradient, from one pipeline rank to another."""
        size = self._dp * self._tp
        num_bytes = self._tokens * self._shape.stage_features * memory.itemsize(self._config) / self._tp
        links = self._cluster.links_of([rank * size, peer * size])
        crosses = self._cluster.node_of(rank * size) != self._cluster.node_of(peer * size)
        link = links.across if crosses else links.in_node
        return link.latency_s + num_bytes / link.bytes_per_s

    def _tensor_link(self) -> Link:
        links = self._cluster.links_of(range(self._tp))
        return links.across if self._spans_nodes(range(self._tp)) else links.in_node

    def _spans_nodes(self, ranks: Sequence[int]) -> bool:
        return self._cluster.node_of(ranks[0]) != self._cluster.node_of(ranks[-1])

    def _own_stages(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self._rank_of_stage) if owner == rank]

    def _weights(self, rank: int) -> float:
        return sum(self._weights_of_stage(stage) for stage in self._own_stages(rank))

    def _weights_of_stage(self, stage: int) -> float:
        return memory.weights_of(self._shape, self._stages[stage], **self._ends_of(stage), tp=self._tp)

    def _tensor_s(self, rank: int) -> float:
        """In one pass."""
        both = [self._seconds[stage][kind] for stage in self._own_stages(rank) for kind in ("F", "B")]
        return self._pipeline.micro_batches * sum(seconds.total - seconds.compute for seconds in both)

    def _update_s(self, rank: int, shares: int) -> float:
        return UPDATE_BYTES * self._weights(rank) / shares / (self._cluster.memory_gbyte_per_s * 1e9)

    def _waits_for_data_s(self, rank: int, data: DataParallelConfig) -> float:
        """For sums, by the order in which they are planned to leave, and with `zero1` for the weights after them."""
        in_forward = data.overlap == "backward+forward"
        bytes_per_s = self._sums_bytes_per_s(rank, data.algorithm)
        sums, gathers = [], []
        for stage in self._own_stages(rank):
            layers = self._stages[stage]
            weights = self._weights_of_stage(stage) / len(layers)
            begin_s, stop_s, reverse = self._gradients_of(stage)
            used_s = self._run.ends[Action("F", stage, 0)] - self._seconds[stage]["F"].total
            for place in range(len(layers)):
                turn = len(layers) - place if reverse else place + 1
                ready_s = begin_s + (stop_s - begin_s) * turn / len(layers)
                in_next_s = used_s + self._seconds[stage]["F"].total * place / len(layers)
                sums.append(Forecast(ready_s, self._end_s + (in_next_s if in_forward else 0.0), round(4 * weights)))
                gathers.append(Forecast(0.0, in_next_s, round(memory.itemsize(self._config) * weights)))
        if data.mode != "zero1":
            return _late_s(sums, bytes_per_s)
        # A reduce-scatter is the first half of an all-reduce, a gather the second.
        return _late_s(sums, 2 * bytes_per_s) + _late_s(gathers, 2 * bytes_per_s)

    def _gradients_of(self, stage: int) -> tuple[float, float, bool]:
        """From when to when the stage's weight gradients become final, and whether the last layer's come first.

        Those that follow each other in the table are computed layer by layer over their micro-batches.
        """
        actions = [action for action in self._table[self._rank_of_stage[stage]] if action.kind in PASSES]
        index = max(place for place, action in enumerate(actions) if action.stage == stage and action.kind in "BW")
        final = actions[index]
        while index and (actions[index - 1].kind, actions[index - 1].stage) == (final.kind, stage) == ("W", stage):
            index -= 1
        begin_s = self._run.ends[actions[index]] - self._duration(actions[index])
        in_order = self._pipeline.weight_gradients == "at_end" and stage > 0
        return begin_s, self._run.ends[final], not in_order

    def _sums_bytes_per_s(self, rank: int, algorithm: str) -> float:
        """Of gradients, through the links that tensor-parallel transfers leave."""
        size = self._dp * self._tp
        group = range(rank * size, (rank + 1) * size, self._tp)
        rate = _sum_rate(
            round(4 * self._weights(rank)),
            tuple(self._cluster.node_of(member) for member in group),
            self._cluster.links_of(group),
            algorithm,
        )
        if self._tp == 1 or self._spans_nodes(group) != self._spans_nodes(range(self._tp)):
            return rate
        num_layers = sum(len(self._stages[stage]) for stage in self._own_stages(rank))
        busy_s = self._pipeline.micro_batches * self._model.wire_s(num_layers)
        return rate * max(_LEAST_SHARE, 1 - busy_s / self._end_s)

    def _bytes(self, rank: int, shares: int) -> float:
        own = self._own_stages(rank)
        layers = [layer for stage in own for layer in self._stages[stage]]
        kept = memory.kept_bytes(self._config, self._shape, layers, tokens=self._tokens)
        # Peaks count a micro-batch once for each stage.
        total = memory.state_bytes(self._config, self._weights(rank), shares)
        total += kept * self._run.peak_live[rank] / len(own)
        if self._pipeline.weight_gradients == "at_end":
            put_off = memory.put_off_bytes(self._config, self._shape, layers, tokens=self._tokens)
            total += put_off * self._pipeline.micro_batches
        if rank == self._rank_of_stage[-1]:
            total += memory.logits_bytes(self._config, self._shape, tokens=self._tokens)
        return total


@cache
def _table(schedule: str, pp: int, micro_batches: int, stages_per_rank: int, weight_gradients: str) -> Table:
    return build_table(
        schedule,
        pp=pp,
        micro_batches=micro_batches,
        stages_per_rank=stages_per_rank,
        weight_gradients=weight_gradients,  # pyright: ignore[reportArgumentType]
    )


@lru_cache(maxsize=4096)
def _sum_rate(num_bytes: int, nodes: tuple[int, ...], links: Links, algorithm: str) -> float:
    if algorithm == "auto":
        algorithm = fastest_algorithm(num_bytes, nodes, links)
    return num_bytes / all_reduce_s(algorithm, num_bytes, nodes, links)


def _late_s(transfers: Sequence[Forecast], bytes_per_s: float) -> float:
    moments = sorted(transfer.ready_s for transfer in transfers)
    gap_s = (moments[-1] - moments[0]) / max(1, len(moments) - 1)
    order = plan(transfers, bytes_per_s=bytes_per_s, piece_bytes=pace_of(bytes_per_s, gap_s).piece_bytes)
    return lateness(transfers, order, bytes_per_s=bytes_per_s)
