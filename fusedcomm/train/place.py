"""This process among the ranks: what its launcher says, and how it joins the others."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fusedcomm.comm.pool import keep_freed_memory


@dataclass(frozen=True)
class Place:
    """This process among the ranks that a launcher started."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    master_addr: str
    master_port: int

    def environment(self) -> dict[str, str]:
        """The variables that `torch.distributed` and `init_distributed` read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


# Launcher: its names of rank, world size, local rank and local world size.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def find_place(environ: Mapping[str, str]) -> Place | None:
    """What torchrun, mpirun (Open MPI, MPICH and its kin) or srun say about this process; None where none started it.

    The first rank's host is MASTER_ADDR, else this machine where all ranks are on it, else the first of Slurm's nodes.
    Its port is MASTER_PORT, else 29500, or one that follows from the job's number under Slurm.

    Raises:
        ValueError: a launcher's variables are incomplete, or leave the first rank's host open.
    """
    for launcher, names in _LAUNCHERS.items():
        if names[0] not in environ or (launcher == "srun" and environ.get(names[1], "1") == "1"):
            # A Slurm step of one task is a shell on a node, or a batch script: that machine's ranks are ours to start.
            continue
        if missing := [name for name in names[:3] if name not in environ]:
            raise ValueError(
                f"launch: {launcher} has set {names[0]} but not {', '.join(missing)}; "
                f"set all of {', '.join(names[:3])}, or none to start the ranks here"
            )
        rank, world, local_rank = (int(environ[name]) for name in names[:3])
        local_world = _local_world(environ, names[3], world)
        address = _master_addr(environ, launcher, single=local_world == world)
        port = int(environ.get("MASTER_PORT") or _default_port(environ, launcher))
        return Place(launcher, rank, world, local_rank, local_world, address, port)
    return None


def _local_world(environ: Mapping[str, str], name: str, world: int) -> int:
    """One number, or as Slurm writes it one per node, "8(x2),4"; ranks on one machine need not say."""
    per_node: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get(name, str(world))):
        per_node += [int(count)] * int(repeats or 1)
    return per_node[int(environ.get("SLURM_NODEID", 0)) if len(per_node) > 1 else 0]


def _master_addr(environ: Mapping[str, str], launcher: str, *, single: bool) -> str:
    if address := environ.get("MASTER_ADDR"):
        return address
    if single:
        return "127.0.0.1"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if launcher == "srun" and nodes:
        # "node[003-005,010],gpu7" begins with node003.
        first = re.split(r",(?![^\[]*\])", nodes)[0]
        return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
    raise ValueError(
        f"launch: {launcher} started ranks on several machines and MASTER_ADDR is not set; "
        "set it to the host of rank 0, for example mpirun -x MASTER_ADDR=node1"
    )


def _default_port(environ: Mapping[str, str], launcher: str) -> int:
    return 20000 + int(environ.get("SLURM_JOB_ID", 0)) % 20000 if launcher == "srun" else 29500


def init_distributed(timeout_s: float) -> torch.device:
    """Join the default process group that the environment describes: NCCL where there are CUDA GPUs, else gloo.

    Every rank calls it, within `timeout_s`, which also limits each later wait on this group. On the CPU the cores are
    shared evenly by the machine's ranks, and ranks of a single machine talk over its loopback interface, unless
    OMP_NUM_THREADS and GLOO_SOCKET_IFNAME say otherwise. Returns the device of this rank.

    Raises:
        ValueError: there are fewer GPUs than ranks on this machine.
    """
    world, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    timeout = timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        device = torch.device("cuda", _gpu_of(local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
        return device
    keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // local_world))
    if local_world == world:
        names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def _gpu_of(local_rank: int, num_gpus: int) -> int:
    # Slurm and others may show each rank its own GPU alone.
    if num_gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return 0
    if local_rank >= num_gpus:
        raise ValueError(
            f"launch: local rank {local_rank} has no GPU, this machine shows {num_gpus}; start at most as many ranks "
            "on it, let --fit choose the layout, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return local_rank


def num_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leave_distributed() -> None:
    """Close the process groups, if there are any: their threads must not outlive the interpreter."""
    if dist.is_initialized():
        dist.destroy_process_group()
