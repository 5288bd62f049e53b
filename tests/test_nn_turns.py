"""tp_sync: halves in turns are the halves one after the other; the ladder is the model that plain torch computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import run_ranks
from nn_helpers import tensor_parallel
from test_nn_transformer import GPT2, GROUPED, LLAMA, batch, check_against_plain, on_ranks, with_dropout
from torch.autograd import Function

from fusedcomm.comm.record import recording
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.nn import Transformer
from fusedcomm.nn.turns import in_turns, ladder, residual_steps


class Note(Function):
    """The identity, which notes when it runs and when its gradient does."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        log.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.name)
        return grad, None, None


def noting_block(log, name):
    """Steps that note: input leaves and comes, first GEMM, second GEMM (sums leave), sums come."""

    def steps(x):
        x = Note.apply(x, log, f"{name} input")
        yield
        x = Note.apply(x, log, f"{name} multiply")
        yield
        x = Note.apply(x, log, f"{name} sum")
        return lambda: Note.apply(2 * x, log, f"{name} add")

    return steps


def test_halves_hide_what_travels_behind_each_other_in_both_directions():
    log = []
    xs = [torch.zeros(2, requires_grad=True) for _ in "AB"]
    halves = (residual_steps([noting_block(log, f"{half}{i}") for i in (0, 1)], x) for half, x in zip("AB", xs))
    ys = in_turns(*halves)
    forward = list(log)
    log.clear()
    torch.cat(ys).sum().backward()
    assert log == forward[::-1], "backward is the mirror image"
    # Between an input and its multiplying, and between a sum and its adding, the other half multiplies. At the ends,
    # where one half has nothing to compute, both inputs travel one after the other, and both sums.
    assert forward == [
        *("A0 input", "B0 input", "A0 multiply", "A0 sum", "B0 multiply", "A0 add"),
        *("A1 input", "B0 sum", "A1 multiply", "B0 add", "B1 input", "A1 sum", "B1 multiply"),
        *("B1 sum", "A1 add", "B1 add"),
    ]
    assert [x.grad.tolist() for x in xs] == [[9.0, 9.0]] * 2


def test_ladder_hides_what_travels_behind_the_next_block_in_both_directions():
    log = []
    x = torch.ones(2, requires_grad=True)
    stream, last = ladder([noting_block(log, str(i)) for i in range(4)], x, None)
    forward = list(log)
    log.clear()
    (stream + last).sum().backward()
    assert log == forward[::-1]
    # Between an input and its multiplying, and between a sum and its adding, another block multiplies.
    assert forward == [
        *("0 input", "0 multiply", "1 input", "0 sum", "1 multiply", "0 add"),
        *("2 input", "1 sum", "2 multiply", "1 add", "3 input", "2 sum", "3 multiply", "2 add"),
        *("3 sum", "3 add"),
    ]
    # Blocks read x, x, x + 2 x, and that plus 2 x again: outputs 2, 2, 6, 10.
    assert (stream.tolist(), last.tolist()) == ([11.0] * 2, [10.0] * 2)
    again = ladder([noting_block(log, str(i)) for i in range(2)], x.detach(), None)
    again = ladder([noting_block(log, str(i)) for i in range(2, 4)], *again)
    assert torch.equal(again[0], stream)
    assert torch.equal(again[1], last)


def run_halves(rank, world, config, batch_size, method, save, dtype):
    """A stage of layers in turns, and the same with tp_sync every_layer on one half after the other."""
    own = chunk_sizes(config.seq_len, world)[rank]
    generator = torch.Generator().manual_seed(rank)
    shape = (own, batch_size, config.hidden)
    x_values, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    ids, step = torch.arange(batch_size) + 5, torch.full((batch_size,), 9)
    cut = chunk_sizes(batch_size, 2)
    found = []
    for sync in ("interleave", "every_layer"):
        tp = tensor_parallel(method=method, save=save)
        model = Transformer(dataclasses.replace(config, tp_sync=sync), tp=tp, first=False, last=False, dtype=dtype)
        x = x_values.clone().requires_grad_()
        if sync == "interleave":
            with recording() as record:
                y = model(x, sample_ids=ids, step=step)
        else:
            halves = zip(x.split(cut, 1), ids.split(cut), step.split(cut))
            y = torch.cat([model(half, sample_ids=i, step=s) for half, i, s in halves], 1)
        y.backward(dy)
        found.append([y.detach(), x.grad, *(param.grad for param in model.parameters())])
    return [torch.equal(a, b) for a, b in zip(*found)], dict(record.paths)


