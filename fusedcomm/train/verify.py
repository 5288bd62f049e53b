"""The mesh against one process: same model, data and seed, from identical weights at every step.

Trajectories drift apart by rounding alone once Adam has divided by small numbers. So at each step one process takes
the mesh's weights and computes the loss and every gradient of the same global batch twice: in the run's dtype, which
shows what rounding does, and in fp64, which is taken for the truth. The mesh may miss the truth by twice what the
single process misses it by, plus one unit in the last place of the dtype.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.comm.lost import naming_lost_ranks
from fusedcomm.nn import TensorParallel, Transformer, layout_of, vocab_parallel_cross_entropy
from fusedcomm.parallel import GradientBuckets, Optimizer, main_grad_of
from fusedcomm.train.config import Config
from fusedcomm.train.data import IGNORE_INDEX, Batch, open_data
from fusedcomm.train.loop import mesh_of
from fusedcomm.train.trainer import DTYPES, Trainer, loss_scale_of

# A mesh rounds each partial sum and their total where one process rounds once.
_TIMES = 2.0


@dataclass(frozen=True)
class Row:
    """One quantity of one step: relative errors against fp64, of the mesh and of one process."""

    step: int
    name: str
    mesh_error: float
    single_error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.mesh_error <= self.limit


@dataclass(frozen=True)
class StepLosses:
    """The losses of one step; `alone` is that of a single process that has trained by itself since step 0."""

    step: int
    mesh: float
    single: float
    exact: float
    alone: float
    skipped: bool


class _SingleProcess:
    """The whole model on one rank, in one dtype."""

    def __init__(self, config: Config, group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.group, self.device = config, group, device
        self.model = Transformer(
            config.transformer(), tp=TensorParallel(group), seed=config.seed, device=device, dtype=dtype
        )
        self.buckets = None
        if dtype != torch.float64:
            # The trainer's own fp32 accumulation over micro-batches, on one process.
            self.buckets = GradientBuckets(self.model.named_parameters(), dp_group=None)

    def load(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(weights[name])

    def gradients(self, step: int, batches: Sequence[Batch], scale: float) -> tuple[float, dict[str, Tensor]]:
        """Mean loss of the global batch, and gradients of `scale` times it."""
        num_tokens = sum((batch.labels != IGNORE_INDEX).sum().item() for batch in batches)
        self.model.train()
        if self.buckets is None:
            self.model.zero_grad()
        else:
            self.buckets.zero()
        total = 0.0
        for batch in batches:
            micro_batches = self.config.parallel_config.pipeline_parallel.micro_batches
            for tokens, labels, ids in zip(
                batch.tokens.chunk(micro_batches),
                batch.labels.chunk(micro_batches),
                batch.sample_ids.chunk(micro_batches),
            ):
                logits = self.model(
                    tokens.to(self.device), ids.to(self.device), torch.full_like(ids, step, device=self.device)
                )
                losses = vocab_parallel_cross_entropy(
                    logits, labels.t().to(self.device), group=self.group, ignore_index=IGNORE_INDEX
                )
                loss = losses.sum() * (scale / max(1, num_tokens))
                loss.backward()
                total += loss.item() / scale
        if self.buckets is None:
            return total, {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        self.buckets.finish(set_grad=False)
        grads = {name: main_grad_of(param) for name, param in self.model.named_parameters()}
        return total, {name: grad for name, grad in grads.items() if grad is not None}


class _References:
    """What rank 0 compares the mesh with: one process on the mesh's weights, the same in fp64, and one by itself."""

    def __init__(self, config: Config, group: ProcessGroup, device: torch.device) -> None:
        train = config.train
        self._dtype = DTYPES[train.precision]
        self._single = _SingleProcess(config, group, self._dtype, device)
        self._exact = _SingleProcess(config, group, torch.float64, device)
        self._alone = _SingleProcess(config, group, self._dtype, device)
        self._loss_scale = loss_scale_of(config)
        self._optimizer = Optimizer(
            self._alone.model.named_parameters(),
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
            clip_norm=train.clip_norm,
            loss_scale=self._loss_scale,
        )

    def compare(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        weights: dict[str, Tensor],
        mesh_grads: dict[str, Tensor],
        mesh_loss: float,
        scale: float,
        lr: float,
        skipped: bool,
    ) -> tuple[StepLosses, list[Row]]:
        """One step: `mesh_grads` of `scale` times the loss, taken at `weights`."""
        for process in (self._single, self._exact):
            process.load(weights)
        single_loss, single_grads = self._single.gradients(step, batches, scale)
        exact_loss, exact_grads = self._exact.gradients(step, batches, scale)
        alone_loss, _ = self._alone.gradients(
            step, batches, 1.0 if self._loss_scale is None else self._loss_scale.value
        )
        self._optimizer.step(step, lr=lr)
        ulp = torch.finfo(self._dtype).eps
        # After an overflow there are no gradients to compare: the step is skipped.
        names = [] if skipped else list(exact_grads)
        rows = [_row(step, name, mesh_grads[name], single_grads[name], exact_grads[name], ulp) for name in names]
        mesh, single, exact = torch.tensor([mesh_loss, single_loss, exact_loss], dtype=torch.float64)
        rows.insert(0, _row(step, "loss", mesh, single, exact, ulp))
        return StepLosses(step, mesh_loss, single_loss, exact_loss, alone_loss, skipped), rows


