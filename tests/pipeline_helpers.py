"""A model small enough to be pipelined in tests, its data, and its gradients on one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fusedcomm.ops.wgrad import DeferWgrad, local_linear
from fusedcomm.parallel import BuildStage, Pipeline

VOCAB, HIDDEN, SEQUENCE, LAYERS = 11, 6, 3, 8
ROWS, MICRO_BATCHES = 8, 4


class Stage(nn.Module):
    """Embedding, residual layers, head; an element of the output depends on its row's sample id and step."""

    def __init__(self, layers: range, *, first: bool, last: bool, defer_wgrad: DeferWgrad | None) -> None:
        super().__init__()
        self.defer_wgrad = defer_wgrad
        weights = {f"layers.{layer}.weight": (HIDDEN, HIDDEN) for layer in layers}
        weights |= {f"layers.{layer}.scale": (HIDDEN,) for layer in layers}
        weights |= {"embedding.weight": (VOCAB, HIDDEN)} if first else {}
        weights |= {"output.weight": (VOCAB, HIDDEN)} if last else {}
        self.layers, self.first, self.last = layers, first, last
        self.weights = nn.ParameterDict()
        for name, shape in weights.items():
            # The value depends on the name alone; the tied copy has its twin's.
            generator = torch.Generator().manual_seed(sum(map(ord, name.replace("output", "embedding"))))
            self.weights[name.replace(".", "/")] = nn.Parameter(torch.randn(shape, generator=generator) * 0.3)

    def get(self, name: str) -> nn.Parameter:
        return self.weights[name.replace(".", "/")]

    def named_parameters(self, *args: Any, **kwargs: Any):
        for name, param in self.weights.items():
            yield name.replace("/", "."), param

    def forward(self, x: Tensor, sample_ids: Tensor | None = None, step: Tensor | None = None) -> Tensor:
        if self.first:
            x = F.embedding(x, self.get("embedding.weight"))
        for layer in self.layers:
            noise = 0 if sample_ids is None else torch.sin(sample_ids + step + layer)[:, None, None]
            wide = local_linear(
                x * self.get(f"layers.{layer}.scale"), self.get(f"layers.{layer}.weight"), None, self.defer_wgrad
            )
            x = x + torch.tanh(wide + noise)
        return local_linear(x, self.get("output.weight"), None, self.defer_wgrad) if self.last else x


def data(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "inputs": torch.randint(VOCAB, (rows, SEQUENCE), generator=generator),
        "labels": torch.randint(VOCAB, (rows, SEQUENCE), generator=generator),
        "sample_ids": torch.arange(rows) + rows * step,
        "step": torch.full((rows,), step),
    }


def mean_loss(output: Tensor, labels: Tensor, num_tokens: int = ROWS * SEQUENCE) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens


def make_pipeline(
    schedule: str, group: dist.ProcessGroup | None, *, build_stage: BuildStage = Stage, **options: Any
) -> Pipeline:
    given = {
        "layer_costs": [1.0] * LAYERS,
        "micro_batches": MICRO_BATCHES,
        "input_like": torch.empty(1, SEQUENCE, dtype=torch.int64, device="meta"),
        "hidden_like": torch.empty(1, SEQUENCE, HIDDEN, device="meta"),
        "schedule": schedule,
    }
    return Pipeline(build_stage, group=group, **given | options)


def one_process(
    dtype: torch.dtype, *steps: int, rows: int = ROWS, used: int | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients summed over these steps, of the first `used` rows, in one process without micro-batches."""
    model = Stage(range(LAYERS), first=True, last=True, defer_wgrad=None).to(dtype)
    total = 0.0
    for step in steps:
        batch = {name: tensor[:used] for name, tensor in data(step, rows).items()}
        labels = batch.pop("labels")
        loss = mean_loss(model(batch.pop("inputs"), **batch), labels)
        loss.backward()
        total += loss.item()
    return total, {name: param.grad for name, param in model.named_parameters()}
