from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import assert_as_accurate
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import CONFIG, poisoned
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.epilogue import Epilogue
from fusedcomm.kernels.gemm import gemm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = {None: lambda y: y, "gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh"), "silu": silu}
# The interpreter truncates to bf16, where torch rounds.
TIMES = {torch.float32: 2.0, torch.float16: 2.0, torch.bfloat16: 3.0}


def check_gemm(
    x: Tensor, w: Tensor, *, bias: Tensor | None = None, activation: str | None = None, num_programs: int = 3
):
    y = poisoned(x.shape[0], w.shape[0], dtype=x.dtype)
    gemm(x, w, y, config=CONFIG, num_programs=num_programs, epilogue=Epilogue(bias, activation))
    apply = ACTIVATIONS[activation]
    reference = apply(linear(x.double(), w.double(), None if bias is None else bias.double()))
    assert_as_accurate(y, reference, apply(linear(x, w, bias)), times=TIMES[x.dtype], name="y")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gemm_matches_reference(dtype, activation, with_bias):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70, 45, generator=generator).to(dtype)
    w = torch.randn(50, 45, generator=generator).to(dtype)
    bias = torch.randn(50, generator=generator).to(dtype) if with_bias else None
    check_gemm(x, w, bias=bias, activation=activation)


@settings(deadline=None, max_examples=20)
@given(
    shape=st.tuples(st.integers(1, 80), st.integers(1, 80), st.integers(0, 80)),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(list(ACTIVATIONS)),
    with_bias=st.booleans(),
    num_programs=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_gemm_matches_reference_for_any_shape(shape, dtype, activation, with_bias, num_programs, seed):
    rows, columns, depth = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=generator).to(dtype)
    w = torch.randn(columns, depth, generator=generator).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype) if with_bias else None
    check_gemm(x, w, bias=bias, activation=activation, num_programs=num_programs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_takes_transposed_and_strided_views(dtype):
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(40, 50, generator=generator).to(dtype)
    w = torch.randn(50, 33, generator=generator).to(dtype)
    x = torch.randn(40, 33, generator=generator).to(dtype)
    # The products of backward: dx = dy @ w, dw = dy.T @ x.
    check_gemm(dy, w.T)
    check_gemm(dy.T, x.T)
    # Every other row, and every third column.
    check_gemm(dy[::2, ::3], w.T[:, ::3])


def test_gemm_writes_only_its_output_view():
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(35, 20, generator=generator), torch.randn(40, 20, generator=generator)
    buffer = torch.full((41, 72), 7.0)
    gemm(x, w, buffer.T[:70:2, :40], config=CONFIG, num_programs=2)
    torch.testing.assert_close(buffer[:40, :70:2], (x @ w.T).T)
    buffer[:40, :70:2] = 7.0
    assert (buffer == 7.0).all()


def test_gemm_stores_another_dtype_than_it_reads():
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(33, 40, generator=generator).bfloat16() for _ in range(2))
    y = poisoned(33, 33, dtype=torch.float32)
    gemm(x, w, y, config=CONFIG, num_programs=1, epilogue=Epilogue(torch.ones(33)))
    assert_as_accurate(y, linear(x.double(), w.double()) + 1, linear(x.float(), w.float()) + 1)


@pytest.mark.parametrize(("shape", "strides"), [((4, 20), (2**30, 1)), ((20, 33), (1, 2**27))], ids=["rows", "depth"])
def test_gemm_reaches_beyond_2_to_31_elements(tmp_path, shape, strides):
    size = sum((length - 1) * stride for length, stride in zip(shape, strides)) + 1
    # A sparse file: gigabytes of which only the pages that are written exist.
    memory = torch.from_file(str(tmp_path / "memory"), shared=True, size=size, dtype=torch.float16)
    x = memory.as_strided(shape, strides)
    x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(4)))
    w = torch.randn(20, shape[1], generator=torch.Generator().manual_seed(5)).half()
    # Rows of one operand, then of the other.
    for left, right in [(x, w), (w, x)]:
        y = poisoned(len(left), len(right), dtype=torch.float16)
        gemm(left, right, y, config=CONFIG, num_programs=1)
        assert_as_accurate(y, linear(left.double(), right.double()), linear(left, right))


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3)])
def test_gemm_of_nothing_does_nothing(shape):
    rows, columns, depth = shape
    gemm(
        torch.empty(rows, depth), torch.empty(columns, depth), torch.empty(rows, columns), config=CONFIG, num_programs=1
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w": torch.zeros(5, 6)}, r"x is \(4, 3\) and w is \(5, 6\); must be \[M, K\] and \[N, K\]"),
        ({"x": torch.zeros(2, 4, 3)}, r"x is \(2, 4, 3\)"),
        ({"y": torch.zeros(5, 4)}, r"output is \(5, 4\) .*must be \[M, N\] = \(4, 5\)"),
        ({"w": torch.zeros(5, 3).half()}, r"x is torch.float32 and w is torch.float16; must be of one type"),
        ({"y": torch.zeros(4, 5).double()}, r"output is torch.float64; must be float32, bfloat16 or float16"),
        ({"epilogue": Epilogue(torch.zeros(4))}, r"bias is \(4,\) .*must be \[N\] = \(5,\)"),
        ({"epilogue": Epilogue(torch.zeros(5).long())}, r"bias is torch.int64"),
        (
            {"epilogue": Epilogue(activation="relu")},
            r"activation='relu'; must be one of \(None, 'gelu', 'gelu_tanh', 'silu', 'swiglu'\)",
        ),
        ({"num_programs": 0}, r"num_programs=0; must be at least 1"),
        ({"w": torch.zeros(5, 3, device="meta")}, r"tensors are on cpu and meta; must be on one device"),
    ],
)
def test_gemm_rejects_what_does_not_fit(changes, message):
    arguments = {
        "x": torch.zeros(4, 3),
        "w": torch.zeros(5, 3),
        "y": torch.zeros(4, 5),
        "config": CONFIG,
        "num_programs": 1,
    }
    with pytest.raises(ValueError, match="gemm: .*" + message):
        gemm(**(arguments | changes))


def test_gemm_rejects_tensors_that_the_interpreter_cannot_reach():
    x, w, y = (torch.zeros(4, 4, device="meta") for _ in range(3))
    with pytest.raises(ValueError, match=r"tensors are on meta, .*interprets kernels on the CPU; .*TRITON_INTERPRET"):
        gemm(x, w, y, config=CONFIG, num_programs=1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tile_m": 100}, "tile_m=100; tiles are powers of two from 16"),
        ({"tile_k": 8}, "tile_k=8"),
        ({"num_warps": 3}, "num_warps=3"),
        ({"group_m": 0}, "group_m=0; must be at least 1"),
    ],
)
def test_config_rejects_impossible_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        GemmConfig(**sizes)
