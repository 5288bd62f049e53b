"""Gradient buckets: sums over micro-batches, tp and dp equal one process's, whatever the order of arrival."""

from __future__ import annotations

import random
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import assert_as_accurate, relative_error, run_ranks
from torch import Tensor, nn

from fusedcomm.comm.mesh import build_mesh
from fusedcomm.nn.layout import ParamLayout, set_layout
from fusedcomm.parallel import GradientBuckets, main_grad_of

# Small enough that the test models need several.
SMALL_MB = 0.0003
ROWS = 8


class Net(nn.Module):
    """`middle` is used twice, `unused` never."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 10)
        self.middle = nn.Linear(10, 10)
        self.unused = nn.Linear(3, 5)
        self.last = nn.Linear(10, 4)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.middle(torch.tanh(self.middle(x))))
        return self.last(x)


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, x: Tensor, parts: int) -> None:
    """Sum of squares over ROWS rows in all: each rank and micro-batch adds its rows' share."""
    for piece in x.chunk(parts):
        (model(piece).square().sum() / ROWS).backward()


def one_process(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    model = Net(dtype)
    backward(model, batch(step).to(dtype), 1)
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in model.named_parameters()
    }


def _train(rank: int, world: int, parts: int, delay: bool, reverse: bool) -> list[dict[str, Tensor]]:
    model = Net()
    named = list(model.named_parameters())
    if reverse and rank == 1:
        named.reverse()
    if delay:
        jitter = random.Random(rank)
        for _, param in named:
            param.register_post_accumulate_grad_hook(lambda _: time.sleep(jitter.random() * 0.02))
    steps = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buckets = GradientBuckets(named, dp_group=dist.group.WORLD, bucket_mb=SMALL_MB)
        for step in range(3):
            backward(model, batch(step).chunk(world)[rank], parts)
            launched = sum(bucket.launched for bucket in buckets._buckets)
            assert launched == (0 if step == 0 else len(buckets._buckets)), f"step {step}: {launched}"
            buckets.finish()
            steps.append({name: param.grad.clone() for name, param in model.named_parameters()})
            buckets.zero()
    assert len(buckets._buckets) > 2
    return steps


@pytest.mark.parametrize("parts", [1, 2])
def test_buckets_match_one_process(parts):
    ranks = run_ranks(2, _train, parts, False, False)
    for step in range(3):
        exact, plain = one_process(step, torch.float64), one_process(step, torch.float32)
        for name, reference in exact.items():
            assert torch.equal(ranks[0][step][name], ranks[1][step][name])
            assert_as_accurate(ranks[0][step][name], reference, plain[name], name=name)


def test_buckets_survive_late_and_reordered_ranks():
    prompt = run_ranks(2, _train, 2, False, False)
    late = run_ranks(2, _train, 2, True, True)
    for step in range(3):
        for name, grad in prompt[0][step].items():
            assert torch.equal(late[0][step][name], grad)
            assert torch.equal(late[1][step][name], grad)


def _train_two_at_once(rank: int, world: int) -> None:
    jitter = random.Random(rank)
    models = {value: nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))) for value in (1, 2)}
    for model in models.values():
        for param in model.parameters():
            # What the ranks have ready comes in another order on each.
            param.register_post_accumulate_grad_hook(lambda _: time.sleep(jitter.random() * 2e-3))
    buckets = [
        GradientBuckets(model.named_parameters(), dp_group=dist.group.WORLD, bucket_mb=SMALL_MB)
        for model in models.values()
    ]
    for _ in range(8):
        for value, model in models.items():
            torch.stack([value * param.sum() for param in model.parameters()]).sum().backward()
        for own in buckets:
            own.finish()
        for value, model in models.items():
            for param in model.parameters():
                assert torch.equal(param.grad, torch.full_like(param, world * value))
        for own in buckets:
            own.zero()


def test_buckets_of_two_models_may_travel_at_once():
    run_ranks(2, _train_two_at_once, fresh_timeout_s=20)


def _steps_of_sgd(rank: int, world: int) -> dict[str, Tensor]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buckets = GradientBuckets(model.named_parameters(), dp_group=dist.group.WORLD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            backward(model, batch(step).chunk(world)[rank], 1)
            buckets.finish()
            optimizer.step()
            buckets.zero()
    messages = [str(warning.message) for warning in caught if "no gradient" in str(warning.message)]
    assert len(messages) == 1, messages
    assert "unused.bias, unused.weight" in messages[0]
    return {name: param.detach() for name, param in model.named_parameters()}


def test_buckets_serve_a_torch_optimizer_and_name_a_missing_gradient_once():
    ranks = run_ranks(2, _steps_of_sgd)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, batch(step), 1)
        optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(ranks[0][name], ranks[1][name])
        torch.testing.assert_close(ranks[0][name], param.detach(), rtol=1e-5, atol=1e-6)