@pytest.mark.parametrize(
    ("world", "config", "batch_size", "method", "save", "dtype"),
    [
        (1, with_dropout(GROUPED), 3, "chunked", "shard", torch.float32),
        (2, with_dropout(GROUPED), 5, "chunked", "shard", torch.float32),
        (2, with_dropout(GROUPED, checkpointing="full"), 4, "chunked", "shard", torch.float32),
        (2, GPT2, 2, "serial", "gathered", torch.bfloat16),
        (3, with_dropout(GPT2, checkpointing="full"), 2, "chunked", "gathered", torch.float32),
        (4, GROUPED, 3, "chunked", "shard", torch.bfloat16),
    ],
)
def test_halves_in_turns_are_the_halves_one_after_the_other_to_the_bit(world, config, batch_size, method, save, dtype):
    for equal, paths in run_ranks(world, run_halves, config, batch_size, method, save, dtype):
        assert all(equal), equal
        ran = method if world > 1 else "local"
        # Two layers with two of each op, for both halves.
        assert paths == {f"all_gather_matmul:{ran}": 8, f"matmul_reduce_scatter:{ran}": 8}


@pytest.mark.parametrize("sync", ["interleave", "ladder"])
@pytest.mark.parametrize(("world", "config"), [(1, GROUPED), (2, GROUPED), (2, GPT2), (3, LLAMA), (4, GPT2)])
def test_both_match_plain(world, config, sync):
    check_against_plain(world, dataclasses.replace(config, tp_sync=sync), *batch(config))


@pytest.mark.parametrize("cuts", [(), (1,)])
def test_ladder_is_as_accurate_as_plain_in_bf16(cuts):
    config = dataclasses.replace(GROUPED, tp_sync="ladder")
    check_against_plain(2, config, *batch(config), dtype=torch.bfloat16, cuts=cuts)


def test_ladder_is_another_model():
    tokens, labels = batch(GROUPED)
    usual, other = (
        on_ranks(1, dataclasses.replace(GROUPED, tp_sync=sync), tokens, labels)[0] for sync in ("every_layer", "ladder")
    )
    assert (usual - other).norm() > 0.01 * usual.norm()


@pytest.mark.parametrize("sync", ["interleave", "ladder"])
@pytest.mark.parametrize("cuts", [(1,), (0, 2)])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_stages_and_recomputation_change_nothing(sync, cuts, checkpointing):
    config = with_dropout(GROUPED, tp_sync=sync)
    tokens, labels = batch(config)
    whole = on_ranks(2, config, tokens, labels)
    split = on_ranks(2, dataclasses.replace(config, checkpointing=checkpointing), tokens, labels, cuts=cuts)
    assert torch.equal(whole[0], split[0])
    for name, grad in whole[3].items():
        torch.testing.assert_close(split[3][name], grad, rtol=1e-6, atol=1e-8, msg=name)


def run_evaluation(rank, world, config, tokens):
    model = Transformer(config, tp=tensor_parallel(), seed=3).eval()
    with torch.no_grad():
        return model(tokens)


@pytest.mark.parametrize("sync", ["interleave", "ladder"])
def test_evaluation_needs_no_gradients(sync):
    config = with_dropout(GROUPED, tp_sync=sync, checkpointing="full")
    logits = torch.cat(run_ranks(2, run_evaluation, config, batch(config)[0]), -1)
    alone = run_ranks(1, run_evaluation, config, batch(config)[0])[0]
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)


def run_too_small(rank, world):
    config = dataclasses.replace(GROUPED, tp_sync="interleave")
    messages = []
    for first, x in ((True, torch.zeros(1, 7, dtype=torch.int64)), (False, torch.zeros(4, 1, 48))):
        try:
            Transformer(config, tp=tensor_parallel(), first=first)(x)
        except ValueError as error:
            messages.append(str(error))
    ladder_config = dataclasses.replace(GROUPED, tp_sync="ladder")
    try:
        Transformer(ladder_config, tp=tensor_parallel(), first=False)(torch.zeros(4 - rank, 2, 48))
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_what_does_not_fit_is_refused():
    for messages in run_ranks(2, run_too_small):
        assert messages[0].startswith("Transformer: tp_sync='interleave' with B=1; it computes two halves")
        assert "B, 96]" in messages[-1], "the last block's output stands beside the hidden states"
