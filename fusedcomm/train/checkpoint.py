"""Checkpoints in torch's distributed format: written by any layout, read by any other.

A checkpoint is a folder `step-00000100` with the fp32 weights and AdamW's moments by global parameter name, the
progress (`progress.json`) and the configuration (`config.yaml`). It is written under another name and renamed when it
is complete, so a folder of that name always is.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusedcomm.comm.low_rank import LowRank
from fusedcomm.nn import layout_of
from fusedcomm.train.config import dump_config
from fusedcomm.train.trainer import Trainer

_MOMENTS = ("exp_avg", "exp_avg_sq")
_DIRECTIONS = ".directions"
_NAME = re.compile(r"step-(\d{8})")


def save_checkpoint(folder: Path, trainer: Trainer, progress: dict[str, Any]) -> Path:
    """Write `folder/step-XXXXXXXX`; every rank calls it, and it is complete when they return.

    `progress["step"]` is the number of steps done. All ranks must see the same file system.

    Raises:
        OSError: some rank cannot write its part; on all ranks.
    """
    trainer.settle()
    holds_sum = trainer.replicas is not None and trainer.replicas.holds_sum
    has_late_sum = trainer.delayed is not None and trainer.delayed.has_sum
    final = folder / f"step-{progress['step']:08d}"
    partial = final.with_suffix(".partial")
    if trainer.mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        with trainer.shared_weights():
            dcp.save(_state(trainer) | {"by_rank": _own_state(trainer)}, checkpoint_id=partial)
    except CheckpointException as error:
        # What torch says of a full disk is that it is at an unexpected position.
        free = shutil.disk_usage(folder).free
        raise OSError(
            f"checkpoint {final} cannot be written ({_reasons(error)}); {free / 2**20:.0f} MiB are free there: make "
            "room, or choose another train.output_dir"
        ) from error
    if trainer.mesh.rank == 0:
        loss_scale = trainer.optimizer.loss_scale
        progress = progress | {
            "loss_scale": None if loss_scale is None else vars(loss_scale),
            "sync": trainer.data_parallel.sync,
            "has_sum": holds_sum or has_late_sum,
            "saved_at_s": time.time(),
        }
        (partial / "progress.json").write_text(json.dumps(progress, indent=1) + "\n")
        (partial / "config.yaml").write_text(dump_config(trainer.config))
        # One of an earlier run makes room whole: taken apart in its place, it would be a torn one for a while.
        old = final.with_suffix(".old")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return final


def load_checkpoint(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Read weights and moments into `trainer`, whatever layout wrote them; returns the progress.

    What belongs to one rank alone can be read under the same layout only. That is the residual of a compression, which
    starts at zero where it cannot be read: `progress["reset"]` says so. And it is what replicas have for themselves
    that train apart.

    Raises:
        ValueError: the folder is no complete checkpoint, of another model, or written with another `sync`; with
            `local_sgd` and `diloco` also if it was written by another number of replicas.
    """
    if not (path / "progress.json").is_file():
        raise ValueError(
            f"checkpoint {path}: there is no progress.json; give a complete checkpoint's folder (step-XXXXXXXX)"
        )
    # Those two are missing where they could not be otherwise yet.
    progress = {"sync": "every_step", "has_sum": False} | json.loads((path / "progress.json").read_text())
    sync, is_alone = trainer.data_parallel.sync, trainer.mesh.dp == 1
    # One rank alone can do without a gradient that came late.
    if progress["sync"] not in (sync, "delayed" if is_alone else sync):
        raise ValueError(
            f"checkpoint {path} was written with data_parallel.sync: {progress['sync']}, and this run has {sync}"
            f"{', as one data-parallel rank always has' if is_alone else ''}; go on with the same, or start anew"
        )
    _check_same_model(path, trainer)
    trainer.settle()
    own, progress["reset"] = _readable(trainer, path)
    state = _state(trainer) | {"by_rank": own}
    try:
        dcp.load(state, checkpoint_id=path)
    except CheckpointException as error:
        raise ValueError(
            f"checkpoint {path} is not whole, or does not fit this model: {_reasons(error)}; "
            "compare its config.yaml with the model section of this run, or go on from an earlier one"
        ) from error
    # The tensors read are the optimizer's own; this rounds the masters into the parameters.
    tensors = trainer.optimizer.state_dict()
    if _holds_both_copies(trainer):
        tensors["output.weight"] = tensors["embedding.weight"]
    trainer.optimizer.load_state_dict(tensors)
    trainer.buckets.gather_later()
    if trainer.replicas is not None:
        trainer.replicas.restart(holds_sum=progress["has_sum"])
    if trainer.delayed is not None:
        trainer.delayed.has_sum = progress["has_sum"]
    low_rank = _low_rank(trainer)
    if low_rank is not None:
        low_rank.load_state_dict(
            {
                name.removesuffix(_DIRECTIONS): part.to_local()[0, 0]
                for name, part in state["by_rank"].items()
                if name.endswith(_DIRECTIONS)
            }
        )
    loss_scale = trainer.optimizer.loss_scale
    if loss_scale is not None and progress["loss_scale"] is not None:
        vars(loss_scale).update(progress["loss_scale"])
    return progress


