"""Weight gradients that are computed later, and where they are to go."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_as_accurate
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.ops.activation import Activation
from fusedcomm.ops.wgrad import WeightGradient, local_linear

ROWS, LEAD, N, K = 5, 3, 7, 4
FUNCTIONS = {
    None: lambda x: x,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu": lambda a, b: F.silu(a) * b,
}


def operands(activation: Activation | None, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    shapes = [(ROWS, LEAD, N)] + [(ROWS, LEAD, K)] * (2 if activation == "swiglu" else 1)
    dy, *xs = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return dy, xs


def expected(activation: Activation | None, dtype: torch.dtype, compute_in: torch.dtype):
    dy, xs = operands(activation, dtype)
    x = FUNCTIONS[activation](*(x.to(compute_in) for x in xs))
    return torch.einsum("rln,rlk->nk", dy.to(compute_in), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", list(FUNCTIONS))
def test_weight_gradient_matches_reference(activation, dtype):
    gradient = WeightGradient(*operands(activation, dtype), activation)
    exact, plain = expected(activation, dtype, torch.float64), expected(activation, dtype, dtype)
    grad = gradient.compute()
    assert grad.dtype == dtype
    assert_as_accurate(grad, exact, plain)
    # What the buffer held before must not matter.
    buffer = torch.full((N, K), float("nan"))
    gradient.add_to(buffer, overwrite=True)
    assert torch.equal(buffer, grad.float())
    gradient.add_to(buffer)
    assert_as_accurate(buffer, 2 * exact, 2 * plain.float())


@pytest.mark.parametrize("overwrite", [False, True])
def test_weight_gradient_of_no_rows_is_zero(overwrite):
    gradient = WeightGradient(torch.zeros(0, LEAD, N), [torch.zeros(0, LEAD, K)])
    buffer = torch.ones(N, K)
    gradient.add_to(buffer, overwrite=overwrite)
    assert torch.equal(buffer, torch.zeros(N, K) if overwrite else torch.ones(N, K))
    assert torch.equal(gradient.compute(), torch.zeros(N, K))


class CountProducts(TorchDispatchMode):
    """Counts the matrix products that run while it is on."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        return func(*args, **(kwargs or {}))


def test_local_linear_defers_before_it_computes_dx():
    x, weight = torch.randn(ROWS, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
    handed = []
    y = local_linear(x, weight, None, lambda *pair: handed.append((*pair, products.count)))
    with CountProducts() as products:
        y.sum().backward()
    ((param, gradient, count_before),) = handed
    assert param is weight
    assert weight.grad is None
    assert (count_before, products.count) == (0, 1)
    assert torch.equal(gradient.compute(), torch.ones(ROWS, N).t() @ x)
    assert torch.equal(x.grad, torch.ones(ROWS, N) @ weight)
