"""What the ranks of a run would find: are they alike, which way can the ops go, how fast are the links between them?"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed import ProcessGroup

from fusedcomm.comm.hierarchical import level_groups, node_of_each_rank
from fusedcomm.comm.lost import naming_lost_ranks
from fusedcomm.comm.transport import flag_transport_of
from fusedcomm.train.place import num_cores
from fusedcomm.tune.links import measure_links

_OP = "doctor"
# Ranks of other versions may call things that the others do not know.
_MUST_BE_ALIKE = ("python", "torch", "triton", "fusedcomm", "nccl", "device")
_ENVIRONMENT = ("CUDA_", "NCCL_", "GLOO_", "TORCH_", "TRITON_", "OMP_", "FUSEDCOMM_")


@dataclass(frozen=True)
class Finding:
    """A line: `wrong` keeps ranks from training together, `slow` and `note` do not."""

    level: Literal["ok", "note", "slow", "wrong"]
    text: str


@naming_lost_ranks(_OP)
def examine(*, timeout_s: float, device: torch.device) -> int:
    """Every rank calls it, the first prints; the exit code is 1 where something is wrong."""
    group = dist.group.WORLD
    assert group is not None
    facts: list[Any] = [None] * group.size()
    dist.all_gather_object(facts, _facts(device), group=group)
    findings = [*compare(facts), *_links(group, timeout_s, device), _fused(group, device)]
    if group.rank() == 0:
        for finding in findings:
            print(f"{finding.level:5}  {finding.text}")
    return int(any(finding.level == "wrong" for finding in findings))


def _facts(device: torch.device) -> dict[str, Any]:
    """Of this rank."""
    is_gpu = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "fusedcomm": _version("fusedcomm"),
        "nccl": ".".join(map(str, nccl.version())) if is_gpu else "none",
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "host": platform.node(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def compare(facts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """What the ranks' facts say, in the order of ranks."""
    hosts = [fact["host"] for fact in facts]
    per_host = {host: hosts.count(host) for host in hosts}
    alike = {name: facts[0][name] for name in _MUST_BE_ALIKE if len({fact[name] for fact in facts}) == 1}
    everywhere = ", ".join(f"{name} {value}" for name, value in alike.items())
    yield Finding("ok", f"{len(facts)} ranks, hosts: {', '.join(per_host)}; all have {everywhere}")
    for name in _MUST_BE_ALIKE:
        if name not in alike:
            values = [fact[name] for fact in facts]
            # GPUs that differ train together, at the pace of the slowest.
            level = "slow" if name == "device" and "cpu" not in values else "wrong"
            remedy = "propose_sizes gives them shares by speed" if level == "slow" else "make them alike"
            yield Finding(level, f"{name} differs: {_by_value(values)}; {remedy}")
    if len(set(per_host.values())) > 1:
        counts = ", ".join(f"{count} on {host}" for host, count in per_host.items())
        yield Finding("note", f"hosts hold different numbers of ranks ({counts}): sums by levels cannot run")
    for host, count in per_host.items():
        first = facts[hosts.index(host)]
        threads = sum(fact["threads"] for fact in facts if fact["host"] == host)
        if first["device"] == "cpu" and threads > first["cores"]:
            yield Finding(
                "slow",
                f"{host}: {count} ranks compute with {threads} threads on {first['cores']} cores; "
                "start fewer ranks, or set OMP_NUM_THREADS lower",
            )
    names = sorted({name for fact in facts for name in fact["environment"]})
    for name in names:
        values = [fact["environment"].get(name, "not set") for fact in facts]
        # A rank's own GPU is its own.
        if len(set(values)) > 1 and name != "CUDA_VISIBLE_DEVICES":
            yield Finding("note", f"{name} differs: {_by_value(values)}")


def _by_value(values: Sequence[str]) -> str:
    """Each value with its ranks, as `2.13.0 on 0-3, 5`."""
    found = []
    for value in dict.fromkeys(values):
        ranks = [rank for rank, other in enumerate(values) if other == value]
        runs: list[list[int]] = []
        for rank in ranks:
            if runs and runs[-1][-1] == rank - 1:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        spans = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        found.append(f"{value} on rank {spans}")
    return "; ".join(found)


def _links(group: ProcessGroup, timeout_s: float, device: torch.device) -> Iterator[Finding]:
    """With all ranks sending at once; every rank finds the same."""
    nodes = node_of_each_rank(group)
    if group.size() == 1 or len({nodes.count(node) for node in nodes}) > 1:
        return
    in_node, across = level_groups(group, nodes, timeout_s=timeout_s)
    links = measure_links(group, in_node, across, device)
    for name, level, link in (("in a node, each rank", in_node, links.in_node), ("a node", across, links.across)):
        if level is not None:
            rate = f"{link.bytes_per_s / 1e9:.3g} GB/s after {link.latency_s * 1e6:.3g} us"
            yield Finding("ok", f"{name} sends {rate}")


def _fused(group: ProcessGroup, device: torch.device) -> Finding:
    """Whether one kernel can run an op here, and who would carry its chunks."""
    try:
        transport = flag_transport_of(group, _OP, device)
    except ValueError as error:
        return Finding("note", f"method fused cannot run: {str(error).removeprefix(f'{_OP}: ')}")
    return Finding("ok", f"method fused can run over {transport.name}: {transport.reason}")
