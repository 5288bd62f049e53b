"""Checkpoints in torch's distributed format: written by any layout, read by any other.

A checkpoint is a folder `step-00000100` with the fp32 weights and AdamW's moments by global parameter name, the
progress (`progress.json`) and the configuration (`config.yaml`). It is written under another name and renamed when it
is complete, so a folder of that name always is.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusedcomm.nn import layout_of
from fusedcomm.train.config import dump_config
from fusedcomm.train.trainer import Trainer

_NAME = re.compile(r"step-(\d{8})")


def save_checkpoint(folder: Path, trainer: Trainer, progress: dict[str, Any]) -> Path:
    """Write `folder/step-XXXXXXXX`; every rank calls it, and it is complete when they return.

    `progress["step"]` is the number of steps done. All ranks must see the same file system.
    """
    trainer.settle()
    final = folder / f"step-{progress['step']:08d}"
    partial = final.with_suffix(".partial")
    if trainer.mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(_state(trainer), checkpoint_id=partial)
    if trainer.mesh.rank == 0:
        loss_scale = trainer.optimizer.loss_scale
        progress = progress | {"loss_scale": None if loss_scale is None else vars(loss_scale)}
        (partial / "progress.json").write_text(json.dumps(progress, indent=1) + "\n")
        (partial / "config.yaml").write_text(dump_config(trainer.config))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    dist.barrier()
    return final


def load_checkpoint(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Read weights and moments into `trainer`, whatever layout wrote them; returns the progress.

    Raises:
        ValueError: the folder is no complete checkpoint, or of another model.
    """
    if not (path / "progress.json").is_file():
        raise ValueError(
            f"checkpoint {path}: there is no progress.json; give a complete checkpoint's folder (step-XXXXXXXX)"
        )
    trainer.settle()
    state = _state(trainer)
    try:
        dcp.load(state, checkpoint_id=path)
    except CheckpointException as error:
        reasons = sorted({str(failure[0]).strip().splitlines()[-1] for failure in error.failures.values()})
        raise ValueError(
            f"checkpoint {path} does not fit this model: {'; '.join(reasons)}; "
            f"compare its config.yaml with the model section of this run"
        ) from error
    # The tensors read are the optimizer's own; this rounds the masters into the parameters.
    own = trainer.optimizer.state_dict()
    if _holds_both_copies(trainer):
        own["output.weight"] = own["embedding.weight"]
    trainer.optimizer.load_state_dict(own)
    progress = json.loads((path / "progress.json").read_text())
    loss_scale = trainer.optimizer.loss_scale
    if loss_scale is not None and progress["loss_scale"] is not None:
        vars(loss_scale).update(progress["loss_scale"])
    return progress


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps in `folder`; None if there is none."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return max(found, default=None)


def _state(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Live tensors by global name, as DTensors that know the whole."""
    state: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for name, tensors in trainer.optimizer.state_dict().items():
        if name == "output.weight" and _holds_both_copies(trainer):
            continue
        # The last stage's copy of a tied weight is the embedding; written twice, it is stored once.
        name_of_whole = "embedding.weight" if name == "output.weight" and trainer.has_second_copy else name
        state["model"][name_of_whole] = _as_dtensor(trainer, name, tensors["master"])
        for key in ("exp_avg", "exp_avg_sq"):
            state["optimizer"][f"{name_of_whole}.{key}"] = _as_dtensor(trainer, name, tensors[key])
        state["optimizer"][f"{name_of_whole}.step"] = tensors["step"]
    return state


def _holds_both_copies(trainer: Trainer) -> bool:
    return trainer.has_second_copy and trainer.pipeline.holds_first_stage


def _as_dtensor(trainer: Trainer, name: str, local: Tensor) -> DTensor:
    shard_dim = layout_of(trainer.params[name]).shard_dim
    placement = Replicate() if shard_dim is None else Shard(shard_dim)
    return DTensor.from_local(local, trainer.mesh.device_mesh["tp"], [placement], run_check=False)
