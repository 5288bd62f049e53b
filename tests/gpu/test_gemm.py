"""The product, in all types, layouts and epilogues, against fp64."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_as_accurate
from place import DEVICE, INTERPRETED, TIMES, configs, only_on_gpu, poisoned, randn
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.epilogue import NOTHING, Epilogue
from fusedcomm.kernels.gemm import gemm
from fusedcomm.kernels.reduce import reduce

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Whole tiles that TMA can load, and neither.
SHAPES = [(32, 80, 64), (33, 45, 29)] if INTERPRETED else [(512, 1280, 448), (387, 449, 211)]
GELU, SILU, BIG = gelu, silu, 2**31


def check_gemm(device, config: GemmConfig, x: Tensor, w: Tensor):
    programs = device.num_programs(config, x.element_size(), 0)
    y = poisoned(len(x), len(w), dtype=x.dtype)
    gemm(x, w, y, config=config, num_programs=programs)
    assert_as_accurate(y, linear(x.double(), w.double()), linear(x, w), times=TIMES[x.dtype])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemm_gives_the_products_of_forward_and_backward(device, dtype, shape):
    rows, columns, depth = shape
    config = configs(device, dtype)[0]
    x, w, dy = (
        randn(seed, *size, dtype=dtype) for seed, size in enumerate([(rows, depth), (columns, depth), (rows, columns)])
    )
    check_gemm(device, config, x, w)
    check_gemm(device, config, dy, w.t())
    check_gemm(device, config, dy.t(), x.t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_configuration_that_ships_gives_the_product(device, dtype):
    rows, columns, depth = SHAPES[0]
    x, w = randn(0, rows, depth, dtype=dtype), randn(1, columns, depth, dtype=dtype)
    for config in configs(device, dtype)[1:]:
        check_gemm(device, config, x, w)


def check_epilogue(device, weights: int, epilogue: Epilogue, reference):
    """`reference(x, w, bias, residual)` in any type is what the epilogue makes of the product."""
    rows, columns, depth = SHAPES[1]
    x, dtype = randn(0, rows, depth, dtype=torch.bfloat16), torch.bfloat16
    w = randn(1, weights * columns, depth, dtype=dtype, scale=depth**-0.5)
    config = configs(device, dtype)[0]
    operands = (x, w, epilogue.bias, epilogue.residual)
    exact = reference(*(None if tensor is None else tensor.double() for tensor in operands))
    plain = reference(*operands)
    ys = [poisoned(len(x), columns, dtype=dtype) for _ in range(plain.shape[1] // columns)]
    programs = device.num_programs(config, 2, 0)
    gemm(x, w.chunk(weights), ys, config=config, num_programs=programs, epilogue=epilogue)
    assert_as_accurate(torch.cat(ys, dim=1), exact, plain, times=TIMES[dtype])


def test_epilogues_are_those_of_torch(device):
    rows, columns, _ = SHAPES[1]
    bias = randn(2, columns, dtype=torch.bfloat16)
    residual = randn(3, rows, columns, dtype=torch.bfloat16)
    check_epilogue(device, 1, Epilogue(bias, "gelu"), lambda x, w, b, r: GELU(linear(x, w, b)))
    check_epilogue(device, 1, Epilogue(bias, "silu", residual), lambda x, w, b, r: SILU(linear(x, w, b)) + r)
    check_epilogue(
        device,
        2,
        Epilogue(activation="swiglu"),
        lambda x, w, b, r: SILU(linear(x, w.chunk(2)[0])) * linear(x, w.chunk(2)[1]),
    )
    check_epilogue(device, 3, NOTHING, lambda x, w, b, r: linear(x, w))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_operands_are_scaled_row_by_row(device, shape):
    rows, columns, depth = shape
    fp8 = torch.float8_e4m3fn
    found = configs(device, fp8)
    if not found:
        pytest.skip("this GPU does not multiply fp8")
    x, w = randn(0, rows, depth, scale=20.0).to(fp8), randn(1, columns, depth, scale=20.0).to(fp8)
    scales = Epilogue(x_scale=randn(2, rows).abs() + 0.1, w_scale=randn(3, columns).abs() + 0.1)
    exact = linear(x.double() * scales.x_scale[:, None].double(), w.double() * scales.w_scale[:, None].double())
    for config in found:
        y = poisoned(rows, columns, dtype=torch.float16)
        small = 2**-10
        epilogue = Epilogue(x_scale=scales.x_scale * small, w_scale=scales.w_scale)
        gemm(x, w, y, config=config, num_programs=device.num_programs(config, 1, 0), epilogue=epilogue)
        # Sums of fp8 are kept in 14 bits on sm_90, more than the output has.
        assert_as_accurate(y, exact * small, (exact * small).to(torch.float16))


@only_on_gpu
def test_gemm_reaches_rows_behind_two_billion_elements(device):
    config, depth = configs(device, torch.bfloat16)[0], 32768
    rows = BIG // depth + 200
    if torch.cuda.mem_get_info()[0] < 3 * rows * depth:
        pytest.skip("too little memory")
    x = torch.zeros(rows, depth, dtype=torch.bfloat16, device=DEVICE)
    last = slice(rows - 150, rows)
    x[last] = randn(0, 150, depth, dtype=torch.bfloat16)
    w, y = randn(1, 64, depth, dtype=torch.bfloat16), poisoned(rows, 64, dtype=torch.bfloat16)
    gemm(x, w, y, config=config, num_programs=device.num_programs(config, 2, 0))
    assert_as_accurate(y[last], linear(x[last].double(), w.double()), linear(x[last], w))
    assert not y[: rows - 150].count_nonzero()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [1, 8])
def test_reduce_adds_in_the_order_of_ranks(device, dtype, world):
    rows, columns, _ = SHAPES[1]
    partials, bias = randn(0, world, rows, columns, dtype=dtype), randn(1, columns, dtype=dtype)
    y = poisoned(rows, columns, dtype=dtype)
    reduce(partials, y, bias=bias)
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    total = total + bias.float()
    if INTERPRETED and dtype == torch.bfloat16:
        assert_as_accurate(y, total, total.to(dtype), times=TIMES[dtype])
    else:
        assert torch.equal(y, total.to(dtype))
