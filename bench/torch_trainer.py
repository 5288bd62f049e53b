"""A training step as a torch user writes it: DTensor tensor parallelism, DDP, torch pipelining, AdamW.

The Llama of `fusedcomm.nn.Transformer`, with the same parameters under nearly the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.comm.mesh import Mesh
from fusedcomm.nn import TransformerConfig, rope_table, rotate


class PlainLlama(nn.Module):
    """Whole or a pipeline stage; tokens [B, S] or hidden states [B, S, H] to hidden states or logits [B, S, V].

    `share`: how many such models make up the whole one, with 1/share of the heads, inner features and vocabulary each.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layers: Sequence[int],
        *,
        first: bool,
        last: bool,
        share: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.share, self.first, self.last = share, first, last
        vocab_size = config.vocab_size // share
        if first:
            self.embedding = nn.Embedding(vocab_size, config.hidden, dtype=dtype)
        self.layers = nn.ModuleDict({str(index): _Layer(config, share, dtype) for index in layers})
        if last:
            self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps, dtype=dtype)
            self.output = nn.Linear(config.hidden, vocab_size, bias=False, dtype=dtype)

    def load(self, full: Mapping[str, Tensor]) -> None:
        """The values of `fusedcomm.nn.Transformer`'s state; only where `share` is 1."""
        with torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(full[our_name(name)])

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x)) if self.last else x


class _Layer(nn.Module):
    def __init__(self, config: TransformerConfig, share: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps, dtype=dtype)
        self.attention = _Attention(config, share, dtype)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps, dtype=dtype)
        self.mlp = _MLP(config, share, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class _Attention(nn.Module):
    def __init__(self, config: TransformerConfig, share: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        features = config.hidden // share
        self.q, self.k, self.v = (nn.Linear(config.hidden, features, bias=False, dtype=dtype) for _ in range(3))
        self.out = nn.Linear(features, config.hidden, bias=False, dtype=dtype)
        self._rope = rope_table(config.seq_len, config.head_dim, config.rope_theta, None)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(f(x), "b s (h d) -> b h s d", d=self._head_dim) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q, *self._rope), rotate(k, *self._rope), v, is_causal=True)
        return self.out(rearrange(y, "b h s d -> b s (h d)"))


class _MLP(nn.Module):
    def __init__(self, config: TransformerConfig, share: int, dtype: torch.dtype) -> None:
        super().__init__()
        features = config.ffn_hidden // share
        self.gate, self.up = (nn.Linear(config.hidden, features, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(features, config.hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def our_name(name: str) -> str:
    """The name of the same parameter in `fusedcomm.nn.Transformer`."""
    name = name.removeprefix("module.")
    for group, members in (("attention.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
        parent = group.split(".")[0]
        for member in members:
            name = name.replace(f".{parent}.{member}.", f".{group}.{member}.")
    return name


class TorchTrainer:
    """One rank's part of the step, on a pp x dp x tp mesh; 1F1B where there is a pipeline.

    Inside a pipeline DDP gives wrong gradients, since a micro-batch's backward would reduce each time: there the
    gradients are summed over the data-parallel ranks after the last one, in one flat tensor.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        full: Mapping[str, Tensor],
        *,
        micro_batches: int,
        batch_shape: tuple[int, int],
        dtype: torch.dtype,
        lr: float,
    ) -> None:
        self._mesh, self._num_tokens = mesh, batch_shape[0] * batch_shape[1] * mesh.dp
        per_stage = config.layers // mesh.pp
        layers = range(mesh.pp_rank * per_stage, (mesh.pp_rank + 1) * per_stage)
        model = PlainLlama(config, layers, first=mesh.is_first_stage, last=mesh.is_last_stage, share=1, dtype=dtype)
        model.load(full)
        if mesh.tp > 1:
            model = parallelize_module(model, mesh.device_mesh["tp"], _plan(model), src_data_rank=None)
        # DDP averages over the ranks, where a loss that is divided by all tokens wants the sum.
        self._scale = 1.0
        if mesh.dp > 1 and mesh.pp == 1:
            if mesh.tp > 1:
                _pre_dp_module_transform(model)
            model = DistributedDataParallel(model, process_group=mesh.dp_group)
            self._scale = float(mesh.dp)
        self._model = model
        # Kept, because DTensor under DDP takes its parameters out of the module in forward.
        self._params = {our_name(name): param for name, param in model.named_parameters()}
        self._schedule = None
        if mesh.pp > 1:
            rows, seq_len = batch_shape
            tokens = torch.empty(rows // micro_batches, seq_len, dtype=torch.int64, device="meta")
            hidden = torch.empty(
                rows // micro_batches, seq_len // mesh.tp, config.hidden, dtype=dtype, device="meta", requires_grad=True
            )
            stage = PipelineStage(
                model,
                mesh.pp_rank,
                mesh.pp,
                torch.device("cpu"),
                input_args=tokens if mesh.is_first_stage else hidden,
                output_args=hidden,
                group=mesh.pp_group,
            )
            self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=self._loss, scale_grads=False)
        self._optimizer = torch.optim.AdamW(self._params.values(), lr=lr)

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        """Forward, backward, reduction and update; gradients are left in `grads()`."""
        self._optimizer.zero_grad()
        with loss_parallel():
            if self._schedule is None:
                (self._loss(self._model(tokens), labels) * self._scale).backward()
            else:
                self._schedule.step(
                    *((tokens,) if self._mesh.is_first_stage else ()),
                    target=labels if self._mesh.is_last_stage else None,
                    return_outputs=False,
                )
        self._complete_gradients()
        self._optimizer.step()

    def grads(self) -> dict[str, Tensor]:
        """This rank's shards of the gradients, by our names."""
        return {name: _local(param.grad) for name, param in self._params.items() if param.grad is not None}

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        losses = losses.full_tensor() if isinstance(losses, DTensor) else losses
        return losses / self._num_tokens

    def _complete_gradients(self) -> None:
        params = [param for param in self._params.values() if param.grad is not None]
        for param in params:
            # Sums of which each rank has a part; DTensor leaves them to the user.
            if isinstance(param, DTensor) and isinstance(param.grad, DTensor):
                param.grad = param.grad.redistribute(placements=param.placements)
        if self._schedule is None or self._mesh.dp == 1:
            return
        flat = torch.cat([_local(param.grad).flatten() for param in params])
        dist.all_reduce(flat, group=self._mesh.dp_group)
        for param, part in zip(params, flat.split([_local(param.grad).numel() for param in params])):
            grad = _local(param.grad)
            grad.copy_(part.view(grad.shape))


def _plan(model: PlainLlama) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    if model.first:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for index in model.layers:
        plan |= {f"layers.{index}.{name}": SequenceParallel() for name in ("attention_norm", "mlp_norm")}
        plan |= {f"layers.{index}.{name}": gathered for name in ("attention", "mlp")}
        plan |= {
            f"layers.{index}.{name}": ColwiseParallel()
            for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
        }
        plan |= {
            f"layers.{index}.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")
        }
    if model.last:
        plan["norm"] = SequenceParallel()
        plan["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    return plan


def _local(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_local() if isinstance(grad, DTensor) else grad