@naming_lost_ranks("verify")
def verify(config: Config, *, steps: int, json_path: Path | None, device: torch.device) -> int:
    """Compare `steps` training steps; every rank of the mesh calls it, rank 0 computes the references and prints.

    Returns the exit code: 0 when every loss and every parameter's gradient is within the rule at every step, on all
    ranks alike.
    """
    mesh = mesh_of(config, device)
    data = open_data(config)
    trainer = Trainer(config, mesh)
    group_of_one = dist.new_group([0])
    references = _References(config, group_of_one, device) if isinstance(group_of_one, ProcessGroup) else None
    rows: list[Row] = []
    losses: list[StepLosses] = []
    for step in range(steps):
        position = step * config.train.global_batch

        def pieces_of(dp_rank: int, position: int = position) -> list[Batch]:
            return data.train.batch(position, dp_rank).pieces(config.train.accumulation)

        trainer.settle()
        weights = _weights(trainer)
        scale = 1.0 if trainer.optimizer.loss_scale is None else trainer.optimizer.loss_scale.value
        mesh_loss = trainer.gradients(step, pieces_of(mesh.dp_rank))
        if trainer.data_parallel.overlaps_forward:
            # Its sums are complete only then, and it leaves them as they are.
            skipped = trainer.update(step).skipped
            trainer.settle()
            mesh_grads = _gather_whole(trainer, _main_grads(trainer))
        else:
            mesh_grads = _gather_whole(trainer, _main_grads(trainer), of_shares=trainer.data_parallel.shards_optimizer)
            skipped = trainer.update(step).skipped
        if references is not None:
            step_losses, step_rows = references.compare(
                step,
                [piece for dp_rank in range(mesh.dp) for piece in pieces_of(dp_rank)],
                weights=weights,
                mesh_grads=mesh_grads,
                mesh_loss=mesh_loss,
                scale=scale,
                lr=trainer.lr(step),
                skipped=skipped,
            )
            losses.append(step_losses)
            rows += step_rows
    verdict = [0 if all(row.passed for row in rows) else 1]
    if references is not None:
        _report(rows, losses)
        if json_path is not None:
            _write_json(json_path, rows, losses)
    dist.broadcast_object_list(verdict, src=0)
    return verdict[0]


