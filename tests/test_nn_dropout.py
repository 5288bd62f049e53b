"""The stateless dropout drops the right share, independently, and the same elements under every layout."""

from __future__ import annotations

import math

import pytest
import torch

from fusedcomm.nn import DropoutSite, dropout_keys, stateless_dropout
from fusedcomm.nn.dropout import _mix_


def mask(p=0.5, *, seq_len=64, batch=4, features=64, seed=0, step=0, layer=0, site=DropoutSite.MLP, **where):
    ids = torch.arange(batch)
    keys = dropout_keys(seed, torch.full_like(ids, step), ids)
    x = torch.ones(seq_len, batch, features)
    return stateless_dropout(x, p, keys, layer=layer, site=site, **where) != 0


def splitmix(state):
    """SplitMix64 as published, in Python's unbounded integers."""
    m = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & m
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & m
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & m
    return z ^ (z >> 31)


def test_hash_is_splitmix64():
    # The first number of the published generator started at 0.
    assert splitmix(0) == 0xE220A8397B1DCDAF
    states = [0, 1, -1, 12345, (1 << 63) - 1, -(1 << 63), -7046029254386353131]
    mixed = _mix_(torch.tensor(states)).tolist()
    assert [value % (1 << 64) for value in mixed] == [splitmix(state % (1 << 64)) for state in states]


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_dropout_drops_the_share_and_scales_the_rest(p):
    x = torch.ones(256, 4, 256)
    ids = torch.arange(4)
    y = stateless_dropout(x, p, dropout_keys(1, ids * 0, ids), layer=3, site=DropoutSite.ATTENTION)
    dropped = (y == 0).double()
    # Five standard deviations of a fair draw, over all elements and along each dimension.
    for dim, count in ((None, x.numel()), ((1, 2), 4 * 256), ((0, 2), 256 * 256), ((0, 1), 256 * 4)):
        rates = dropped.mean() if dim is None else dropped.mean(dim)
        assert (rates - p).abs().max() < 5 * math.sqrt(p * (1 - p) / count)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"step": 1},
        {"layer": 1},
        {"site": DropoutSite.ATTENTION},
        {"site": DropoutSite.EMBEDDING},
        {"first_position": 64},
        {"first_position": 1},
        {"first_feature": 64},
        {"first_feature": 1},
    ],
    ids=str,
)
def test_dropout_streams_are_independent(other):
    first, second = mask(), mask(**other)
    # Agreement of two independent fair masks of n elements: 1/2, standard deviation 1/(2 sqrt(n)).
    agreement = (first == second).double().mean().item()
    assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(first.numel())


def test_dropout_elements_are_independent_of_their_neighbours():
    bits = mask(features=128).double() - 0.5
    for dim in range(3):
        product = (bits * bits.roll(1, dim)).mean().item() * 4
        assert abs(product) < 5 / math.sqrt(bits.numel())


def test_dropout_is_the_same_for_every_layout():
    whole = mask(seq_len=7, features=12)
    assert torch.equal(whole, mask(seq_len=7, features=12))
    by_rows = [mask(seq_len=n, features=12, first_position=start) for start, n in ((0, 3), (3, 3), (6, 1), (7, 0))]
    assert torch.equal(whole, torch.cat(by_rows))
    by_features = [mask(seq_len=7, features=4, first_feature=start) for start in (0, 4, 8)]
    assert torch.equal(whole, torch.cat(by_features, 2))
    # Micro-batches: a sample's mask goes with its number, not with its row.
    ids = torch.tensor([3, 1])
    keys = dropout_keys(0, torch.zeros_like(ids), ids)
    swapped = stateless_dropout(torch.ones(7, 2, 12), 0.5, keys, layer=0, site=DropoutSite.MLP) != 0
    assert torch.equal(swapped, whole[:, [3, 1]])


def test_dropout_gradient_is_the_mask():
    x = torch.randn(5, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    keys = dropout_keys(0, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    y = stateless_dropout(x, 0.25, keys, layer=1, site=DropoutSite.MLP)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert torch.equal(x.grad != 0, y != 0)
    torch.testing.assert_close(
        x.grad[x.grad != 0].float(), torch.full_like(x.grad[x.grad != 0].float(), 4 / 3), rtol=0.01, atol=0
    )
    assert stateless_dropout(x, 0.0, keys, layer=1, site=DropoutSite.MLP) is x


def test_dropout_rejects_wrong_use():
    x, ids = torch.ones(5, 2, 3), torch.arange(2)
    keys = dropout_keys(0, ids, ids)
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match=rf"p={p}; the share of zeroed elements must be in \[0, 1\)"):
            stateless_dropout(x, p, keys, layer=0, site=DropoutSite.MLP)
    with pytest.raises(ValueError, match=r"x has shape \[5, 2, 3\] and keys \[3\]"):
        stateless_dropout(x, 0.1, torch.arange(3), layer=0, site=DropoutSite.MLP)
    with pytest.raises(ValueError, match=r"sample_ids has shape \[3\] and dtype torch.int64"):
        dropout_keys(0, ids, torch.arange(3))
    with pytest.raises(ValueError, match=r"step has shape \[2\] and dtype torch.int32"):
        dropout_keys(0, ids.int(), ids)
