"""Several weights in one launch, and what becomes of their product: SwiGLU, residual, scales of fp8."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_as_accurate
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import CONFIG, make_chunks, poisoned
from torch import Tensor
from torch.nn.functional import linear, silu

from fusedcomm.kernels.all_gather_matmul import all_gather_matmul
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.epilogue import MAX_WIDTH, Epilogue
from fusedcomm.kernels.gemm import gemm
from fusedcomm.kernels.matmul_reduce_scatter import matmul_reduce_scatter

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter truncates to bf16, where torch rounds.
TIMES = {torch.float32: 2.0, torch.float16: 2.0, torch.bfloat16: 3.0}
GRID = {"config": CONFIG, "num_programs": 2}
FP8 = torch.float8_e4m3fn


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
    a, b = linear(x, torch.cat([gate, up]), bias).chunk(2, dim=1)
    return silu(a) * b


@settings(deadline=None, max_examples=20)
@given(
    columns=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    rows=st.integers(1, 60),
    depth=st.integers(0, 50),
    dtype=st.sampled_from(DTYPES),
    num_programs=st.integers(1, 5),
)
def test_several_weights_have_an_output_each(columns, rows, depth, dtype, num_programs):
    x = draw(rows, depth, dtype=dtype)
    weights = [draw(count, depth, dtype=dtype, seed=seed) for seed, count in enumerate(columns, 1)]
    bias = draw(sum(columns), dtype=dtype, seed=9)
    ys = [poisoned(rows, count, dtype=dtype) for count in columns]
    gemm(x, weights, ys, config=CONFIG, num_programs=num_programs, epilogue=Epilogue(bias))
    w, y = torch.cat(weights), torch.cat(ys, dim=1)
    assert_as_accurate(
        y,
        linear(x.double(), w.double(), bias.double()),
        linear(x, w, bias),
        times=TIMES[dtype],
        terms=linear(x.double().abs(), w.double().abs(), bias.double().abs()),
    )


@pytest.mark.parametrize("columns", [[0, 33, 17], [33, 0, 17], [33, 17, 0], [1, 1, 1]], ids=str)
def test_outputs_may_be_views_of_one_and_without_columns(columns):
    x, w = draw(40, 20, dtype=torch.float32), draw(sum(columns), 20, dtype=torch.float32)
    y = poisoned(40, sum(columns) + 1, dtype=torch.float32)
    gemm(x, w.split(columns), y[:, :-1].split(columns, dim=1), **GRID)
    assert_as_accurate(y[:, :-1], linear(x.double(), w.double()), linear(x, w))
    assert y[:, -1].isnan().all()


def test_outputs_may_be_transposed():
    x, w = draw(40, 20, dtype=torch.float32), draw(60, 20, dtype=torch.float32)
    ys = [poisoned(30, 40, dtype=torch.float32).T for _ in range(2)]
    gemm(x, w.chunk(2), ys, **GRID)
    assert_as_accurate(torch.cat(ys, dim=1), linear(x.double(), w.double()), linear(x, w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_swiglu_matches_reference(dtype, with_bias):
    x = draw(70, 45, dtype=dtype)
    gate, up = (draw(39, 45, dtype=dtype, seed=seed) for seed in (1, 2))
    bias = draw(78, dtype=dtype, seed=3) if with_bias else None
    y = poisoned(70, 39, dtype=dtype)
    gemm(x, [gate, up], y, epilogue=Epilogue(bias, "swiglu"), **GRID)
    reference = swiglu(x.double(), gate.double(), up.double(), None if bias is None else bias.double())
    assert_as_accurate(y, reference, swiglu(x, gate, up, bias), times=TIMES[dtype])


def test_wide_tiles_are_stored_in_parts():
    config = GemmConfig(tile_m=32, tile_n=4 * MAX_WIDTH.value, tile_k=32)
    x, w = draw(40, 20, dtype=torch.float32), draw(300, 20, dtype=torch.float32, seed=1)
    residual = draw(40, 300, dtype=torch.float32, seed=2)
    y = poisoned(40, 300, dtype=torch.float32)
    gemm(x, w, y, config=config, num_programs=2, epilogue=Epilogue(residual=residual))
    assert_as_accurate(y, linear(x.double(), w.double()) + residual, linear(x, w) + residual)
    y = poisoned(40, 150, dtype=torch.float32)
    gemm(x, w.chunk(2), y, config=config, num_programs=2, epilogue=Epilogue(activation="swiglu"))
    assert_as_accurate(y, swiglu(x.double(), *w.double().chunk(2)), swiglu(x, *w.chunk(2)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_added_after_the_activation(dtype):
    x, w = draw(40, 45, dtype=dtype), draw(50, 45, dtype=dtype, seed=1)
    residual = draw(50, 40, dtype=dtype, seed=2).T
    y = poisoned(40, 50, dtype=dtype)
    gemm(x, w, y, epilogue=Epilogue(activation="silu", residual=residual), **GRID)
    reference = silu(linear(x.double(), w.double())) + residual.double()
    assert_as_accurate(y, reference, silu(linear(x, w)) + residual, times=TIMES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_added_to_what_the_output_holds(dtype):
    dy, x = draw(60, 45, dtype=dtype), draw(60, 70, dtype=dtype, seed=1)
    before = draw(45, 70, dtype=torch.float32, seed=2)
    y = before.clone()
    gemm(dy.T, x.T, y, epilogue=Epilogue(residual=y), **GRID)
    plain = before + dy.float().T @ x.float()
    assert_as_accurate(y, before.double() + dy.double().T @ x.double(), plain, times=TIMES[dtype])


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as fp8 with a scale each."""
    scale = values.abs().amax(dim=1) / torch.finfo(FP8).max
    return (values / scale[:, None]).to(FP8), scale


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_fp8_with_row_wise_scales_matches_reference(out_dtype):
    x, x_scale = quantize(draw(40, 70, dtype=torch.float32) * torch.logspace(-2, 2, 40)[:, None])
    w, w_scale = quantize(draw(50, 70, dtype=torch.float32, seed=1) * torch.logspace(1, -1, 50)[:, None])
    exact_x, exact_w = x.double() * x_scale[:, None].double(), w.double() * w_scale[:, None].double()
    plain = (linear(x.float(), w.float()) * x_scale[:, None] * w_scale).to(out_dtype)
    scales = {"x_scale": x_scale, "w_scale": w_scale}
    y = poisoned(40, 50, dtype=out_dtype)
    gemm(x, w, y, epilogue=Epilogue(**scales), **GRID)
    assert_as_accurate(y, linear(exact_x, exact_w), plain)
    y.fill_(float("nan"))
    gemm(x, w.split([20, 30]), y.split([20, 30], dim=1), epilogue=Epilogue(**scales), **GRID)
    assert_as_accurate(y, linear(exact_x, exact_w), plain)
    chunks = make_chunks(1, [15, 25])
    y.fill_(float("nan"))
    matmul_reduce_scatter(
        x, w, y, chunks=chunks, counters=torch.zeros(2, dtype=torch.int32), x_scale=x_scale, w_scale=w_scale, **GRID
    )
    assert_as_accurate(y, linear(exact_x, exact_w), plain)
    y.fill_(float("nan"))
    status = torch.zeros(4, dtype=torch.int32)
    all_gather_matmul(x, w, y, chunks=chunks, status=status, timeout_us=1, epilogue=Epilogue(**scales), **GRID)
    assert_as_accurate(y, linear(exact_x, exact_w), plain)


