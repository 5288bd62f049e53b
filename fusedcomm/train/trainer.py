"""One rank's part of the training: its pipeline stages, gradient buckets and optimizer, and what a step does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fusedcomm.comm.mesh import Mesh
from fusedcomm.comm.record import Recording, recording, span
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.comm.transport import refuse_if_failed
from fusedcomm.nn import TensorParallel, Transformer, layer_flops, vocab_parallel_cross_entropy, vocab_parallel_hits
from fusedcomm.ops.wgrad import DeferWgrad, WeightGradient
from fusedcomm.parallel import (
    ActivationParking,
    DiskFolder,
    DiskTensors,
    FullySharded,
    GradientBuckets,
    LossScale,
    Optimizer,
    Pipeline,
    StepResult,
    TiedWeights,
    cosine_lr,
    fully_shard_stage,
    tied_group,
)
from fusedcomm.train.config import Config
from fusedcomm.train.data import IGNORE_INDEX, Batch
from fusedcomm.train.data_parallel import DataParallel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Evaluation:
    """Over the tokens of the validation batches: mean loss in nats and the share of tokens predicted right."""

    loss: float
    accuracy: float
    num_tokens: int


class Trainer:
    """What this rank holds, and the three things that all ranks do together: `gradients`, `update` and `evaluate`.

    The loss is the sum over all tokens of the global batch divided by their number, so gradients are sums and nothing
    is averaged twice, whatever the layout, the micro-batches and the accumulation.

    Attributes:
        idle: each pipeline rank's share of the last `gradients` without work, a mean over its ranks: what it waited
            for other stages, and what it had ended before the last of them. `pipeline.ideal_idle` is the schedule's.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.shape = config.transformer()
        self.dtype = DTYPES[config.train.precision]
        parallel, train = config.parallel_config, config.train
        seq_len = config.data.seq_len
        own_positions = chunk_sizes(seq_len, mesh.tp)[mesh.tp_rank]
        flops = layer_flops(self.shape)
        folder = self._disk_folder()
        self.data_parallel = DataParallel(config, mesh)
        self.pipeline = Pipeline(
            self._build_stage,
            layer_costs=[flops.layer] * self.shape.layers,
            first_cost=flops.embedding,
            last_cost=flops.head,
            split=parallel.pipeline_parallel.stage_layers,
            group=mesh.pp_group,
            micro_batches=parallel.pipeline_parallel.micro_batches,
            input_like=torch.empty(1, seq_len, dtype=torch.int64, device="meta"),
            hidden_like=torch.empty(own_positions, 1, self.shape.stage_features, dtype=self.dtype, device="meta"),
            batch_dim=1,
            device=mesh.device,
            schedule=parallel.pipeline_parallel.schedule,
            stages_per_rank=parallel.pipeline_parallel.stages_per_rank,
            weight_gradients=parallel.pipeline_parallel.weight_gradients,
            parking=ActivationParking(folder) if folder is not None and train.offload.activations == "disk" else None,
        )
        self.idle = [0.0] * mesh.pp
        self.params = dict(self.pipeline.named_parameters())
        self._tied = self._tie()
        self.buckets = self.data_parallel.open_buckets(self.pipeline)
        self.pipeline.accumulate_into(self.buckets.accumulate)
        self.optimizer = Optimizer(
            self.params.items(),
            mesh=mesh,
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
            clip_norm=train.clip_norm,
            loss_scale=loss_scale_of(config),
            counted_elsewhere=["output.weight"] if self.has_second_copy else [],
            disk=DiskTensors(folder) if folder is not None and train.offload.optimizer == "disk" else None,
            per_replica=self.data_parallel.trains_apart,
            sharded=self.data_parallel.shards_optimizer,
        )
        self._last_norm = 0.0
        self.replicas = self.data_parallel.open_replicas(self.optimizer)
        self.delayed = self.data_parallel.open_delayed(self.buckets)
        self._has_gradients = True

    @property
    def _whole(self) -> GradientBuckets:
        """The gradients of whole parameters, for what goes with them alone."""
        assert isinstance(self.buckets, GradientBuckets), "modes.py refuses the rest"
        return self.buckets

    @property
    def has_second_copy(self) -> bool:
        """Whether a pipeline stage here holds its own copy of the tied embedding as its output weight."""
        return self.shape.tied_embeddings and self.mesh.pp > 1 and self.pipeline.holds_last_stage

    def gradients(self, step: int, batches: Sequence[Batch]) -> float:
        """Forward and backward of `batches`, one after the other; the global batch's mean loss, on every rank.

        Afterwards every parameter's `main_grad` is the gradient of that loss (times the fp16 loss scale), with
        `mode: zero1` and `fsdp` that of the rows that this rank steps. With
        `overlap: backward+forward` it is so after `update` and `settle`; with `sync: delayed` it is that of the step
        before, and with `local_sgd` and `diloco` that of this replica's own samples.
        """
        num_tokens = sum((batch.labels != IGNORE_INDEX).sum().item() for batch in batches)
        # It travels during the first forward.
        global_tokens = self._sum_later([num_tokens], self.mesh.dp_group)
        scale = 1.0 if self.optimizer.loss_scale is None else self.optimizer.loss_scale.value
        total = 0.0

        def divisor() -> float:
            return max(1, num_tokens if self.data_parallel.trains_apart else global_tokens()[0])

        self.buckets.zero()
        start_s = time.perf_counter()
        with recording() as record:
            for index, batch in enumerate(batch.to(self.mesh.device) for batch in batches):
                is_last = index == len(batches) - 1
                loss = self.pipeline.train_step(
                    batch.tokens,
                    batch.labels,
                    loss_fn=lambda logits, labels: self._token_losses(logits, labels).sum() * (scale / divisor()),
                    sample_ids=batch.sample_ids,
                    step=torch.full_like(batch.sample_ids, step),
                    ends_step=self.buckets if is_last and isinstance(self.buckets, FullySharded) else None,
                )
                total += loss.item() / scale
        times = self._pipeline_times(record, time.perf_counter() - start_s)
        # Also where no loss has asked for it, so that the next step's cannot overtake it.
        total *= divisor() / max(1, global_tokens()[0])
        if not self.data_parallel.overlaps_forward:
            self.buckets.finish(set_grad=False)
        if self.delayed is not None:
            self._has_gradients = self.delayed.exchange()
        if self._tied is not None:
            self._tied.sum_gradients()
        # Every tensor-parallel rank of the last stage has the same loss; other stages have 0.
        loss = total if self.mesh.tp_rank == 0 else 0.0
        loss_sum, squares, *times = self._sum_later([loss, self.optimizer.take_squares(), *times], None)()
        self._last_norm = math.sqrt(squares)
        self.idle = _idle_shares(times[: self.mesh.pp], times[self.mesh.pp :])
        return loss_sum

    def update(self, step: int) -> StepResult:
        """Clip, step AdamW at this step's rate, and round the masters into the parameters.

        With `overlap: backward+forward` that happens in the next step's forward, or in `settle`, and the norm is that
        of the step before (0 in the first). With `sync: delayed` the first step applies nothing. With `mode: zero1` the
        weights are gathered during the next step's forward, or in `settle`.
        """
        lr = self.lr(step)
        if not self._has_gradients:
            return StepResult(0.0, skipped=True)
        if not self.data_parallel.overlaps_forward:
            result = self.optimizer.step(step, lr=lr)
            self.buckets.gather_later()
            if self.replicas is not None:
                self.replicas.after_step(step + 1, is_last=step + 1 == self.config.train.steps)
            return result
        self._whole.finish_later(lambda names: self.optimizer.update(names, step, lr=lr))
        return StepResult(self._last_norm, skipped=False)

    def settle(self) -> None:
        """Return when the parameters, the optimizer's state and `main_grad` are those after the last `update`.

        Whoever reads them calls it; the next step does not need it.
        """
        self.buckets.settle()

    def lr(self, step: int) -> float:
        train = self.config.train
        return cosine_lr(
            step, peak=train.lr, warmup_steps=train.warmup_steps, total_steps=train.steps, minimum=train.min_lr
        )

    def evaluate(self, batches: Sequence[Batch]) -> Evaluation:
        """Mean loss and accuracy over `batches` of all data-parallel ranks, on every rank; weights stay as they are."""
        self.settle()
        sums = torch.zeros(3, dtype=torch.float64)
        with self.shared_weights():
            for batch in (batch.to(self.mesh.device) for batch in batches):
                result = self.pipeline.eval_step(batch.tokens, batch.labels, loss_fn=self._evaluation_sums)
                if result is not None and self.mesh.tp_rank == 0:
                    sums += result.cpu()
        loss, hits, num_tokens = self._sum_later(sums.tolist(), None)()
        return Evaluation(loss / max(1.0, num_tokens), hits / max(1.0, num_tokens), int(num_tokens))

    def shared_weights(self) -> AbstractContextManager[None]:
        """Within the block all data-parallel replicas hold the same weights: those that count."""
        return nullcontext() if self.replicas is None else self.replicas.shared_weights()

    def late_sums(self) -> dict[str, Tensor]:
        """Live tensors by `<name>.<what>`, the same on all replicas: sums, and what became of sums, for later steps.

        Waits for what is under way.
        """
        if self.delayed is not None:
            views = self._whole.layout.views(self.delayed.land())
            return {f"{name}.late_sum": view for name, view in views.items()}
        return {} if self.replicas is None else self.replicas.shared_state()

    def _build_stage(self, layers: range, *, first: bool, last: bool, defer_wgrad: DeferWgrad | None) -> nn.Module:
        tensor_parallel = self.config.parallel_config.tensor_parallel
        if defer_wgrad is None and not self.data_parallel.shards_weights:
            # Where it is kept, as soon as the ops see fit.
            defer_wgrad = self._accumulate
        stage = Transformer(
            self.shape,
            tp=TensorParallel(
                self.mesh.tp_group,
                method=tensor_parallel.method,
                save=tensor_parallel.save,
                defer_wgrad=defer_wgrad,
            ),
            layers=layers,
            first=first,
            last=last,
            seed=self.config.seed,
            device=self.mesh.device,
            dtype=torch.float32 if self.data_parallel.shards_weights else self.dtype,
        )
        if self.data_parallel.shards_weights:
            # Blocks that run in turns do so past the forwards of layers, which would gather their weights.
            as_a_whole = defer_wgrad is not None or self.shape.tp_sync != "every_layer"
            fully_shard_stage(
                stage,
                () if as_a_whole else stage.layers.values(),
                dp_mesh=self.mesh.device_mesh["dp"],
                tp_group=self.mesh.tp_group,
                dtype=self.dtype,
                keep_gathered=self.mesh.pp > 1,
            )
        return stage

    def _accumulate(self, weight: Tensor, gradient: WeightGradient) -> None:
        # The buckets are made after the layers.
        self._whole.accumulate(weight, gradient)

    def _disk_folder(self) -> DiskFolder | None:
        offload = self.config.train.offload
        if "disk" not in (offload.activations, offload.optimizer):
            return None
        if self.mesh.device.type != "cpu":
            raise ValueError(
                f"train.offload: disk is for CPU ranks, and this one computes on {self.mesh.device.type}; "
                "use none, and train.activation_checkpointing"
            )
        return DiskFolder(Path(offload.folder or self.config.train.output_dir))

    def _tie(self) -> TiedWeights | None:
        if not self.shape.tied_embeddings or self.mesh.pp == 1:
            return None
        # Both copies are drawn from one seed and name, so they start equal.
        last_rank = self.pipeline.rank_of_stage[-1]
        return TiedWeights(
            first=self.params["embedding.weight"] if self.pipeline.holds_first_stage else None,
            last=self.params["output.weight"] if self.pipeline.holds_last_stage else None,
            group=tied_group(self.mesh, last_stage_rank=last_rank, timeout_s=self.config.train.timeout_s),
        )

    def _token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, labels.t(), group=self.mesh.tp_group, ignore_index=IGNORE_INDEX)

    def _evaluation_sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss, hits and tokens of one micro-batch."""
        valid = labels.t() != IGNORE_INDEX
        hits = vocab_parallel_hits(logits, labels.t(), group=self.mesh.tp_group) & valid
        return torch.stack(
            [self._token_losses(logits, labels).double().sum(), hits.sum().double(), valid.sum().double()]
        )

    def _pipeline_times(self, record: Recording, seconds: float) -> list[float]:
        """This rank's share in the means over each pipeline rank: of the seconds in all, then of those waited."""
        mesh = self.mesh
        times = [0.0] * (2 * mesh.pp)
        for offset, value in ((0, seconds), (mesh.pp, record.exposed_s("pipeline"))):
            times[offset + mesh.pp_rank] = value / (mesh.dp * mesh.tp)
        return times

    def _sum_later(self, values: Sequence[float], group: ProcessGroup | None) -> Callable[[], list[float]]:
        """Begin to sum numbers over a group, or over all ranks; the function that is returned waits for the sums.

        And so for the GPU: PeerError if one of the fused calls before has waited in vain there.
        """
        sums = torch.tensor(values, dtype=torch.float64, device=self.mesh.device)
        work = dist.all_reduce(sums, group=group, async_op=True)

        @cache
        def result() -> list[float]:
            if work is not None:
                with span("wait", "sum", sums.nbytes):
                    work.wait()
            numbers = sums.tolist()
            refuse_if_failed(self.mesh.tp_group, "train")
            return numbers

        return result


def _idle_shares(seconds: Sequence[float], waited: Sequence[float]) -> list[float]:
    # The ranks start together; who has ended is idle until the last one has.
    longest = max(seconds)
    return [(longest - own + wait) / longest for own, wait in zip(seconds, waited)]


def loss_scale_of(config: Config) -> LossScale | None:
    """A new loss scale as configured; None where the precision needs none."""
    scale = config.train.loss_scale
    return LossScale(scale.initial, scale.growth_interval) if config.train.precision == "fp16" else None
