"""Layouts stay with their parameters, and partial gradients are summed once, by us or by who claims them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from nn_helpers import tensor_parallel
from torch import nn

from fusedcomm.nn import (
    ColumnParallelLinear,
    LayerNorm,
    ParamLayout,
    RMSNorm,
    RowParallelLinear,
    claim_partial_grad,
    layout_of,
    set_layout,
)


def norm_grads(rank, world, claim, dtype):
    norm = RMSNorm(4, tp=tensor_parallel(), dtype=dtype)
    if claim:
        claim_partial_grad(norm.weight)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 4, generator=generator).to(dtype)
    norm(x).float().pow(2).sum().backward()
    return norm.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_gradient_is_summed_in_fp32_unless_claimed(dtype):
    parts = run_ranks(3, norm_grads, True, dtype)
    assert not torch.equal(parts[0], parts[1])
    total = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
    for grad in run_ranks(3, norm_grads, False, dtype):
        torch.testing.assert_close(grad, total, rtol=torch.finfo(dtype).eps, atol=0)


def twice(rank, world):
    norm = RMSNorm(4, tp=tensor_parallel(), eps=0.0)
    x = torch.full((2, 4), float(rank + 1))
    # Two uses in one backward, then a second backward: what was summed is not summed again.
    (norm(x) + norm(x)).sum().backward()
    first = norm.weight.grad.clone()
    norm(x).sum().backward()
    return first, norm.weight.grad


def test_partial_gradients_accumulate():
    for first, second in run_ranks(2, twice):
        torch.testing.assert_close(first, torch.full((4,), 8.0))
        torch.testing.assert_close(second, torch.full((4,), 12.0))


def replace_parameters(rank, world):
    layouts = {}
    for how in ("to_empty", "assign", "dtype", "set"):
        column = ColumnParallelLinear(4, {"a": 8}, tp=tensor_parallel(), device="meta")
        row = RowParallelLinear(8, 4, tp=tensor_parallel(), device="meta")
        norm = LayerNorm(4, tp=tensor_parallel(), device="meta")
        model = nn.ModuleDict({"column": column, "row": row, "norm": norm})
        if how == "assign":
            model.load_state_dict({n: torch.ones(p.shape) for n, p in model.named_parameters()}, assign=True)
        elif how == "set":
            for linear in (*column.linears(), row, norm):
                linear.weight, linear.bias = (nn.Parameter(torch.ones(p.shape)) for p in (linear.weight, linear.bias))
        else:
            model.to_empty(device="cpu")
        if how == "dtype":
            model.to(torch.float64)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1)
        model["norm"](torch.zeros(rank + 1, 4, dtype=norm.weight.dtype)).sum().backward()
        layouts[how] = {name: layout_of(param) for name, param in model.named_parameters()}, norm.bias.grad
    return layouts


def test_layouts_survive_new_parameters():
    expected = {
        "column.a.weight": ParamLayout(shard_dim=0),
        "column.a.bias": ParamLayout(shard_dim=0),
        "row.weight": ParamLayout(shard_dim=1),
        "row.bias": ParamLayout(partial_grad=True),
        "norm.weight": ParamLayout(partial_grad=True),
        "norm.bias": ParamLayout(partial_grad=True),
    }
    for by_way in run_ranks(2, replace_parameters):
        for layouts, bias_grad in by_way.values():
            assert layouts == expected
            assert bias_grad.tolist() == [3.0] * 4


def freeze_and_thaw(rank, world):
    norm = RMSNorm(2, tp=tensor_parallel(), eps=0.0).requires_grad_(False)
    norm.load_state_dict({"weight": torch.ones(2)}, assign=True)
    norm.requires_grad_(False).to_empty(device="meta").to_empty(device="cpu")
    frozen = norm.weight.requires_grad
    norm.reset_parameters()
    norm.requires_grad_()(torch.ones(rank + 1, 2)).sum().backward()
    return frozen, norm.weight.grad.tolist()


def test_partial_gradient_of_a_frozen_parameter_is_summed_once_it_is_trained():
    assert run_ranks(2, freeze_and_thaw) == [(False, [3.0, 3.0])] * 2


def copy_module(rank, world):
    try:
        copy.deepcopy(RMSNorm(4, tp=tensor_parallel()))
    except TypeError as error:
        return str(error)
    return "copied"


def test_deepcopy_does_not_lose_layouts_silently():
    # A process group cannot be copied; were that to change, the copy would need its layouts.
    assert "cannot pickle" in run_ranks(1, copy_module)[0]


def sum_over_group_of_one(rank, world):
    group = dist.new_group([rank], use_local_synchronization=True)
    param = nn.Parameter(torch.ones(2))
    set_layout(param, ParamLayout(partial_grad=True), group)
    (param * (rank + 1)).sum().backward()
    claim_partial_grad(param)
    return param.grad.tolist()


def test_partial_gradient_over_one_rank_is_whole():
    assert run_ranks(2, sum_over_group_of_one) == [[1.0, 1.0], [2.0, 2.0]]


def wrong_use(rank, world):
    messages = []
    for call in (
        lambda: claim_partial_grad(nn.Parameter(torch.ones(2, 3))),
        lambda: set_layout(nn.Parameter(torch.ones(2)), ParamLayout(0, True), dist.group.WORLD),
    ):
        with pytest.raises(ValueError, match=":") as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_layouts_reject_wrong_use():
    assert run_ranks(1, wrong_use)[0] == [
        "claim_partial_grad: a parameter of shape [2, 3] has layout ParamLayout(shard_dim=None, "
        "partial_grad=False); only a partial gradient can be claimed: ask layout_of(param).partial_grad first",
        "set_layout: shard_dim=0 with partial_grad=True; "
        "a rank that holds a shard holds its whole gradient: leave one of them out",
    ]
