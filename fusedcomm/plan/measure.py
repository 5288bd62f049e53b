"""What a plan needs to know of the ranks that run now, and how long the steps of what it proposes really take."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from fusedcomm.comm.hierarchical import level_groups, node_of_each_rank
from fusedcomm.comm.lost import naming_lost_ranks
from fusedcomm.comm.mesh import build_mesh
from fusedcomm.nn import TensorParallel, Transformer, layer_flops
from fusedcomm.plan.cluster import Cluster, LinkConfig
from fusedcomm.plan.simulate import UPDATE_BYTES
from fusedcomm.train.config import Config
from fusedcomm.train.data import open_data
from fusedcomm.train.loop import mesh_of
from fusedcomm.train.trainer import DTYPES, Trainer
from fusedcomm.tune.cost import Link
from fusedcomm.tune.links import measure_links

_ROUNDS = 5
# Two sizes of a batch, whose times show what a layer takes for each sample, and for none.
_FEW_SAMPLES, _MANY_SAMPLES = 2, 6
# The update of so many weights is timed: more than caches hold.
_NUM_WEIGHTS = 2**22
# Before a step is timed, the ops are tuned and the sums' order is planned twice.
_FIRST_STEPS = 5
_TIMED_STEPS = 5


@naming_lost_ranks("plan")
def measure(config: Config, path: Path, *, device: torch.device) -> None:
    """Rank 0 writes what `load_cluster` reads of the ranks that run; every rank calls it.

    All ranks compute at the same time, as they will in training, and the slowest counts.
    """
    world, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    nodes = node_of_each_rank(group)
    per_node = {nodes.count(node) for node in nodes}
    if len(per_node) > 1:
        raise ValueError(
            f"plan: the nodes hold {sorted(per_node)} ranks; start equally many on each, or give --cluster"
        )
    in_node, across = level_groups(group, nodes, timeout_s=config.train.timeout_s)
    links = measure_links(group, in_node, across, device)
    layer_s, sample_s = _layer_s(config, device)
    numbers = [-layer_s, -sample_s, _update_bytes_per_s(device), _memory_bytes(device, max(per_node))]
    slowest = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    layer_s, sample_s, update_bytes_per_s, memory_bytes = map(abs, slowest.tolist())
    shape = config.transformer()
    cluster = Cluster(
        node_count=world // max(per_node),
        gpu_per_node=max(per_node),
        memory_per_gpu=memory_bytes / 2**30,
        memory_gbyte_per_s=update_bytes_per_s / 1e9,
        tflops_per_gpu=layer_flops(shape).layer * shape.seq_len / sample_s / 1e12,
        overhead_us=layer_s * 1e6,
        in_node=None if in_node is None else _as_config(links.in_node),
        across_nodes=None if across is None else _as_config(links.across),
    )
    if dist.get_rank() == 0:
        path.write_text(yaml.safe_dump(cluster.model_dump(), sort_keys=False), encoding="utf-8")


@naming_lost_ranks("plan")
def time_step(config: Config, path: Path, *, device: torch.device) -> None:
    """Rank 0 writes the seconds that a training step of the configuration takes; every rank of its mesh calls it."""
    mesh = mesh_of(config, device)
    data = open_data(config)
    trainer = Trainer(config, mesh)

    def run(steps: range) -> None:
        for step in steps:
            batch = data.train.batch(step * config.train.global_batch, mesh.dp_rank)
            trainer.gradients(step, batch.pieces(config.train.accumulation))
            trainer.update(step)

    run(range(_FIRST_STEPS))
    trainer.settle()
    dist.barrier()
    start_s = time.perf_counter()
    run(range(_FIRST_STEPS, _FIRST_STEPS + _TIMED_STEPS))
    # What the last step has left for the next one is this step's.
    trainer.settle()
    dist.barrier()
    if mesh.rank == 0:
        path.write_text(f"{(time.perf_counter() - start_s) / _TIMED_STEPS}\n", encoding="utf-8")


def _as_config(link: Link) -> LinkConfig:
    return LinkConfig(gbyte_per_s=link.bytes_per_s / 1e9, latency_us=link.latency_s * 1e6)


def _layer_s(config: Config, device: torch.device) -> tuple[float, float]:
    """Seconds of a layer's forward and backward on one rank: for nothing, and for each sample more."""
    mesh = build_mesh(pp=1, dp=dist.get_world_size(), tp=1, device=device, timeout_s=config.train.timeout_s)
    shape = config.transformer()
    dtype = DTYPES[config.train.precision]
    stage = Transformer(
        shape, tp=TensorParallel(mesh.tp_group), layers=[0], first=False, last=False, device=device, dtype=dtype
    )
    numbers = torch.zeros(_MANY_SAMPLES, dtype=torch.int64, device=device)

    def run(samples: int) -> float:
        x = torch.randn(shape.seq_len, samples, shape.stage_features, device=device, dtype=dtype, requires_grad=True)
        return _median_s(lambda: stage(x, numbers[:samples], numbers[:samples]).sum().backward(), device)

    # Interleaving computes two halves of a batch.
    few_s, many_s = run(_FEW_SAMPLES), run(_MANY_SAMPLES)
    sample_s = (many_s - few_s) / (_MANY_SAMPLES - _FEW_SAMPLES)
    if sample_s <= 0.0:
        # Noise; so nothing but the samples is seen.
        return 0.0, many_s / _MANY_SAMPLES
    return max(0.0, few_s - _FEW_SAMPLES * sample_s), sample_s


def _update_bytes_per_s(device: torch.device) -> float:
    """Of memory that AdamW reads and writes."""
    weight = torch.nn.Parameter(torch.randn(_NUM_WEIGHTS, device=device))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight])
    return UPDATE_BYTES * _NUM_WEIGHTS / _median_s(optimizer.step, device)


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    seconds = []
    # The first is not counted.
    for _ in range(_ROUNDS + 1):
        dist.barrier()
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[1:])


def _memory_bytes(device: torch.device, ranks_per_node: int) -> float:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_per_node
