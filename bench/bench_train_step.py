"""A whole training step of a small Llama: forward, backward, gradient sums and AdamW, on a mesh of all three axes.

Unless `--layout` says otherwise, world 2 is tensor-parallel, 4 is data 2 x tensor 2, 8 is pipeline 2 x data 2 x
tensor 2. M are the tokens of one
data-parallel rank in a step, K the width, N the inner features of an MLP on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusedcomm.bench.case import Case, Method, Results, Spec, check_divides
from fusedcomm.bench.errors import BenchError
from fusedcomm.bench.torch_trainer import PlainLlama, TorchTrainer
from fusedcomm.comm.mesh import Mesh, build_mesh
from fusedcomm.nn import TensorParallel, Transformer, layout_of, vocab_parallel_cross_entropy
from fusedcomm.ops import all_gather, reduce_scatter
from fusedcomm.parallel import main_grad_of
from fusedcomm.train.config import Config, parse_config
from fusedcomm.train.data import Batch
from fusedcomm.train.trainer import Trainer

METHODS = ("torch", "serial", "chunked", "auto")
TORCH_METHOD = "torch"
# As `auto`, but one step of many is timed, since something travels during the next step's forward: gradients (and in a
# pipeline weight gradients come at the end), or weights of which each data-parallel rank has stepped its share.
EXTRA_METHODS = ("backward+forward", "zero1", "fsdp")
_HEAD_DIM = 64
_NUM_LAYERS = 6
_NUM_ROWS = 8
_VOCAB_SIZE = 1024
_LR = 1e-4
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class _Layout:
    pp: int
    dp: int
    tp: int

    @property
    def micro_batches(self) -> int:
        return 2 * self.pp if self.pp > 1 else 1


def _layout_of(spec: Spec) -> _Layout:
    return _usual_layout(spec.world) if spec.layout is None else _Layout(*spec.layout)


def _usual_layout(world: int) -> _Layout:
    tp = 2 if world % 2 == 0 else 1
    pp = 2 if world % 8 == 0 else 1
    return _Layout(pp, world // (tp * pp), tp)


def default_shape(world: int) -> tuple[int, int, int]:
    return 1024, 1408 // _usual_layout(world).tp, 512


def check_spec(spec: Spec) -> None:
    layout = _layout_of(spec)
    tp = layout.tp
    if _NUM_LAYERS % layout.pp:
        raise BenchError(f"--layout: {_NUM_LAYERS} layers do not divide over {layout.pp} stages")
    check_divides(spec, f"M, {_NUM_ROWS} sequences,", spec.m, _NUM_ROWS * tp)
    check_divides(spec, "K, features of whole heads,", spec.k, _HEAD_DIM * tp)


def config_of(spec: Spec, method: str) -> Config:
    """What the trainer is given for one of our methods."""
    layout = _layout_of(spec)
    in_forward = method == "backward+forward"
    return parse_config(
        {
            "model": {
                "layers": _NUM_LAYERS,
                "hidden": spec.k,
                "heads": spec.k // _HEAD_DIM,
                "ffn_hidden": spec.n * layout.tp,
                "vocab_size": _VOCAB_SIZE,
            },
            "data": {"seq_len": spec.m // _NUM_ROWS},
            "train": {
                "steps": 1_000_000,
                "global_batch": _NUM_ROWS * layout.dp,
                "precision": spec.dtype_name,
                # What is compared are gradients of the second step, whose weights must be those of the first.
                "lr": 1e-30 if method in EXTRA_METHODS else _LR,
                # torch's side does not clip either.
                "clip_norm": None,
                "timeout_s": _TIMEOUT_S,
                # The gradients of a scaled loss could not be compared.
                "loss_scale": {"initial": 1.0},
            },
            "parallel_config": {
                "tensor_parallel": {
                    "size": layout.tp,
                    "method": "auto" if method in EXTRA_METHODS else method,
                    "save": "gathered",
                },
                "pipeline_parallel": {
                    "depth": layout.pp,
                    "micro_batches": layout.micro_batches,
                    # As torch's side has them.
                    "stage_layers": [_NUM_LAYERS // layout.pp] * layout.pp,
                    "weight_gradients": "at_end" if in_forward and layout.pp > 1 else "by_schedule",
                },
                "data_parallel": {
                    "size": layout.dp,
                    "overlap": "backward+forward" if in_forward else "backward",
                    "mode": method if method in ("zero1", "fsdp") else "replicate",
                },
            },
        }
    )


def make_case(spec: Spec, rank: int) -> Case:
    return _TrainStep(spec)


class _TrainStep:
    def __init__(self, spec: Spec) -> None:
        self._spec, self._layout = spec, _layout_of(spec)
        layout = self._layout
        self._mesh = build_mesh(pp=layout.pp, dp=layout.dp, tp=layout.tp, timeout_s=_TIMEOUT_S)
        self._alone = _group_of_one()
        self._shape = config_of(spec, "serial").transformer()
        self._full = self._whole_model(spec.dtype).state_dict()
        # The sequence-parallel rows of this rank, and all of them.
        self._hidden = torch.zeros(spec.m // layout.tp, spec.k, dtype=spec.dtype)
        self._num_scatters = 2 * _NUM_LAYERS // layout.pp
        self._num_gathers = self._num_scatters
        # The embedding scatters, the output layer gathers; backward the other way round.
        self._num_scatters += self._mesh.is_first_stage
        self._num_gathers += self._mesh.is_last_stage
        self._num_params = sum(param.numel() for param in self._local_model().parameters())
        self.min_bytes = self._count_bytes(self._mesh)

    def open(self, name: str) -> Method:
        if name == "compute":
            return self._open_compute()
        if name == "transfer":
            return Method(self._run_transfers)
        if name == "torch":
            return self._open_torch()
        return self._open_ours(name)

    def reference(self, dtype: torch.dtype) -> Results:
        model = self._whole_model(dtype)
        model.load_state_dict({name: tensor.to(dtype) for name, tensor in self._full.items()})
        for dp_rank in range(self._layout.dp):
            batch = self._batch(dp_rank)
            losses = vocab_parallel_cross_entropy(model(batch.tokens), batch.labels.t(), group=self._alone)
            (losses.sum() / (self._spec.m * self._layout.dp)).backward()
        return {
            name: self._shard(param.grad, layout_of(param).shard_dim)
            for name, param in model.named_parameters()
            if param.grad is not None and self._is_mine(name)
        }

    def _open_ours(self, name: str) -> Method:
        trainer = Trainer(config_of(self._spec, name), self._mesh)
        batch = self._batch(self._mesh.dp_rank)
        grads: dict[str, Tensor] = {}

        def run() -> Results:
            trainer.gradients(0, [batch])
            trainer.update(0)
            if not trainer.data_parallel.shards_optimizer:
                grads.update(_main_grads(trainer))
            return grads

        def finish() -> None:
            trainer.settle()
            # Once, for the check: what each rank has summed are rows.
            if not grads:
                for param, own in _main_grads(trainer).items():
                    rows: list[Any] = [None] * self._mesh.dp
                    dist.all_gather_object(rows, own, group=self._mesh.dp_group)
                    grads[param] = torch.cat(rows)

        note = self._words("ours")
        if name not in EXTRA_METHODS:
            return Method(run, note=note)
        if name == "backward+forward" and self._layout.pp > 1:
            note += ", weight gradients at the end"
        return Method(run, prepare=run, note=f"{note}, step after step", finish=finish)

    def _whole_model(self, dtype: torch.dtype) -> Transformer:
        return Transformer(self._shape, tp=TensorParallel(self._alone), seed=0, dtype=dtype)

    def _local_model(self) -> PlainLlama:
        """What this rank computes, without what others send."""
        mesh, layers = self._mesh, range(_NUM_LAYERS // self._layout.pp)
        return PlainLlama(
            self._shape,
            layers,
            first=mesh.is_first_stage,
            last=mesh.is_last_stage,
            share=self._layout.tp,
            dtype=self._spec.dtype,
        )

    def _batch(self, dp_rank: int) -> Batch:
        shape = (_NUM_ROWS, self._spec.m // _NUM_ROWS)
        tokens, labels = (
            torch.randint(_VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1 + 2 * dp_rank + part))
            for part in (0, 1)
        )
        return Batch(tokens, labels, torch.arange(_NUM_ROWS) + dp_rank * _NUM_ROWS)

    def _is_mine(self, name: str) -> bool:
        if name.startswith("layers."):
            return int(name.split(".")[1]) // (_NUM_LAYERS // self._layout.pp) == self._mesh.pp_rank
        return self._mesh.is_first_stage if name.startswith("embedding") else self._mesh.is_last_stage

    def _shard(self, full: Tensor, dim: int | None) -> Tensor:
        return full if dim is None else full.chunk(self._layout.tp, dim)[self._mesh.tp_rank]

    def _count_bytes(self, mesh: Mesh) -> int:
        element = self._hidden.element_size()
        rows = self._hidden.nbytes
        # Backward gathers for each scatter, and scatters for each gather.
        tensor = 2 * (self._num_scatters + self._num_gathers) * (mesh.tp - 1) * rows
        data = 2 * (mesh.dp - 1) * self._num_params * element // mesh.dp
        pipeline = rows * (mesh.pp > 1)
        return tensor + data + pipeline

    def _run_transfers(self) -> Results:
        group, full = self._mesh.tp_group, self._hidden.repeat(self._layout.tp, 1)
        for _ in range(self._num_scatters + self._num_gathers):
            all_gather(self._hidden, group=group)
            reduce_scatter(full, group=group)
        if self._mesh.dp > 1:
            dist.all_reduce(torch.zeros(self._num_params), group=self._mesh.dp_group)
        return {}

    def _open_compute(self) -> Method:
        model, mesh, layout = self._local_model(), self._mesh, self._layout
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
        vocab_size = _VOCAB_SIZE // layout.tp
        batch = self._batch(mesh.dp_rank)
        hidden = torch.randn(_NUM_ROWS, self._spec.m // _NUM_ROWS, self._spec.k, dtype=self._spec.dtype)
        source = batch.tokens % vocab_size if mesh.is_first_stage else hidden.requires_grad_()

        def run() -> Results:
            optimizer.zero_grad()
            for x, labels in zip(source.chunk(layout.micro_batches), batch.labels.chunk(layout.micro_batches)):
                y = model(x)
                if mesh.is_last_stage:
                    F.cross_entropy(y.flatten(0, 1).float(), labels.flatten() % vocab_size).backward()
                else:
                    y.backward(hidden[: len(x)])
            optimizer.step()
            return {}

        return Method(run)

    def _open_torch(self) -> Method:
        batch = self._batch(self._mesh.dp_rank)
        trainer = TorchTrainer(
            self._shape,
            self._mesh,
            self._full,
            micro_batches=self._layout.micro_batches,
            batch_shape=(batch.tokens.shape[0], batch.tokens.shape[1]),
            dtype=self._spec.dtype,
            lr=_LR,
        )

        def run() -> Results:
            trainer.step(batch.tokens, batch.labels)
            return trainer.grads()

        return Method(run, note=self._words("DTensor, DDP and torch pipelining"))

    def _words(self, what: str) -> str:
        layout = self._layout
        return f"{what}, pipeline {layout.pp} x data {layout.dp} x tensor {layout.tp}"


def _main_grads(trainer: Trainer) -> dict[str, Tensor]:
    return {name: grad for name, param in trainer.params.items() if (grad := main_grad_of(param)) is not None}


def _group_of_one() -> dist.ProcessGroup:
    # Every rank must take part in making every group.
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = groups[dist.get_rank()]
    assert isinstance(own, dist.ProcessGroup)
    return own
