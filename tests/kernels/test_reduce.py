from __future__ import annotations

import pytest
import torch
from helpers import assert_as_accurate
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import poisoned
from torch import Tensor

from fusedcomm.kernels.reduce import reduce


def ordered_sum(partials: Tensor, bias: Tensor | None = None) -> Tensor:
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return total if bias is None else total + bias.float()


@settings(deadline=None, max_examples=20)
@given(
    world=st.integers(1, 8),
    shape=st.tuples(st.integers(0, 70), st.integers(0, 200)),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    out_dtype=st.sampled_from([torch.float32, torch.float16]),
    with_bias=st.booleans(),
)
def test_reduce_is_bit_equal_to_the_fp32_sum_in_rank_order(world, shape, dtype, out_dtype, with_bias):
    partials = torch.randn(world, *shape).to(dtype)
    bias = torch.randn(shape[1]).to(dtype) if with_bias else None
    y = poisoned(*shape, dtype=out_dtype)
    reduce(partials, y, bias=bias)
    assert torch.equal(y, ordered_sum(partials, bias).to(out_dtype))


def test_reduce_to_bf16_matches_reference():
    partials = torch.randn(4, 40, 150).bfloat16()
    y = poisoned(40, 150, dtype=torch.bfloat16)
    reduce(partials, y)
    # The interpreter truncates to bf16, where torch rounds.
    assert_as_accurate(y, partials.double().sum(0), ordered_sum(partials).bfloat16(), times=3.0)


def test_reduce_takes_strided_views():
    partials = torch.randn(50, 3, 40).transpose(0, 1)[:, ::2]
    y = poisoned(40, 25, dtype=torch.float32).T
    reduce(partials, y)
    assert torch.equal(y, ordered_sum(partials))


@pytest.mark.parametrize(
    ("partials", "y", "bias", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(4, 3), None, r"partials are \(2, 3, 4\) and the output is \(4, 3\)"),
        (torch.zeros(0, 3, 4), torch.zeros(3, 4), None, "W at least 1"),
        (torch.zeros(2, 3, 4), torch.zeros(3, 4), torch.zeros(3), r"bias is \(3,\) .*must be \[N\] = \(4,\)"),
        (torch.zeros(2, 3, 4).long(), torch.zeros(3, 4), None, "partials is torch.int64; must be float32"),
    ],
)
def test_reduce_rejects_what_does_not_fit(partials, y, bias, message):
    with pytest.raises(ValueError, match="reduce: .*" + message):
        reduce(partials, y, bias=bias)