def test_gathered_rows_meet_several_weights_and_swiglu():
    chunks = make_chunks(1, [15, 25])
    x, gate, up = (draw(rows, 20, dtype=torch.float32, seed=rows) for rows in (40, 30, 30))
    y = poisoned(40, 30, dtype=torch.float32)
    status = torch.zeros(4, dtype=torch.int32)
    all_gather_matmul(
        x,
        [gate, up],
        y,
        chunks=chunks,
        status=status,
        timeout_us=1,
        epilogue=Epilogue(activation="swiglu"),
        **GRID,
    )
    assert_as_accurate(y, swiglu(x.double(), gate.double(), up.double()), swiglu(x, gate, up))


F8 = torch.zeros(4, 3).to(FP8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w": [torch.zeros(5, 3)] * 4}, "4 weights; must be 1 to 3 in one launch"),
        ({"w": []}, "0 weights"),
        (
            {"w": [torch.zeros(2, 3), torch.zeros(3, 3).T.contiguous().T]},
            r"strides \(3, 1\) and \(1, 3\); must be equal",
        ),
        ({"w": [torch.zeros(5, 3), torch.zeros(5, 3)]}, "1 outputs; must be 2"),
        ({"y": [torch.zeros(4, 5), torch.zeros(4, 5)]}, "2 outputs; must be 1"),
        (
            {"w": [torch.zeros(5, 3)] * 2, "y": [torch.zeros(4, 5), torch.zeros(4, 6)]},
            r"output is \(4, 6\) .*must be \[M, N\] = \(4, 5\)",
        ),
        (
            {"w": [torch.zeros(5, 3)] * 2, "y": [torch.zeros(4, 5), torch.zeros(4, 5).half()]},
            "outputs are torch.float32 with .* 1 apart and torch.float16 with .*; must be alike",
        ),
        (
            {"w": [torch.zeros(5, 3)] * 2, "y": [torch.zeros(4, 5), torch.zeros(5, 4).T]},
            "columns 1 apart and .* columns 4 apart; must be alike",
        ),
        (
            {
                "w": [torch.zeros(5, 3)] * 2,
                "y": [torch.zeros(4, 5)] * 2,
                "epilogue": Epilogue(residual=torch.zeros(4, 5)),
            },
            "a residual and 2 outputs; must be one",
        ),
        ({"epilogue": Epilogue(activation="swiglu")}, "'swiglu' with 1 weights; must be two"),
        (
            {"w": [torch.zeros(5, 3), torch.zeros(4, 3)], "epilogue": Epilogue(activation="swiglu")},
            "gate and up have 5 and 4 rows",
        ),
        ({"epilogue": Epilogue(residual=torch.zeros(5, 4))}, r"residual is \(5, 4\) and the output is \(4, 5\)"),
        (
            {"epilogue": Epilogue(x_scale=torch.ones(4))},
            "x_scale goes with fp8 operands and only with them; .* has one",
        ),
        ({"x": F8, "w": F8, "y": torch.zeros(4, 4)}, "x_scale goes with fp8 .* has none"),
        ({"x": F8, "w": F8, "y": torch.zeros(4, 4).to(FP8)}, "output is torch.float8_e4m3fn"),
        (
            {
                "x": F8,
                "w": F8,
                "y": torch.zeros(4, 4),
                "epilogue": Epilogue(x_scale=torch.ones(3), w_scale=torch.ones(4)),
            },
            r"x_scale is \(3,\) .*\[M\] = \(4,\)",
        ),
    ],
)
def test_what_does_not_fit_is_rejected(changes, message):
    arguments = {"x": torch.zeros(4, 3), "w": torch.zeros(5, 3), "y": torch.zeros(4, 5), **GRID}
    with pytest.raises(ValueError, match="gemm: .*" + message):
        gemm(**(arguments | changes))
