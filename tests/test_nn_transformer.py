"""The Transformer, on any number of ranks and cut into stages, is the model that plain torch computes."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_as_accurate, run_ranks
from nn_helpers import assemble, load_full, plain_transformer, shards, tensor_parallel
from torch.utils.flop_counter import FlopCounterMode

from fusedcomm.comm.record import recording
from fusedcomm.nn import (
    Transformer,
    TransformerConfig,
    flops_per_token,
    layer_flops,
    num_parameters,
    vocab_parallel_cross_entropy,
)

LLAMA = TransformerConfig.llama(vocab_size=24, hidden=48, layers=2, heads=12, seq_len=7, kv_heads=12, ffn_hidden=36)
GPT2 = TransformerConfig.gpt2(vocab_size=24, hidden=24, layers=2, heads=12, seq_len=7)
GROUPED = dataclasses.replace(LLAMA, kv_heads=4)
MIXED = dataclasses.replace(
    LLAMA, norm="layernorm", activation="gelu", bias=True, tied_embeddings=True, kv_heads=6, layers=1
)
OPS = ("all_gather_matmul", "matmul_reduce_scatter")
ROW_FIRST = dataclasses.replace(GROUPED, split_dim=0, ffn_hidden=31)


def batch(config, seq_len=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    size = (2, seq_len or config.seq_len)
    tokens = torch.randint(0, config.vocab_size, size, generator=generator)
    labels = torch.randint(0, config.vocab_size, size, generator=generator)
    labels[1, 0] = -100
    return tokens, labels


def stages_of(config, cuts, **options):
    """Transformers for the layers between `cuts`; run one after the other they are the model."""
    bounds = [0, *cuts, config.layers]
    return [
        Transformer(config, layers=range(a, b), first=index == 0, last=index == len(cuts), seed=3, **options)
        for index, (a, b) in enumerate(pairwise(bounds))
    ]


def train_step(stages, tokens, labels):
    """Logits and losses per token; the gradients of the mean loss are left in the parameters."""
    ids = torch.arange(len(tokens)) + 5
    x = tokens
    for stage in stages:
        x = stage(x, sample_ids=ids, step=torch.full_like(ids, 9))
    losses = vocab_parallel_cross_entropy(x, labels.t(), group=stages[0].tp.group)
    (losses.sum() / (labels != -100).sum()).backward()
    return x.detach(), losses.detach()


def rank_step(rank, world, config, tokens, labels, dtype, cuts, full):
    stages = stages_of(config, cuts, tp=tensor_parallel(), dtype=dtype)
    if full is not None:
        for stage in stages:
            load_full(stage, full)
    logits, losses = train_step(stages, tokens, labels)
    params, grads = {}, {}
    for stage in stages:
        params |= shards(stage, "param")
        grads |= shards(stage, "grad")
    return logits, losses, params, grads


def on_ranks(world, config, tokens, labels, *, dtype=torch.float32, cuts=(), full=None):
    """`(logits, losses, parameters, gradients)` of the whole."""
    results = run_ranks(world, rank_step, config, tokens, labels, dtype, cuts, full)
    assert all(torch.equal(r[1], results[0][1]) for r in results)
    logits = torch.cat([r[0] for r in results], -1)
    return logits, results[0][1], assemble([r[2] for r in results]), assemble([r[3] for r in results])


def in_plain_torch(params, config, tokens, labels, dtype):
    params = {name: value.to(dtype).requires_grad_() for name, value in params.items()}
    logits = plain_transformer(params, config, tokens)
    wide = logits if dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide.flatten(0, 1), labels.t().flatten(), reduction="none")
    (losses.sum() / (labels != -100).sum()).backward()
    return logits.detach(), losses.detach().view(labels.t().shape), {name: param.grad for name, param in params.items()}


def check_against_plain(world, config, tokens, labels, dtype=torch.float32, cuts=()):
    logits, losses, params, grads = on_ranks(world, config, tokens, labels, dtype=dtype, cuts=cuts)
    exact = in_plain_torch(params, config, tokens, labels, torch.float64)
    plain = in_plain_torch(params, config, tokens, labels, dtype)
    assert_as_accurate(logits, exact[0], plain[0], name="logits")
    assert_as_accurate(losses, exact[1], plain[1], name="losses")
    assert grads.keys() == exact[2].keys()
    for name, grad in grads.items():
        assert_as_accurate(grad, exact[2][name], plain[2][name], name=name)


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (1, GROUPED),
        (1, GPT2),
        (2, GROUPED),
        (2, GPT2),
        (2, MIXED),
        (3, LLAMA),
        (3, GPT2),
        (3, MIXED),
        (4, GROUPED),
        (4, GPT2),
        (1, ROW_FIRST),
        (2, ROW_FIRST),
        (4, ROW_FIRST),
    ],
)
def test_transformer_matches_plain(world, config):
    check_against_plain(world, config, *batch(config))


@pytest.mark.parametrize("seq_len", [1, 2, 5, 8])
def test_transformer_takes_other_sequence_lengths(seq_len):
    # Fewer positions than ranks, and a last rank with one or none.
    check_against_plain(4, GROUPED, *batch(GROUPED, seq_len))


@pytest.mark.parametrize("config", [GROUPED, GPT2, ROW_FIRST])
def test_transformer_is_as_accurate_as_plain_in_bf16(config):
    check_against_plain(2, config, *batch(config), dtype=torch.bfloat16)


@pytest.mark.parametrize("config", [LLAMA, GPT2])
def test_initial_values_do_not_depend_on_layout(config):
    tokens, labels = batch(config)
    _, _, params, _ = on_ranks(1, config, tokens, labels)
    layouts = [(2, config, ()), (3, config, ()), (2, config, (1,))]
    if config.activation == "swiglu":
        layouts.append((4, dataclasses.replace(config, split_dim=0), ()))
    for world, laid_out, cuts in layouts:
        _, _, others, _ = on_ranks(world, laid_out, tokens, labels, cuts=cuts)
        if cuts and config.tied_embeddings:
            assert torch.equal(others.pop("output.weight"), params["embedding.weight"])
        assert others.keys() == params.keys()
        for name, value in params.items():
            assert torch.equal(others[name], value), name


def test_initial_values_have_the_documented_spread():
    config = dataclasses.replace(LLAMA, hidden=96, ffn_hidden=120, vocab_size=120)
    _, _, params, _ = on_ranks(1, config, *batch(config))
    assert len({value.flatten()[0].item() for value in params.values() if value.dim() == 2}) == 16
    for name, value in params.items():
        if value.dim() == 1:
            assert torch.equal(value, torch.ones_like(value))
            continue
        expected = 1 / math.sqrt(3 * value.shape[1])
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            expected /= 2
        assert abs(value.std().item() / expected - 1) < 5 / math.sqrt(2 * value.numel()), name


@pytest.mark.parametrize("config", [GROUPED, GPT2])
@pytest.mark.parametrize("cuts", [(1,), (0, 2), (1, 2)])
def test_stages_are_the_whole_model(config, cuts):
    config = dataclasses.replace(config, dropout=0.2, layers=2)
    tokens, labels = batch(config)
    whole = on_ranks(2, config, tokens, labels)
    split = on_ranks(2, config, tokens, labels, cuts=cuts)
    assert torch.equal(whole[0], split[0])
    grads = split[3]
    if config.tied_embeddings:
        grads["embedding.weight"] = grads["embedding.weight"] + grads.pop("output.weight")
    for name, grad in whole[3].items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-6, atol=1e-8, msg=name)


def with_dropout(config, **changes):
    return dataclasses.replace(config, dropout=0.2, **changes)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_dropout_is_the_same_for_every_tp(world):
    config = with_dropout(LLAMA)
    tokens, labels = batch(config)
    logits, _, params, grads = on_ranks(world, config, tokens, labels)
    # One rank in fp64 is the reference; that the dropout matters is seen from the model without.
    exact = on_ranks(1, config, tokens, labels, dtype=torch.float64, full=params)
    plain = on_ranks(1, config, tokens, labels)
    without = on_ranks(1, LLAMA, tokens, labels)
    assert_as_accurate(logits, exact[0], plain[0], name="logits")
    assert (without[0] - logits).norm() > 0.1 * logits.norm()
    for name, grad in grads.items():
        assert_as_accurate(grad, exact[3][name], plain[3][name], name=name)


def checkpointed(rank, world, config, tokens, labels, defer):
    deferred = []

    def keep(weight, gradient):
        deferred.append((weight, gradient.kept()))

    tp = tensor_parallel(defer_wgrad=keep if defer else None)
    model = Transformer(config, tp=tp, seed=3)
    with recording() as record:
        train_step([model], tokens, labels)
    names = {param: name for name, param in model.named_parameters()}
    for weight, gradient in deferred:
        weight.grad = gradient.compute() if weight.grad is None else weight.grad + gradient.compute()
    return shards(model, "grad"), dict(record.paths), sorted(names[weight] for weight, _ in deferred)


@pytest.mark.parametrize("config", [with_dropout(GROUPED), with_dropout(GPT2), with_dropout(ROW_FIRST)])
@pytest.mark.parametrize(("world", "defer"), [(1, True), (2, False), (2, True)])
def test_checkpointing_changes_nothing(config, world, defer):
    tokens, labels = batch(config)
    grads = {}
    for mode in ("none", "full", "selective"):
        results = run_ranks(world, checkpointed, dataclasses.replace(config, checkpointing=mode), tokens, labels, defer)
        grads[mode] = assemble([r[0] for r in results])
    for mode in ("full", "selective"):
        for name, grad in grads["none"].items():
            assert torch.equal(grads[mode][name], grad), f"{mode}: {name}"


def test_deferred_weight_gradients_come_once():
    tokens, labels = batch(GPT2)
    for mode in ("none", "full", "selective"):
        config = dataclasses.replace(GPT2, checkpointing=mode)
        plain = assemble([r[0] for r in run_ranks(2, checkpointed, config, tokens, labels, False)])
        results = run_ranks(2, checkpointed, config, tokens, labels, True)
        expected = [name for name, grad in plain.items() if grad.dim() == 2 and name.startswith("layers")]
        # The output layer's is deferred too; the embedding, which it is tied to, adds its own part at once.
        assert results[0][2] == sorted([*expected, "embedding.weight"])
        for name, grad in assemble([r[0] for r in results]).items():
            torch.testing.assert_close(grad, plain[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("mode", "repeated"),
    [("none", 0), ("full", 4), ("selective", 0), (("full", "none"), 2), (("selective", "full"), 2)],
)
@pytest.mark.parametrize("defer", [False, True])
def test_checkpointing_runs_again_what_it_says(mode, repeated, defer):
    # Two layers with two gathering and two scattering GEMMs each, and the output layer outside of them.
    config = dataclasses.replace(GROUPED, checkpointing=mode)
    for _, paths, _ in run_ranks(2, checkpointed, config, *batch(config), defer):
        runs = {op: sum(n for path, n in paths.items() if path.startswith(f"{op}:")) for op in OPS}
        assert runs == {"all_gather_matmul": 5 + repeated, "matmul_reduce_scatter": 4 + repeated}


def test_model_without_gradients_or_training_needs_no_samples():
    results = run_ranks(2, evaluate, with_dropout(GROUPED, checkpointing="selective"), *batch(GROUPED))
    assert all(result == results[0] for result in results)


def evaluate(rank, world, config, tokens, labels):
    model = Transformer(config, tp=tensor_parallel(), seed=3)
    model.eval()
    with torch.no_grad():
        logits = model(tokens)
    return vocab_parallel_cross_entropy(logits, labels.t(), group=dist.group.WORLD).tolist()


def train(rank, world, config, tokens, labels, full):
    model = Transformer(config, tp=tensor_parallel(), seed=3, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(train_step([model], tokens, labels)[1].mean().item())
        optimizer.step()
    return losses


def test_model_trains_under_a_plain_optimizer():
    config = with_dropout(GPT2)
    tokens, labels = batch(config)
    alone = run_ranks(1, train, config, tokens, labels, None)[0]
    assert alone[-1] < alone[0] - 0.5
    for losses in run_ranks(3, train, config, tokens, labels, None):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-6, atol=0)


def tie_again(rank, world):
    model = Transformer(GPT2, tp=tensor_parallel(), device="meta")
    model.to_empty(device="cpu")
    model.reset_parameters()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    same = [model.output.weight is model.embedding.weight]
    model.load_state_dict(state, assign=True)
    same.append(model.output.weight is model.embedding.weight)
    reference = Transformer(GPT2, tp=tensor_parallel())
    equal = all(torch.equal(value, state[name]) for name, value in reference.state_dict().items())
    whole = Transformer(GPT2, tp=tensor_parallel()).tied
    last = Transformer(GPT2, tp=tensor_parallel(), layers=[1], first=False).tied
    return same, equal, whole, last, sorted(name for name, _ in model.named_parameters() if "layers" not in name)


def test_tied_embeddings_stay_tied():
    names = ["embedding.weight", "norm.bias", "norm.weight", "position.weight"]
    for result in run_ranks(2, tie_again):
        assert result == ([True, True], True, None, ("embedding.weight", "output.weight"), names)


def count_flops(rank, world, config):
    model = Transformer(config, tp=tensor_parallel())
    tokens, labels = batch(config)
    with FlopCounterMode(display=False) as counter:
        train_step([model], tokens, labels)
    by_op = counter.get_flop_counts()["Global"]
    gemms = sum(count for op, count in by_op.items() if "mm" in str(op))
    return sum(p.numel() for p in model.parameters()), gemms / tokens.numel()


@pytest.mark.parametrize("config", [LLAMA, GROUPED, GPT2, MIXED, ROW_FIRST])
def test_counts_of_parameters_and_flops(config):
    parameters, gemm_flops = run_ranks(1, count_flops, config)[0]
    assert num_parameters(config) == parameters
    # torch counts the GEMMs; the causal half of the attention is 2 (queries x keys, weights x values) * 2 * S / 2 * H,
    # three times for forward and backward.
    attention = 3 * 2 * 2 * config.seq_len / 2 * config.hidden
    assert flops_per_token(config) - config.layers * attention == gemm_flops
    parts = layer_flops(config)
    assert parts.embedding + config.layers * parts.layer + parts.head == flops_per_token(config)


def raise_by_name(rank, world, name):
    tp = tensor_parallel()
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    calls = {
        "layers": lambda: Transformer(LLAMA, tp=tp, layers=[1, 2]),
        "vocab": lambda: Transformer(dataclasses.replace(LLAMA, vocab_size=255), tp=tp),
        "kv_heads": lambda: Transformer(dataclasses.replace(LLAMA, kv_heads=1), tp=tp),
        "tokens": lambda: Transformer(LLAMA, tp=tp)(tokens[0]),
        "hidden": lambda: Transformer(LLAMA, tp=tp, first=False)(torch.zeros(3 + rank, 2, 48)),
        "samples": lambda: Transformer(with_dropout(LLAMA), tp=tp)(tokens),
    }
    try:
        calls[name]()
    except ValueError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("layers", ["Transformer: layers=[1, 2]; a model of 2 has 0..1"] * 2),
        (
            "vocab",
            ["TransformerConfig: vocab_size=255 over tp=2 ranks leaves 1; it must divide; pad the vocabulary to 256"]
            * 2,
        ),
        (
            "kv_heads",
            [
                "TransformerConfig: kv_heads=1 over tp=2 ranks leaves 1; it must divide; "
                "every rank holds whole key and value heads: lower tp or raise kv_heads"
            ]
            * 2,
        ),
        ("tokens", ["Transformer: the first stage's input has shape [7]; it must be tokens [B, S]"] * 2),
        (
            "hidden",
            [
                "Transformer: hidden states have shape [3, 2, 48]; of seq_len=7 positions, "
                "tp rank 0 must get [4, B, 48]",
                "Transformer: hidden states have shape [4, 2, 48]; of seq_len=7 positions, "
                "tp rank 1 must get [3, B, 48]",
            ],
        ),
        (
            "samples",
            [
                "Transformer: dropout=0.2 in training needs sample_ids and step, "
                "which decide what is dropped: pass both, or call eval()"
            ]
            * 2,
        ),
    ],
)
def test_transformer_rejects_what_does_not_fit(name, messages):
    assert run_ranks(2, raise_by_name, name) == messages