def _gradient_on_one_rank_only(rank: int, world: int) -> Tensor:
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    buckets = GradientBuckets(model.named_parameters(), dp_group=dist.group.WORLD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            buckets.zero()
            if rank == 0:
                model(torch.ones(1, 3)).sum().backward()
            buckets.finish()
    return model.weight.grad


def test_buckets_count_a_rank_without_gradient_as_zero():
    for grad in run_ranks(2, _gradient_on_one_rank_only):
        assert torch.equal(grad, torch.ones(2, 3))


def _other_parameters(rank: int, world: int) -> None:
    GradientBuckets(nn.Linear(3, 2 + rank).named_parameters(), dp_group=dist.group.WORLD)


def test_buckets_reject_other_parameters_on_all_ranks():
    for error in run_ranks(2, _other_parameters, return_exceptions=True):
        assert isinstance(error, ValueError)
        assert "data-parallel ranks [1] hold other parameters" in str(error)


def _alone(rank: int, world: int) -> Tensor:
    def refuse(*args, **kwargs):
        raise AssertionError("a group of one communicates")

    for name in ("all_reduce", "broadcast_object_list", "all_gather_object"):
        setattr(dist, name, refuse)
    model = nn.Linear(3, 2, bias=False)
    set_layout(model.weight, ParamLayout(partial_grad=True), dist.group.WORLD)
    buckets = GradientBuckets(model.named_parameters(), dp_group=dist.group.WORLD, tp_group=dist.group.WORLD)
    model(torch.ones(1, 3)).sum().backward()
    buckets.finish()
    return model.weight.grad


def test_buckets_of_a_group_of_one_send_nothing():
    (grad,) = run_ranks(1, _alone, fresh_timeout_s=20)
    assert torch.equal(grad, torch.ones(2, 3))


def _partial(rank: int, world: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    mesh = build_mesh(pp=1, dp=2, tp=2, timeout_s=30)
    torch.manual_seed(0)
    model = nn.ModuleDict({"norm": nn.LayerNorm(5), "linear": nn.Linear(5, 5)}).to(dtype)
    for name in ("weight", "bias"):
        set_layout(model["norm"].get_parameter(name), ParamLayout(partial_grad=True), mesh.tp_group)
    buckets = GradientBuckets(
        model.named_parameters(), dp_group=mesh.dp_group, tp_group=mesh.tp_group, bucket_mb=SMALL_MB
    )
    steps = []
    for _ in range(2):
        # Rows of the sequence differ by tp rank; `linear` stands for a shard, whose gradient is whole.
        model["norm"](torch.full((1, 5), 1.0 + rank, dtype=dtype)).sum().backward()
        model["linear"](torch.full((1, 5), 1.0 + rank, dtype=dtype)).sum().backward()
        buckets.finish()
        steps.append({name: param.main_grad.clone() for name, param in model.named_parameters()})
        buckets.zero()
    return steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_sum_partial_gradients_over_tp(dtype):
    for rank, steps in enumerate(run_ranks(4, _partial, dtype)):
        for grads in steps:
            assert torch.equal(grads["norm.bias"], torch.full((5,), 4.0))
            # x is constant, so its normalised value and the gradient of the weight are 0.
            assert torch.equal(grads["norm.weight"], torch.zeros(5))
            tp_rank = rank % 2
            both = (1.0 + tp_rank) + (1.0 + tp_rank + 2)
            assert torch.equal(grads["linear.weight"], torch.full((5, 5), both))
            assert torch.equal(grads["linear.bias"], torch.full((5,), 2.0))


def test_buckets_accumulate_bf16_gradients_in_fp32():
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    buckets = GradientBuckets([("weight", weight)], dp_group=None)
    exact = torch.zeros(64, 64, dtype=torch.float64)
    in_bf16 = torch.zeros(64, 64, dtype=torch.bfloat16)
    for _ in range(256):
        factor = torch.rand(64, 64, generator=generator).bfloat16()
        (weight * factor).sum().backward()
        exact += factor.double()
        in_bf16 += factor
    assert weight.grad is None
    grad = main_grad_of(weight)
    assert grad is not None
    assert relative_error(grad, exact) < 1e-6 < 1e-2 < relative_error(in_bf16, exact)
    buckets.finish()
    assert weight.grad is not None
    assert torch.equal(weight.grad, grad.bfloat16())


def one_bucket() -> tuple[nn.Linear, GradientBuckets]:
    model = nn.Linear(3, 2, bias=False)
    return model, GradientBuckets(model.named_parameters(), dp_group=None)


def test_buckets_reject_a_contribution_after_launch():
    model, buckets = one_bucket()
    backward_once = lambda: model(torch.ones(1, 3)).sum().backward()  # noqa: E731
    backward_once()
    buckets.finish()
    with pytest.raises(RuntimeError, match=r"gradient of weight came after its bucket was sent.*zero\(\)"):
        backward_once()
    buckets.zero()
    backward_once()
    with pytest.raises(RuntimeError, match=r"contribution 2 to the gradient of weight.*count_again\(\)"):
        backward_once()
    buckets.zero()
    buckets.count_again()
    backward_once()
    backward_once()
    buckets.finish()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0))


def test_buckets_reject_a_gradient_that_passed_them_by():
    model, buckets = one_bucket()
    model.weight.grad = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"weight\.grad was set without passing through the buckets"):
        buckets.finish()
    with pytest.raises(ValueError, match=r"no bucket holds the parameter of shape \[7\]"):
        buckets.accumulate(torch.zeros(7), torch.zeros(7))


def test_buckets_reject_a_second_finish_and_a_parameter_with_two_names():
    model, buckets = one_bucket()
    model(torch.ones(1, 3)).sum().backward()
    buckets.finish()
    with pytest.raises(RuntimeError, match=r"finish\(\) was called twice"):
        buckets.finish()
    with pytest.raises(ValueError, match="given under two names"):
        GradientBuckets([("a", model.weight), ("b", model.weight)], dp_group=None)
