"""A training run on one rank, from top to bottom."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from fusedcomm.comm.collective import limit_waits
from fusedcomm.comm.lost import naming_lost_ranks
from fusedcomm.comm.mesh import Mesh, build_mesh
from fusedcomm.comm.record import Recording, recording
from fusedcomm.nn import flops_per_token, num_parameters
from fusedcomm.parallel import StepResult
from fusedcomm.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from fusedcomm.train.config import Config
from fusedcomm.train.data import open_data
from fusedcomm.train.metrics import EvalMetrics, MetricsLog, StepMetrics, memory_gib, path_summary
from fusedcomm.train.trainer import Trainer


def mesh_of(config: Config, device: torch.device) -> Mesh:
    """The configured mesh, of the default group that `init_distributed` joined; its waits are those of the start."""
    parallel = config.parallel_config
    return build_mesh(
        pp=parallel.pipeline_parallel.depth,
        dp=parallel.data_parallel.size,
        tp=parallel.tensor_parallel.size,
        device=device,
        timeout_s=config.train.startup_timeout_s,
    )


@naming_lost_ranks("train")
def train(config: Config, *, resume: str | None, device: torch.device) -> None:
    """Train on this rank of the mesh; every rank calls it.

    `resume`: "auto" goes on from the newest complete checkpoint in `train.output_dir`, if there is one; a path from
    that one; None starts anew.
    """
    mesh = mesh_of(config, device)
    data = open_data(config)
    trainer = Trainer(config, mesh)
    output_dir = Path(config.train.output_dir)
    position, first_step, source, progress = 0, 0, None, {}
    if resume is not None:
        source = _agreed_checkpoint(output_dir) if resume == "auto" else Path(resume)
    if source is not None:
        progress = load_checkpoint(source, trainer)
        first_step = progress["step"]
        # One that was converted has read nothing.
        position = 0 if progress["data"] is None else data.restore(progress["data"])
        if first_step > config.train.steps:
            raise ValueError(
                f"checkpoint {source} is after {first_step} steps, more than train.steps {config.train.steps}; "
                "raise it, or go on from an earlier checkpoint"
            )
    # Everything has started: from here on a peer that is late has failed.
    dist.barrier()
    assert dist.group.WORLD is not None
    limit_waits((dist.group.WORLD, mesh.pp_group, mesh.dp_group, mesh.tp_group), config.train.timeout_s)

    start_run_s = time.perf_counter()
    log = MetricsLog(output_dir, enabled=mesh.rank == 0, total_steps=config.train.steps, first_step=first_step)
    with log, recording() as record:
        shape = trainer.shape
        log.say(f"{num_parameters(shape) / 1e6:.2f} M parameters, {config.train.precision}, on {device.type}")
        if source is not None:
            log.say(f"resumed from {source} after {first_step} steps")
            if reset := progress["reset"]:
                log.say(f"not in that checkpoint for this layout, and so begun anew: {', '.join(reset)}")
        for step in range(first_step, config.train.steps):
            record.clear()
            start_s = time.perf_counter()
            batch = data.train.batch(position, mesh.dp_rank)
            loss = trainer.gradients(step, batch.pieces(config.train.accumulation))
            result = trainer.update(step)
            position += config.train.global_batch
            done = step + 1
            metrics = _step_metrics(trainer, record, done, loss, result, time.perf_counter() - start_s)
            is_last = done == config.train.steps
            log.step(metrics, console=done % config.train.log_every == 0 or is_last or done == first_step + 1)
            if data.validation is not None and (is_last or _due(done, config.train.eval_every)):
                found = trainer.evaluate(list(data.validation.passes(mesh.dp_rank)))
                log.evaluation(EvalMetrics(done, found.loss, found.accuracy, found.num_tokens, data.unit))
            if config.train.checkpoint_every is not None and (is_last or _due(done, config.train.checkpoint_every)):
                path = save_checkpoint(output_dir, trainer, {"step": done, "data": data.state(position)})
                log.say(f"checkpoint: {path}")
        trainer.settle()
        log.say(f"finished step {config.train.steps} after {time.perf_counter() - start_run_s:.0f} s")


def _step_metrics(
    trainer: Trainer, record: Recording, step: int, loss: float, result: StepResult, seconds: float
) -> StepMetrics:
    config, mesh = trainer.config, trainer.mesh
    tokens_per_s = config.train.global_batch * config.data.seq_len / seconds
    loss_scale = trainer.optimizer.loss_scale
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=result.grad_norm,
        lr=trainer.lr(step - 1),
        tokens_per_s=tokens_per_s,
        tflops_per_s=tokens_per_s * flops_per_token(trainer.shape) / 1e12,
        iteration_ms=seconds * 1e3,
        exposed_ms=record.exposed_s() * 1e3,
        memory_gib=memory_gib(mesh.device),
        pipeline_idle=trainer.idle,
        pipeline_ideal_idle=trainer.pipeline.ideal_idle,
        path=path_summary(record.paths),
        skipped=result.skipped,
        loss_scale=None if loss_scale is None else loss_scale.value,
    )


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _agreed_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint as rank 0 sees it: a rank that looks a moment later must not find another."""
    found = [latest_checkpoint(folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]