def _row(step: int, name: str, mesh: Tensor, single: Tensor, exact: Tensor, ulp: float) -> Row:
    norm = exact.double().norm().item() or 1.0
    mesh_error = (mesh.double() - exact.double()).norm().item() / norm
    single_error = (single.double() - exact.double()).norm().item() / norm
    return Row(step, name, mesh_error, single_error, _TIMES * single_error + ulp)


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    """What the mesh computes with."""
    if not trainer.data_parallel.shards_weights:
        return _gather_whole(trainer, {name: param.detach() for name, param in trainer.params.items()})
    masters = {name: state["master"] for name, state in trainer.optimizer.state_dict().items()}
    whole = _gather_whole(trainer, masters, of_shares=True)
    return {name: master.to(trainer.dtype) for name, master in whole.items()}


def _main_grads(trainer: Trainer) -> dict[str, Tensor]:
    grads = {name: main_grad_of(param) for name, param in trainer.params.items()}
    return {name: grad for name, grad in grads.items() if grad is not None}


def _gather_whole(trainer: Trainer, local: dict[str, Tensor], *, of_shares: bool = False) -> dict[str, Tensor]:
    """Whole tensors by global name, on rank 0; elsewhere nothing.

    The first data-parallel ranks send their tensor-parallel shards, or if these are cut into shares, all send theirs.
    """
    mesh = trainer.mesh
    mine: dict[str, tuple[int | None, int, Tensor]] = {}
    if mesh.dp_rank == 0 or of_shares:
        for name, tensor in local.items():
            if not (name == "output.weight" and trainer.has_second_copy):
                mine[name] = (layout_of(trainer.params[name]).shard_dim, mesh.tp_rank, tensor.cpu().clone())
    gathered: list[Any] | None = [None] * mesh.world if mesh.rank == 0 else None
    dist.gather_object(mine, gathered)
    if gathered is None:
        return {}
    # Ranks come in the order of their places in dp.
    shards: dict[str, dict[int, list[Tensor]]] = {}
    dims: dict[str, int | None] = {}
    for part in gathered:
        for name, (dim, tp_rank, tensor) in part.items():
            shards.setdefault(name, {}).setdefault(tp_rank, []).append(tensor)
            dims[name] = dim
    found = {}
    for name, by_rank in shards.items():
        parts = [torch.cat(by_rank[tp_rank]) for tp_rank in sorted(by_rank)]
        dim = dims[name]
        found[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return found


def _report(rows: list[Row], losses: list[StepLosses]) -> None:
    console = Console()
    curves = Table(
        "step", "mesh", "one process,\nsame weights", "fp64", "one process,\nalone", "", title="Losses", box=None
    )
    for loss in losses:
        numbers = (loss.mesh, loss.single, loss.exact, loss.alone)
        curves.add_row(str(loss.step), *(f"{value:.6f}" for value in numbers), "skipped" if loss.skipped else "")
    console.print(curves)
    worst: dict[str, Row] = {}
    for row in rows:
        if row.name not in worst or row.mesh_error / row.limit > worst[row.name].mesh_error / worst[row.name].limit:
            worst[row.name] = row
    title = "Relative errors against fp64, each at its worst step"
    table = Table(Column("", no_wrap=True), "step", "mesh", "one process", "limit", "", title=title, box=None)
    for row in worst.values():
        numbers = (row.mesh_error, row.single_error, row.limit)
        table.add_row(
            row.name, str(row.step), *(f"{value:.2e}" for value in numbers), "ok" if row.passed else "[red]WRONG"
        )
    console.print(table)
    wrong = sum(not row.passed for row in rows)
    console.print(f"verify: {len(rows) - wrong} of {len(rows)} comparisons within the rule")


def _write_json(path: Path, rows: list[Row], losses: list[StepLosses]) -> None:
    report = {
        "passed": all(row.passed for row in rows),
        "rows": [asdict(row) | {"passed": row.passed} for row in rows],
        "losses": [asdict(loss) for loss in losses],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
