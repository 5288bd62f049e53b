"""A decoder-only Transformer, whole or one pipeline stage of it, from tensor-parallel layers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.nn.attention import Attention, rope_table
from fusedcomm.nn.config import Checkpointing, TransformerConfig, check_tensor_parallel
from fusedcomm.nn.dropout import DropoutSite, dropout_keys, stateless_dropout
from fusedcomm.nn.embedding import LearnedPositions, VocabParallelEmbedding
from fusedcomm.nn.layout import ShardedModule, TensorParallel
from fusedcomm.nn.linear import ColumnParallelLinear
from fusedcomm.nn.mlp import MLP
from fusedcomm.nn.norm import LayerNorm, RMSNorm
from fusedcomm.nn.turns import Block, Steps, in_turns, ladder, residual_steps


@dataclass(frozen=True)
class _Pass:
    """What the layers of one forward pass share."""

    # Positions per tensor-parallel rank, and the first one of this rank.
    sizes: tuple[int, ...]
    first_position: int
    rope: tuple[Tensor, Tensor] | None
    # None where nothing is dropped out.
    dropout_keys: Tensor | None


class TransformerLayer(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, with dropout at the end of both branches.

    Shapes per rank, W ranks: x [S/W, B, H] and the result alike. What travels is said by Attention and MLP.
    """

    def __init__(
        self,
        config: TransformerConfig,
        index: int,
        *,
        tp: TensorParallel,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.index = index
        self.dropout = config.dropout
        self.attention_norm = _norm(config, tp, device, dtype)
        self.attention = Attention(
            config.hidden,
            config.heads,
            config.kv_heads,
            tp=tp,
            bias=config.bias,
            device=device,
            dtype=dtype,
        )
        self.mlp_norm = _norm(config, tp, device, dtype)
        self.mlp = MLP(
            config.hidden,
            config.ffn_hidden,
            tp=tp,
            activation=config.activation,
            split_dim=config.split_dim,
            bias=config.bias,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor, run: _Pass) -> Tensor:
        branch = self.attention(self.attention_norm(x), run.sizes, run.rope)
        x = x + _drop(branch, self.dropout, run, self.index, DropoutSite.ATTENTION)
        branch = self.mlp(self.mlp_norm(x), run.sizes)
        return x + _drop(branch, self.dropout, run, self.index, DropoutSite.MLP)

    def blocks(self, run: _Pass) -> tuple[Block, Block]:
        """The two branches in steps; the hidden states are not added."""
        return partial(self._attention_steps, run=run), partial(self._mlp_steps, run=run)

    def _attention_steps(self, x: Tensor, run: _Pass) -> Steps:
        finish = yield from self.attention.steps(self.attention_norm(x), run.sizes, run.rope)
        return lambda: _drop(finish(), self.dropout, run, self.index, DropoutSite.ATTENTION)

    def _mlp_steps(self, x: Tensor, run: _Pass) -> Steps:
        finish = yield from self.mlp.steps(self.mlp_norm(x), run.sizes)
        return lambda: _drop(finish(), self.dropout, run, self.index, DropoutSite.MLP)


class Transformer(nn.Module):
    """The whole model, or a pipeline stage of it: `layers`, the embedding if `first`, the head if `last`.

    Parameter names are global (`layers.3.attention.qkv.q.weight`, whatever the stage). Initial values and
    dropout depend on `seed` and on what a parameter or an element is, never on how the model is laid out:
    matrices [N, K] are normal with standard deviation 1/sqrt(3 K) (0.02 at GPT-2's width), those that end a
    branch divided by sqrt(2 * layers) as in GPT-2; biases are zero, norms one. With tied embeddings a last
    stage that is not the first holds its own copy, `output.weight`: `tied` names the two, whose gradients the
    caller adds up.

    Shapes per rank, W tensor-parallel ranks: the first stage takes tokens [B, S], equal on all ranks, others
    hidden states [S/W, B, H] of `config.seq_len` positions, cut as `torch.chunk` would (with `tp_sync="ladder"` 2 H
    features: the last block's output, not added yet, stands beside them). The last one returns logits [S, B, V/W], for
    `vocab_parallel_cross_entropy`, others hidden states. Dropout in training needs `sample_ids` [B], the samples'
    numbers in the whole data, and `step` [B], both int64. `tp_sync="interleave"` needs B >= 2.

    Raises ValueError with the numbers where the model does not divide over the ranks or an input does not
    fit.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        tp: TensorParallel,
        layers: Sequence[int] | None = None,
        first: bool = True,
        last: bool = True,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_tensor_parallel(config, tp.size)
        indices = range(config.layers) if layers is None else layers
        if any(not 0 <= index < config.layers for index in indices):
            raise ValueError(
                f"Transformer: layers={list(indices)}; a model of {config.layers} has 0..{config.layers - 1}"
            )
        self.config, self.tp, self.seed = config, tp, seed
        self.first, self.last = first, last
        # Layers are made without storage, since their own initial values would be drawn for nothing.
        meta = torch.device("meta")
        if first:
            self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden, tp=tp, device=meta, dtype=dtype)
            if config.position == "learned":
                self.position = LearnedPositions(config.seq_len, config.hidden, tp=tp, device=meta, dtype=dtype)
        self.layers = nn.ModuleDict(
            {str(index): TransformerLayer(config, index, tp=tp, device=meta, dtype=dtype) for index in indices}
        )
        if last:
            self.norm = _norm(config, tp, meta, dtype)
            self.output = ColumnParallelLinear(
                config.hidden, config.vocab_size, tp=tp, bias=False, device=meta, dtype=dtype
            )
        self.register_load_state_dict_post_hook(lambda module, _: module._tie())
        target = torch.get_default_device() if device is None else torch.device(device)
        self.to_empty(device=target)
        if target.type != "meta":
            self.reset_parameters()

    @property
    def tied(self) -> tuple[str, str] | None:
        """Names of the copies of the tied matrix if the first and the last stage hold one each, else None."""
        if not self.config.tied_embeddings or (self.first and self.last):
            return None
        return "embedding.weight", "output.weight"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        # Also after torch has replaced the Parameters, see ShardedModule.
        if self.first and self.last and self.config.tied_embeddings:
            self.output.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        """Draw all initial values, from `seed` and the names alone."""
        for prefix, module in self.named_modules():
            if isinstance(module, ShardedModule):
                for name in module.layouts:
                    module.fill_from_full(name, self._draw_of(f"{prefix}.{name}"))

    def _draw_of(self, name: str) -> Callable[[Tensor], Any]:
        if name.endswith("bias"):
            return torch.Tensor.zero_
        if name.endswith("norm.weight"):
            return partial(torch.Tensor.fill_, value=1)
        # A last stage's copy of the tied matrix starts as the original.
        source = "embedding.weight" if name == "output.weight" and self.config.tied_embeddings else name
        digest = hashlib.sha256(f"{self.seed} {source}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        ends_branch = name.endswith(("attention.out.weight", "mlp.down.weight"))
        gain = 1 / math.sqrt(2 * self.config.layers) if ends_branch else 1.0
        return lambda full: full.normal_(0, gain / math.sqrt(3 * full.shape[1]), generator=generator)

    def forward(self, x: Tensor, sample_ids: Tensor | None = None, step: Tensor | None = None) -> Tensor:
        run = self._plan_pass(x, sample_ids, step)
        if self.first:
            x = self.embedding(x.t(), run.sizes)
            if self.config.position == "learned":
                x = self.position(x, run.sizes)
            x = _drop(x, self.config.dropout, run, 0, DropoutSite.EMBEDDING)
        x = self._run_layers(x, run)
        if self.last:
            x = self.output(self.norm(x), run.sizes)
        return x

    def _plan_pass(self, x: Tensor, sample_ids: Tensor | None, step: Tensor | None) -> _Pass:
        config = self.config
        if self.first and x.dim() != 2:
            raise ValueError(
                f"Transformer: the first stage's input has shape {list(x.shape)}; it must be tokens [B, S]"
            )
        seq_len = x.shape[1] if self.first else config.seq_len
        sizes = chunk_sizes(seq_len, self.tp.size)
        own = sizes[self.tp.rank]
        if not self.first and (x.dim() != 3 or x.shape[0] != own or x.shape[2] != config.stage_features):
            raise ValueError(
                f"Transformer: hidden states have shape {list(x.shape)}; of seq_len={seq_len} positions, "
                f"tp rank {self.tp.rank} must get [{own}, B, {config.stage_features}]"
            )
        keys = None
        if self.training and config.dropout > 0:
            if sample_ids is None or step is None:
                raise ValueError(
                    f"Transformer: dropout={config.dropout} in training needs sample_ids and step, "
                    "which decide what is dropped: pass both, or call eval()"
                )
            keys = dropout_keys(self.seed, step, sample_ids)
        rope = None
        if config.position == "rope":
            rope = rope_table(seq_len, config.head_dim, config.rope_theta, x.device)
        return _Pass(sizes, sum(sizes[: self.tp.rank]), rope, keys)

    def _run_layers(self, x: Tensor, run: _Pass) -> Tensor:
        if self.config.tp_sync == "interleave":
            return self._run_halves(x, run)
        if self.config.tp_sync == "ladder":
            return self._run_ladder(x, run)
        for layer in self.layers.values():
            x = self._run_layer(layer, x, run)
        return x

    def _run_halves(self, x: Tensor, run: _Pass) -> Tensor:
        """The batch as two halves, one computed while what the other has sent travels."""
        batch = x.shape[1]
        if batch < 2:
            raise ValueError(
                f"Transformer: tp_sync='interleave' with B={batch}; it computes two halves of the batch in turns: "
                "give at least 2 samples, or use 'every_layer'"
            )
        cut = chunk_sizes(batch, 2)
        keys = (None, None) if run.dropout_keys is None else run.dropout_keys.split(cut)
        runs = [replace(run, dropout_keys=half) for half in keys]

        def run_both(layers: list[TransformerLayer], *halves: Tensor) -> tuple[Tensor, ...]:
            first, second = (residual_steps(_blocks(layers, keyed), half) for half, keyed in zip(halves, runs))
            return in_turns(first, second)

        return torch.cat(self._by_parts(run_both, *x.split(cut, dim=1)), dim=1)

    def _run_ladder(self, x: Tensor, run: _Pass) -> Tensor:
        """Between stages the last block's output stands beside the hidden states, to which it is added later."""
        previous = None
        if not self.first:
            x, previous = x.chunk(2, dim=-1)

        def run_layers(layers: list[TransformerLayer], x: Tensor, previous: Tensor | None) -> tuple[Any, ...]:
            return ladder(_blocks(layers, run), x, previous)

        x, previous = self._by_parts(run_layers, x, previous)
        previous = torch.zeros_like(x) if previous is None else previous
        return x + previous if self.last else torch.cat((x, previous), dim=-1)

    def _by_parts(self, run: Callable[..., tuple[Any, ...]], *state: Tensor | None) -> tuple[Any, ...]:
        """`run(layers, *state)` for as many layers at once as can be: those that backward computes again go alone."""
        for repeated, group in groupby(self.layers.values(), lambda layer: self._checkpointing_of(layer) != "none"):
            if not repeated:
                state = run(list(group), *state)
                continue
            for layer in group:
                # To the end, even when backward has all that it needs: what has begun to travel must be waited for.
                state = checkpoint(
                    run, [layer], *state, use_reentrant=False, preserve_rng_state=False, early_stop=False
                )
        return state

    def _checkpointing_of(self, layer: nn.Module) -> Checkpointing:
        assert isinstance(layer, TransformerLayer)
        return self.config.checkpointing_of_layers[layer.index] if torch.is_grad_enabled() else "none"

    def _run_layer(self, layer: nn.Module, x: Tensor, run: _Pass) -> Tensor:
        mode = self._checkpointing_of(layer)
        if mode == "none":
            return layer(x, run)
        # No random numbers are drawn, so there is no generator state to bring back.
        if mode == "full":
            return checkpoint(layer, x, run, use_reentrant=False, preserve_rng_state=False)
        return checkpoint(
            layer,
            x,
            run,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(create_selective_checkpoint_contexts, _kept_operators()),
        )


def _blocks(layers: Sequence[TransformerLayer], run: _Pass) -> list[Block]:
    return [block for layer in layers for block in layer.blocks(run)]


def _kept_operators() -> list[Any]:
    """What selective checkpointing does not run again: GEMMs with their transfers, and attention."""
    aten, ours = torch.ops.aten, torch.ops.fusedcomm
    return [
        ours.all_gather_matmul.default,
        ours.matmul_reduce_scatter.default,
        # A group of one multiplies without our ops.
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ]


def _norm(
    config: TransformerConfig,
    tp: TensorParallel,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> RMSNorm | LayerNorm:
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.hidden, tp=tp, eps=config.norm_eps, device=device, dtype=dtype)


def _drop(x: Tensor, p: float, run: _Pass, layer: int, site: DropoutSite) -> Tensor:
    if run.dropout_keys is None:
        return x
    return stateless_dropout(x, p, run.dropout_keys, layer=layer, site=site, first_position=run.first_position)