def _reasons(error: CheckpointException) -> str:
    """The last line of what each rank says, once."""
    return "; ".join(sorted({str(failure[0]).strip().splitlines()[-1] for failure in error.failures.values()}))


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint in `folder` that was saved last; None if there is none.

    An earlier run in the same folder may have left one of more steps.
    """
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return max(found, key=lambda path: (_saved_at_s(path), path), default=None)


def _saved_at_s(path: Path) -> float:
    try:
        return json.loads((path / "progress.json").read_text()).get("saved_at_s", 0.0)
    except (OSError, ValueError):
        # Reading it says what is wrong with it.
        return 0.0


def _check_same_model(path: Path, trainer: Trainer) -> None:
    """ValueError for another model whose tensors have the same names and shapes, which reading them would not show."""
    saved = yaml.safe_load((path / "config.yaml").read_text())
    was_ladder = saved["parallel_config"]["tensor_parallel"]["tp_sync"] == "ladder"
    facts = {
        "model.heads": (saved["model"]["heads"], trainer.shape.heads),
        "parallel_config.tensor_parallel.tp_sync: ladder": (was_ladder, trainer.shape.tp_sync == "ladder"),
    }
    for name, (was, now) in facts.items():
        if was != now:
            raise ValueError(
                f"checkpoint {path} does not fit this model: {name} was {was} and is {now} in this run; "
                "set what it was, or start anew"
            )


def _state(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Live tensors by global name, as DTensors that know the whole."""
    state: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for name, tensors in trainer.optimizer.state_dict().items():
        if name == "output.weight" and _holds_both_copies(trainer):
            continue
        # The last stage's copy of a tied weight is the embedding; written twice, it is stored once.
        name_of_whole = "embedding.weight" if name == "output.weight" and trainer.has_second_copy else name
        state["model"][name_of_whole] = _as_dtensor(trainer, name, tensors["master"])
        if trainer.replicas is None:
            for key in _MOMENTS:
                state["optimizer"][f"{name_of_whole}.{key}"] = _as_dtensor(trainer, name, tensors[key])
        state["optimizer"][f"{name_of_whole}.step"] = tensors["step"]
    for key, tensor in trainer.late_sums().items():
        state["optimizer"][key] = _as_dtensor(trainer, key.rpartition(".")[0], tensor)
    return state


def _own_state(trainer: Trainer) -> dict[str, DTensor]:
    """Live tensors that each rank has for itself, `[1, 1, ...]` of `[dp, tp, ...]`."""
    sums, low_rank = trainer.data_parallel.sums, _low_rank(trainer)
    own = {} if sums is None else sums.residual_state()
    if low_rank is not None:
        directions = low_rank.state_dict()
        own |= {f"{block}{_DIRECTIONS}": tensor for block, tensor in directions.items()}
    if trainer.replicas is not None:
        own |= trainer.replicas.own_state()
        for name, tensors in trainer.optimizer.state_dict().items():
            own |= {f"{name}.{key}": tensors[key] for key in _MOMENTS}
    return {name: _by_rank(trainer, tensor) for name, tensor in own.items()}


def _readable(trainer: Trainer, path: Path) -> tuple[dict[str, DTensor], list[str]]:
    """Of what each rank has for itself, what the checkpoint holds for this layout, and the names of what it does not.

    Raises:
        ValueError: that is not only a residual.
    """
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    sizes = {name: tuple(entry.size) for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
    own = _own_state(trainer)
    if _low_rank(trainer) is not None:
        # Drawn at their first use, so that there are none yet.
        for name, size in sizes.items():
            key = name.removeprefix("by_rank.")
            if (
                name != key
                and key.endswith(_DIRECTIONS)
                and size[:2] == (trainer.mesh.dp, trainer.mesh.tp)
                and key.partition("[")[0] in trainer.params
            ):
                own[key] = _by_rank(trainer, torch.empty(size[2:], device=trainer.mesh.device))
    missing = sorted(name for name, tensor in own.items() if sizes.get(f"by_rank.{name}") != tuple(tensor.shape))
    if needed := [name for name in missing if not name.endswith((".residual", _DIRECTIONS))]:
        raise ValueError(
            f"checkpoint {path} holds no {needed[0]} for data_parallel.size {trainer.mesh.dp} and tensor_parallel.size "
            f"{trainer.mesh.tp}; replicas that train apart go on under the layout that they were saved under"
        )
    return {name: tensor for name, tensor in own.items() if name not in missing}, missing


def _low_rank(trainer: Trainer) -> LowRank | None:
    sums = trainer.data_parallel.sums
    return None if sums is None else sums.low_rank


def _holds_both_copies(trainer: Trainer) -> bool:
    return trainer.has_second_copy and trainer.pipeline.holds_first_stage


def _by_rank(trainer: Trainer, local: Tensor) -> DTensor:
    mesh = trainer.mesh.device_mesh["dp", "tp"]
    return DTensor.from_local(local[None, None], mesh, [Shard(0), Shard(1)], run_check=False)


def _as_dtensor(trainer: Trainer, name: str, local: Tensor) -> DTensor:
    """What this rank has of a tensor like the parameter `name`: all that tensor parallelism gives it, or its share."""
    param, mesh = trainer.params[name], trainer.mesh
    shard_dim = layout_of(param).shard_dim
    placements = [Replicate() if shard_dim is None else Shard(shard_dim)]
    if not trainer.data_parallel.shards_optimizer:
        return DTensor.from_local(local, mesh.device_mesh["tp"], placements, run_check=False)
    shape = list(param.shape)
    if shard_dim is not None:
        shape[shard_dim] *= mesh.tp
    return DTensor.from_local(
        local,
        # Tensor-parallel shards are cut into shares, not the other way round.
        mesh.tp_dp_mesh,
        [*placements, Shard(0)],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
