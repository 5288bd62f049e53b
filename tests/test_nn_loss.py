"""Cross entropy over a split vocabulary is cross entropy; wrong labels are refused before anything is sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_as_accurate, run_ranks

from fusedcomm.nn import loss, vocab_parallel_cross_entropy, vocab_parallel_hits


def rank_loss(rank, world, logits, targets, grad, rows_at_a_time):
    if rows_at_a_time is not None:
        loss._LOGITS_AT_A_TIME = rows_at_a_time * logits.shape[-1] // world
    local = logits.chunk(world, -1)[rank].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(local, targets, group=dist.group.WORLD)
    losses.backward(grad)
    loss._LOGITS_AT_A_TIME = 1 << 24
    return losses.detach(), local.grad


def plain_loss(logits, targets, grad, dtype):
    logits = logits.detach().to(dtype).requires_grad_()
    wide = logits if dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    losses.backward(grad.to(losses.dtype))
    return losses.detach(), logits.grad


def make_case(dtype, scale=1.0, vocab_size=24):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(5, 3, vocab_size, generator=generator) * scale).to(dtype)
    targets = torch.randint(0, vocab_size, (5, 3), generator=generator)
    targets[1, 2] = targets[4, 0] = -100
    return logits, targets, torch.rand(5, 3, generator=generator)


def check(world, logits, targets, grad, rows_at_a_time=None):
    results = run_ranks(world, rank_loss, logits, targets, grad, rows_at_a_time)
    losses = results[0][0]
    assert all(torch.equal(r[0], losses) for r in results)
    exact = plain_loss(logits, targets, grad, torch.float64)
    plain = plain_loss(logits, targets, grad, logits.dtype)
    assert losses.dtype == torch.float32
    assert_as_accurate(losses, exact[0], plain[0], name="losses")
    assert_as_accurate(torch.cat([r[1] for r in results], -1), exact[1], plain[1], name="gradient")
    assert not losses[targets == -100].any()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cross_entropy_matches_plain(world, dtype):
    check(world, *make_case(dtype))


def test_cross_entropy_survives_large_logits():
    check(3, *make_case(torch.float32, scale=1e4))


@pytest.mark.parametrize("rows_at_a_time", [1, 4, 15])
def test_cross_entropy_does_not_depend_on_blocks(rows_at_a_time):
    check(2, *make_case(torch.bfloat16), rows_at_a_time)


def test_cross_entropy_of_ignored_rows_alone_is_zero():
    logits, targets, grad = make_case(torch.float32)
    targets.fill_(-100)
    for losses, d_logits in run_ranks(2, rank_loss, logits, targets, grad, None):
        assert not losses.any()
        assert not d_logits.any()


def test_cross_entropy_of_nothing_is_nothing():
    logits, targets, grad = torch.empty(0, 3, 8), torch.empty(0, 3, dtype=torch.int64), torch.empty(0, 3)
    for losses, d_logits in run_ranks(2, rank_loss, logits, targets, grad, None):
        assert losses.shape == (0, 3)
        assert d_logits.shape == (0, 3, 4)


def test_cross_entropy_passes_nan_on():
    logits, targets, grad = make_case(torch.float32)
    # On the last rank: the maximum over ranks must not hide it.
    logits[2, 1, -1] = float("nan")
    for losses, _ in run_ranks(3, rank_loss, logits, targets, grad, None):
        assert losses[2, 1].isnan()
        assert losses.isnan().sum() == 1


def rank_hits(rank, world, logits, targets):
    return vocab_parallel_hits(logits.chunk(world, -1)[rank], targets, group=dist.group.WORLD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hits_are_where_the_target_is_the_greatest(dtype):
    logits, targets, _ = make_case(dtype)
    targets = torch.where((torch.arange(15) % 2 == 0).view(5, 3), logits.float().argmax(-1), targets)
    targets[1, 2] = -100
    expected = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0] == logits.amax(-1)
    expected[1, 2] = False
    assert 7 <= expected.sum() < 15
    for hits in run_ranks(3, rank_hits, logits, targets):
        assert torch.equal(hits, expected)


def refused(rank, world, targets, ignore_index):
    logits = torch.zeros(2, 2, 4)
    try:
        vocab_parallel_cross_entropy(logits, targets, group=dist.group.WORLD, ignore_index=ignore_index)
    except ValueError as error:
        message = str(error)
    else:
        return "nothing raised"
    # Nothing was sent, so that the ranks are still in step.
    count = torch.ones(1)
    dist.all_reduce(count)
    assert count.item() == world
    return message


@pytest.mark.parametrize(
    ("targets", "ignore_index", "message"),
    [
        (
            [[0, 1], [8, 2]],
            -100,
            "target 8 at [1, 0]; it must be in 0..7 or ignore_index=-100; check the tokenizer against the vocabulary",
        ),
        (
            [[0, -100], [3, 2]],
            -1,
            "target -100 at [0, 1]; it must be in 0..7 or ignore_index=-1; check the tokenizer against the vocabulary",
        ),
        (
            [0, 1, 2, 3],
            -100,
            "logits are [2, 2, 4] but targets [4]; targets must have the logits' shape without the last dimension",
        ),
    ],
)
def test_cross_entropy_rejects_bad_targets(targets, ignore_index, message):
    results = run_ranks(2, refused, torch.tensor(targets), ignore_index)
    assert results == [f"vocab_parallel_cross_entropy: {message}"] * 2
