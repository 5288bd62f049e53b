"""The shape of a Transformer: what fits together, how many parameters and how many FLOPs it has."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from fusedcomm.nn.attention import check_heads, check_heads_over_ranks
from fusedcomm.nn.embedding import check_vocab
from fusedcomm.nn.mlp import check_mlp

_CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "activation": ("swiglu", "gelu"),
    "position": ("rope", "learned"),
    "split_dim": (0, 1),
    "tp_sync": ("every_layer", "interleave", "ladder"),
}


Checkpointing = Literal["none", "full", "selective"]


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only Transformer; `llama` and `gpt2` fill in what is usual for the two families.

    Attributes:
        hidden: features between the layers.
        ffn_hidden: inner features of the MLP.
        kv_heads: key and value heads; `heads` is plain multi-head attention, 1 is multi-query.
        seq_len: positions in a training sequence; every pipeline stage but the first takes exactly these.
        bias: linear layers have one (the output layer never has).
        tied_embeddings: the output layer is the embedding.
        dropout: share of zeroed elements after the embedding and at the end of each branch, in training.
        split_dim: how the MLP is split, see `MLP`; attention is always split by heads.
        checkpointing: what backward computes again: "none"; "full": whole layers from their inputs;
            "selective": everything but the GEMMs, their transfers and the attention kernel, so norms,
            activations, rotations and dropout. One word for all layers, or one for each.
        tp_sync: when tensor-parallel ranks wait for each other. "every_layer": where the result is used, so that a
            transfer hides behind its own GEMM. "interleave": the batch is computed as two halves in turns, so that
            what one half sends travels while the other is computed; the numbers are those of the halves computed one
            after the other. "ladder": attention and MLPs read the hidden states to which the output of the block
            before has not been added yet, so that it travels while they are computed. THIS IS ANOTHER MODEL, on any
            number of ranks: weights trained with it are of no use without it, and the other way round. Source of
            the halves: Wang et al., "Domino: eliminating communication in LLM training via generic tensor slicing and
            overlapping", 2024; of the ladder: Zhang et al., "Ladder-residual: parallelism-aware architecture for
            accelerating large model inference with communication overlapping", 2025.
    """

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    seq_len: int
    norm: Literal["rmsnorm", "layernorm"]
    activation: Literal["swiglu", "gelu"]
    position: Literal["rope", "learned"]
    bias: bool
    tied_embeddings: bool
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    split_dim: Literal[0, 1] = 1
    checkpointing: Checkpointing | tuple[Checkpointing, ...] = "none"
    tp_sync: Literal["every_layer", "interleave", "ladder"] = "every_layer"

    def __post_init__(self) -> None:
        where = "TransformerConfig"
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "ffn_hidden", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{where}: {name}={getattr(self, name)}; it must be at least 1")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{where}: {name}={getattr(self, name)!r}; choose one of {choices}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"{where}: dropout={self.dropout}; the share of zeroed elements must be in [0, 1)")
        check_heads(where, self.hidden, self.heads, self.kv_heads)
        if len(self.checkpointing_of_layers) != self.layers:
            raise ValueError(
                f"{where}: checkpointing has {len(self.checkpointing)} entries for {self.layers} layers; give one word "
                "for all of them, or one for each"
            )
        for mode in self.checkpointing_of_layers:
            if mode not in get_args(Checkpointing):
                raise ValueError(f"{where}: checkpointing={mode!r}; choose one of {get_args(Checkpointing)}")
        check_sync(where, self.tp_sync, self.split_dim, self.checkpointing_of_layers)
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(
                f"{where}: hidden={self.hidden} over heads={self.heads} gives head_dim={self.head_dim}; "
                "rope turns pairs of features: choose an even head_dim or position='learned'"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def checkpointing_of_layers(self) -> tuple[Checkpointing, ...]:
        given = self.checkpointing
        return given if isinstance(given, tuple) else (given,) * self.layers

    @property
    def stage_features(self) -> int:
        """Features between pipeline stages: hidden states, and with "ladder" the last block's output beside them."""
        return self.hidden * (2 if self.tp_sync == "ladder" else 1)

    @classmethod
    def llama(
        cls,
        *,
        vocab_size: int,
        hidden: int,
        layers: int,
        heads: int,
        seq_len: int,
        kv_heads: int | None = None,
        ffn_hidden: int | None = None,
    ) -> TransformerConfig:
        """RMSNorm, RoPE, SwiGLU, no biases.

        Without a value, kv_heads is heads and ffn_hidden 8/3 hidden, rounded up to a multiple of 64.
        """
        return cls(
            vocab_size=vocab_size,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            ffn_hidden=-(-8 * hidden // (3 * 64)) * 64 if ffn_hidden is None else ffn_hidden,
            seq_len=seq_len,
            norm="rmsnorm",
            activation="swiglu",
            position="rope",
            bias=False,
            tied_embeddings=False,
        )

    @classmethod
    def gpt2(
        cls, *, vocab_size: int, hidden: int, layers: int, heads: int, seq_len: int, dropout: float = 0.0
    ) -> TransformerConfig:
        """LayerNorm, learned positions, GELU, biases, ffn_hidden=4 hidden, tied embeddings."""
        return cls(
            vocab_size=vocab_size,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=heads,
            ffn_hidden=4 * hidden,
            seq_len=seq_len,
            norm="layernorm",
            activation="gelu",
            position="learned",
            bias=True,
            tied_embeddings=True,
            dropout=dropout,
        )


def check_sync(where: str, tp_sync: str, split_dim: int, checkpointing: Collection[str]) -> None:
    """Nothing that waits in the middle of a block, and nothing that repeats parts of one, goes with blocks in turns."""
    if tp_sync == "every_layer":
        return
    if split_dim != 1:
        raise ValueError(
            f"{where}: tp_sync={tp_sync!r} with split_dim={split_dim}, whose all-to-alls wait in the middle of an MLP; "
            "use split_dim=1"
        )
    if "selective" in checkpointing:
        raise ValueError(
            f"{where}: tp_sync={tp_sync!r} with checkpointing='selective', which would repeat transfers without their "
            "GEMMs; use 'full' or 'none'"
        )


def check_tensor_parallel(config: TransformerConfig, tp_size: int) -> None:
    """ValueError with the numbers where the model cannot be split over `tp_size` ranks; starts nothing."""
    where = "TransformerConfig"
    check_vocab(where, "vocab_size", config.vocab_size, tp_size)
    check_heads_over_ranks(where, config.heads, config.kv_heads, tp_size)
    check_mlp(where, config.hidden, config.ffn_hidden, config.split_dim, tp_size)


class LayerMatrices(NamedTuple):
    """Elements of the weights of each of a layer's four GEMMs; Q, K and V, or gate and up, are one."""

    qkv: int
    out: int
    up: int
    down: int


def layer_matrices(config: TransformerConfig) -> LayerMatrices:
    """Those of the whole layer, which tensor-parallel ranks share."""
    hidden = config.hidden
    mlp = hidden * config.ffn_hidden
    return LayerMatrices(
        qkv=hidden * (hidden + 2 * config.kv_heads * config.head_dim),
        out=hidden * hidden,
        up=mlp * (2 if config.activation == "swiglu" else 1),
        down=mlp,
    )


@dataclass(frozen=True)
class FlopsPerToken:
    """Floating-point operations per token, forward and backward together, of each part of the model."""

    embedding: float
    layer: float
    head: float


def layer_flops(config: TransformerConfig) -> FlopsPerToken:
    """What balances pipeline stages: 6 per weight of a GEMM, and attention to half the sequence on average.

    The embedding is a look-up without a GEMM and counts nothing. Recomputation by checkpointing is not
    counted.
    """
    attention = 6 * config.seq_len * config.hidden
    return FlopsPerToken(
        embedding=0.0,
        layer=6.0 * sum(layer_matrices(config)) + attention,
        head=6.0 * config.hidden * config.vocab_size,
    )


def flops_per_token(config: TransformerConfig) -> float:
    """Forward and backward FLOPs per token of the whole model (recomputation is not counted)."""
    flops = layer_flops(config)
    return flops.embedding + config.layers * flops.layer + flops.head


def num_parameters(config: TransformerConfig) -> int:
    """Parameters of the whole model, a tied matrix counted once."""
    norm = config.hidden * (2 if config.norm == "layernorm" else 1)
    inner_outputs = 2 if config.activation == "swiglu" else 1
    kv_features = config.kv_heads * config.head_dim
    biases = 3 * config.hidden + 2 * kv_features + inner_outputs * config.ffn_hidden
    layer = sum(layer_matrices(config)) + 2 * norm + (biases if config.bias else 0)
    table = config.vocab_size * config.hidden
    positions = config.seq_len * config.hidden if config.position == "learned" else 0
    return config.layers * layer + norm + positions + table * (1 if config.tied_embeddings else 2)
