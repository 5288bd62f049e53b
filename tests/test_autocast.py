"""Within torch.autocast the ops and layers take their tensors as nn.Linear does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks

from fusedcomm import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from fusedcomm.nn import ColumnParallelLinear, RowParallelLinear, TensorParallel
from fusedcomm.ops import begin_all_gather_matmul, begin_matmul_reduce_scatter

BF16 = partial(torch.autocast, "cpu", torch.bfloat16)


def _op(name: str):
    group = dist.group.WORLD
    return {
        "all_gather_matmul": lambda x, w, b: all_gather_matmul(x, w, group=group, bias=b),
        "activated": lambda x, w, b: all_gather_matmul(x, w, group=group, bias=b, activation="gelu"),
        "matmul_reduce_scatter": lambda x, w, b: matmul_reduce_scatter(x, w, group=group, bias=b),
        "matmul_all_reduce": lambda x, w, b: matmul_all_reduce(x, w, group=group, bias=b),
        "begun gather": lambda x, w, b: begin_all_gather_matmul(x, [w], group=group, biases=[b])()[0],
        "begun scatter": lambda x, w, b: begin_matmul_reduce_scatter(x, w, group=group, bias=b)(),
    }[name]


OPS = ("all_gather_matmul", "activated", "matmul_reduce_scatter", "matmul_all_reduce", "begun gather", "begun scatter")


def _tensors(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = [(8, 6), (4, 6), (4,)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def run_cast(rank: int, world: int, name: str):
    call, results = _op(name), []
    for given in (torch.float32, torch.bfloat16, torch.float64):
        tensors = _tensors(rank, given)
        with BF16():
            y = call(*tensors)
        by_hand = _tensors(rank, given)
        dtype = torch.float64 if given == torch.float64 else torch.bfloat16
        expected = call(*(tensor.to(dtype) for tensor in by_hand))
        y.float().square().sum().backward()
        expected.float().square().sum().backward()
        assert y.dtype == dtype
        assert torch.equal(y, expected)
        for own, other in zip(tensors, by_hand):
            assert (own.grad is None) == (other.grad is None)
            if own.grad is not None:
                assert own.grad.dtype == given
                assert torch.equal(own.grad, other.grad)
        results.append(y.detach())
    return results


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("world", [1, 2])
def test_ops_compute_in_the_dtype_of_autocast(world, name):
    run_ranks(world, run_cast, name)


def run_layers(rank: int, world: int):
    tp = TensorParallel(dist.group.WORLD)
    torch.manual_seed(0)
    up, down = ColumnParallelLinear(8, 16, tp=tp, bias=True), RowParallelLinear(16, 8, tp=tp, bias=True)

    def block(x):
        return down(torch.nn.functional.gelu(up(x)))

    x = torch.randn(4, 8)
    with BF16():
        # Mixed, as the output of one autocast op and a residual in fp32 are.
        plain = block(x.bfloat16()), block(x)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    return [y.dtype for y in (*plain, compiled)], torch.equal(plain[1], compiled)


@pytest.mark.parametrize("world", [1, 2])
def test_layers_with_fp32_weights_run_within_autocast_and_compile(world):
    assert run_ranks(world, run_layers) == [([torch.bfloat16] * 3, True)] * world


def run_deferred(rank: int, world: int):
    x, w, _ = _tensors(rank, torch.float32)
    messages = []
    for op in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce):
        with BF16(), pytest.raises(ValueError, match=r"defer_wgrad within torch\.autocast") as caught:
            op(x, w, group=dist.group.WORLD, defer_wgrad=lambda weight, gradient: None)
        messages.append(str(caught.value).partition(":")[0])
    return messages


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_of_the_weight_itself_is_refused(world):
    assert (
        run_ranks(world, run_deferred) == [["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]] * world
    )
