"""Each layer on real ranks gives what plain torch gives on the whole: results and every gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import run_ranks
from nn_helpers import (
    check_layer,
    linear,
    plain_attention,
    plain_mlp,
    plain_norm,
    random_like,
    tensor_parallel,
)
from torch import Tensor, nn

from fusedcomm.nn import (
    MLP,
    Attention,
    ColumnParallelLinear,
    LayerNorm,
    LearnedPositions,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    rope_table,
)

WORLDS = [1, 2, 3, 4]


def shapes_of(module: str, *, bias: bool, **features: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights [N, K] and biases [N] of linear maps."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in features.items():
        prefix = f"{module}.{name}." if module else f"{name}."
        found[f"{prefix}weight"] = shape
        if bias:
            found[f"{prefix}bias"] = shape[:1]
    return found


# Linear layers.


def build_column(tp, out_features, bias):
    return ColumnParallelLinear(8, out_features, tp=tp, bias=bias)


def build_row(tp, out_features, bias):
    return RowParallelLinear(24, out_features, tp=tp, bias=bias)


def named_linears(params, x, names):
    return [linear(params, name, x) for name in names]


def one_linear(params, x):
    return F.linear(x, params["weight"], params.get("bias"))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("bias", [True, False])
def test_column_parallel_matches_plain(world, bias):
    full = random_like({"weight": (12, 8), "bias": (12,)} if bias else {"weight": (12, 8)}, 1)
    x = torch.randn(7, 2, 8, generator=torch.Generator().manual_seed(2))
    build = partial(build_column, out_features=12, bias=bias)
    check_layer(world, build, one_linear, full, x, splits=("rows", "features"))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_column_parallel_of_several_outputs_matches_plain(world):
    features = {"q": 16, "k": 8, "v": 4}
    full = random_like(shapes_of("", bias=True, **{name: (n, 8) for name, n in features.items()}), 3)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(4))
    build = partial(build_column, out_features=features, bias=True)
    reference = partial(named_linears, names=list(features))
    check_layer(world, build, reference, full, x, splits=("rows", "features"))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel_matches_plain(world, bias):
    full = random_like({"weight": (5, 24), "bias": (5,)} if bias else {"weight": (5, 24)}, 5)
    x = torch.randn(7, 3, 24, generator=torch.Generator().manual_seed(6))
    build = partial(build_row, out_features=5, bias=bias)
    check_layer(world, build, one_linear, full, x, splits=("features", "rows"))


def test_row_parallel_of_several_outputs_matches_plain():
    full = random_like({"0.weight": (5, 24), "1.weight": (3, 24)}, 7)
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(8))
    build = partial(build_row, out_features=[5, 3], bias=False)
    check_layer(2, build, partial(named_linears, names=["0", "1"]), full, x, splits=("features", "rows"))


def test_linear_layers_take_sizes_of_their_own():
    full = random_like({"weight": (12, 8)}, 9)
    x = torch.randn(7, 2, 8, generator=torch.Generator().manual_seed(10))
    build = partial(build_column, out_features=12, bias=False)
    check_layer(3, build, one_linear, full, x, splits=("rows", "features"), sizes=(1, 0, 6))
    full = random_like({"weight": (5, 24), "bias": (5,)}, 11)
    x = torch.randn(7, 3, 24, generator=torch.Generator().manual_seed(12))
    build = partial(build_row, out_features=5, bias=True)
    check_layer(3, build, one_linear, full, x, splits=("features", "rows"), sizes=(5, 2, 0))


def draw_as_torch(rank, world):
    torch.manual_seed(5)
    column = ColumnParallelLinear(6, 8, tp=tensor_parallel())
    row = RowParallelLinear(6, 4, tp=tensor_parallel(), bias=False)
    return column.weight.detach(), column.bias.detach(), row.weight.detach()


def test_linear_layers_start_as_the_shards_of_plain_ones():
    results = run_ranks(2, draw_as_torch)
    torch.manual_seed(5)
    column = torch.empty(8, 6)
    nn.init.kaiming_uniform_(column, a=5**0.5)
    row = torch.empty(4, 6)
    nn.init.kaiming_uniform_(row, a=5**0.5)
    assert torch.equal(torch.cat([r[0] for r in results]), column)
    assert torch.equal(torch.cat([r[2] for r in results], 1), row)
    assert all(not r[1].any() for r in results)


# Norms.


def build_norm(tp, dtype, kind):
    return kind(6, tp=tp, eps=1e-5, dtype=dtype)


def norm_reference(params, x, kind):
    return plain_norm({f"norm.{name}": value for name, value in params.items()}, "norm", x, kind, 1e-5)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_matches_plain(world, kind, dtype):
    full = random_like({"weight": (6,)} if kind == "rmsnorm" else {"weight": (6,), "bias": (6,)}, 13)
    x = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(14)) * 3 + 1
    build = partial(build_norm, dtype=dtype, kind=RMSNorm if kind == "rmsnorm" else LayerNorm)
    check_layer(world, build, partial(norm_reference, kind=kind), full, x, dtype=dtype, takes_sizes=False)


# Embeddings.


def build_embedding(tp, vocab_size):
    return VocabParallelEmbedding(vocab_size, 5, tp=tp)


def embedding_reference(params, tokens):
    return F.embedding(tokens, params["weight"])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seq_len", [7, 2])
def test_embedding_matches_plain(world, seq_len):
    full = random_like({"weight": (12, 5)}, 15)
    tokens = torch.randint(0, 12, (seq_len, 3), generator=torch.Generator().manual_seed(16))
    build = partial(build_embedding, vocab_size=12)
    check_layer(world, build, embedding_reference, full, tokens, splits=("whole", "rows"))


def build_positions(tp):
    return LearnedPositions(9, 5, tp=tp)


def positions_reference(params, x):
    return x + params["weight"][: len(x), None]


@pytest.mark.parametrize("world", [1, 3, 4])
def test_positions_match_plain(world):
    full = random_like({"weight": (9, 5)}, 17)
    x = torch.randn(5, 2, 5, generator=torch.Generator().manual_seed(18))
    check_layer(world, build_positions, positions_reference, full, x)


# MLP.


def build_mlp(tp, dtype, ffn_hidden, activation, split_dim, bias):
    return MLP(12, ffn_hidden, tp=tp, activation=activation, split_dim=split_dim, bias=bias, dtype=dtype)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("split_dim", [0, 1])
def test_mlp_matches_plain(world, activation, split_dim):
    # Row-parallel first is there for inner features that do not divide.
    ffn_hidden = 24 if split_dim == 1 else 25
    bias = activation == "gelu"
    if activation == "swiglu":
        shapes = shapes_of("gate_up", bias=bias, gate=(ffn_hidden, 12), up=(ffn_hidden, 12))
    else:
        shapes = shapes_of("", bias=bias, up=(ffn_hidden, 12))
    full = random_like(shapes | shapes_of("", bias=bias, down=(12, ffn_hidden)), 19)
    x = torch.randn(7, 2, 12, generator=torch.Generator().manual_seed(20))
    build = partial(
        build_mlp,
        dtype=torch.float32,
        ffn_hidden=ffn_hidden,
        activation=activation,
        split_dim=split_dim,
        bias=bias,
    )
    check_layer(world, build, lambda p, x: plain_mlp(p, "", x, activation), full, x)


def test_mlp_is_as_accurate_as_plain_in_bf16():
    full = random_like(shapes_of("gate_up", bias=False, gate=(24, 12), up=(24, 12)), 21)
    full |= random_like(shapes_of("", bias=False, down=(12, 24)), 22)
    x = torch.randn(7, 2, 12, generator=torch.Generator().manual_seed(23))
    for split_dim in (0, 1):
        build = partial(
            build_mlp,
            dtype=torch.bfloat16,
            ffn_hidden=24,
            activation="swiglu",
            split_dim=split_dim,
            bias=False,
        )
        check_layer(2, build, swiglu_reference, full, x, dtype=torch.bfloat16)


def swiglu_reference(params, x):
    return plain_mlp(params, "", x, "swiglu")


# Attention.


class Roped(nn.Module):
    """Attention that makes its own table of rotations."""

    def __init__(self, tp, heads, kv_heads, theta, bias, dtype):
        super().__init__()
        self.inner = Attention(48, heads, kv_heads, tp=tp, bias=bias, dtype=dtype)
        self.theta = theta

    def forward(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        table = None
        if self.theta is not None:
            table = rope_table(sum(sizes), self.inner.head_dim, self.theta, x.device)
        return self.inner(x, sizes, table)


def build_attention(tp, dtype, heads, kv_heads, theta, bias):
    return Roped(tp, heads, kv_heads, theta, bias, dtype)


@pytest.mark.parametrize(
    ("world", "heads", "kv_heads", "seq_len", "theta", "dtype"),
    [
        (1, 4, 2, 7, 100.0, torch.float32),
        (2, 4, 2, 7, 100.0, torch.float32),
        (2, 4, 4, 6, None, torch.float32),
        (3, 6, 3, 7, 100.0, torch.float32),
        (4, 8, 4, 9, 100.0, torch.float32),
        (4, 4, 4, 2, 100.0, torch.float32),
        (2, 4, 2, 7, 100.0, torch.bfloat16),
    ],
)
def test_attention_matches_plain(world, heads, kv_heads, seq_len, theta, dtype):
    bias = theta is None
    kv_features = 48 // heads * kv_heads
    shapes = shapes_of("inner.qkv", bias=bias, q=(48, 48), k=(kv_features, 48), v=(kv_features, 48))
    full = random_like(shapes | shapes_of("inner", bias=bias, out=(48, 48)), 24)
    x = torch.randn(seq_len, 2, 48, generator=torch.Generator().manual_seed(25)) * 0.5
    build = partial(build_attention, dtype=dtype, heads=heads, kv_heads=kv_heads, theta=theta, bias=bias)

    def reference(params, x):
        return plain_attention(params, "inner.", x, heads=heads, kv_heads=kv_heads, theta=theta)

    check_layer(world, build, reference, full, x, dtype=dtype)


# Wrong use.


def raise_by_name(rank, world, name):
    tp = tensor_parallel()
    tokens = torch.tensor([[0, 3], [12, 1]])
    calls = {
        "column": lambda: ColumnParallelLinear(8, {"q": 4, "k": 5}, tp=tp),
        "row": lambda: RowParallelLinear(9, 4, tp=tp),
        "vocabulary": lambda: VocabParallelEmbedding(257, 4, tp=tp),
        "heads": lambda: Attention(48, 3, 3, tp=tp),
        "kv_heads": lambda: Attention(48, 4, 1, tp=tp),
        "hidden over heads": lambda: Attention(50, 4, 4, tp=tp),
        "heads over kv_heads": lambda: Attention(48, 4, 3, tp=tp),
        "ffn": lambda: MLP(8, 9, tp=tp),
        "mlp hidden": lambda: MLP(9, 8, tp=tp, split_dim=0),
        "mlp activation": lambda: MLP(8, 8, tp=tp, split_dim=0, activation="relu"),
        "mlp split_dim": lambda: MLP(8, 8, tp=tp, split_dim=2),
        "token": lambda: VocabParallelEmbedding(12, 4, tp=tp)(tokens),
        "token dtype": lambda: VocabParallelEmbedding(12, 4, tp=tp)(tokens.float()),
        "positions": lambda: LearnedPositions(3, 4, tp=tp)(torch.zeros(2, 1, 4), (2, 2)),
    }
    try:
        calls[name]()
    except ValueError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "column",
            "ColumnParallelLinear: out_features[k]=5 over tp=2 ranks leaves 1; it must divide; "
            "choose another width or tp",
        ),
        (
            "row",
            "RowParallelLinear: in_features=9 over tp=2 ranks leaves 1; it must divide; choose another width or tp",
        ),
        (
            "vocabulary",
            "VocabParallelEmbedding: num_embeddings=257 over tp=2 ranks leaves 1; it must divide; "
            "pad the vocabulary to 258",
        ),
        (
            "heads",
            "Attention: heads=3 over tp=2 ranks leaves 1; it must divide; "
            "every rank computes whole heads: choose another tp",
        ),
        (
            "kv_heads",
            "Attention: kv_heads=1 over tp=2 ranks leaves 1; it must divide; "
            "every rank holds whole key and value heads: lower tp or raise kv_heads",
        ),
        (
            "hidden over heads",
            "Attention: hidden=50 over heads=4 leaves 2; every head has the same width: choose a multiple of heads",
        ),
        (
            "heads over kv_heads",
            "Attention: heads=4 over kv_heads=3 leaves 1; "
            "each key and value head serves the same number of query heads: choose a divisor of heads",
        ),
        (
            "ffn",
            "MLP: ffn_hidden=9 over tp=2 ranks leaves 1; it must divide; "
            "choose another ffn_hidden or tp, or split_dim=0",
        ),
        (
            "mlp hidden",
            "MLP: hidden=9 over tp=2 ranks leaves 1; it must divide; "
            "split_dim=0 splits the hidden features: choose another tp",
        ),
        ("mlp activation", "MLP: activation='relu' is unknown; use 'gelu', 'silu' or 'swiglu'"),
        ("mlp split_dim", "MLP: split_dim=2 is unknown; use 1 (inner features) or 0 (outer ones)"),
        (
            "token",
            "VocabParallelEmbedding: token 12 at [1, 0]; it must be in 0..11; "
            "check the tokenizer against the vocabulary",
        ),
        (
            "token dtype",
            "VocabParallelEmbedding: tokens have dtype torch.float32; they must be int64 or int32",
        ),
        (
            "positions",
            "LearnedPositions: the sequence has 4 positions but the table 3; "
            "shorten the sequence or build the model with a larger seq_len",
        ),
    ],
)
def test_layers_reject_what_does_not_fit(name, message):
    assert run_ranks(2, raise_by_name, name) == [message] * 2
