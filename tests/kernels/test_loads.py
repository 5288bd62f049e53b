"""Operands through TMA descriptors, and through pointers where TMA cannot take them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from helpers import assert_as_accurate
from peers import CONFIG, poisoned
from torch import Tensor
from torch.nn.functional import linear

from fusedcomm.kernels.gemm import Load, choose_load, gemm

TMA = replace(CONFIG, tma=True)
TIMES = {torch.float32: 2.0, torch.float16: 2.0, torch.bfloat16: 3.0}


def check_gemm(x: Tensor, w: Tensor, paths: tuple[str, str]):
    y = poisoned(len(x), len(w), dtype=x.dtype)
    loads = gemm(x, w, y, config=TMA, num_programs=2)
    assert (loads.x.path, loads.w.path) == paths
    assert_as_accurate(y, linear(x.double(), w.double()), linear(x, w), times=TIMES[x.dtype])


@pytest.mark.parametrize("dtype", TIMES)
def test_tma_gives_the_products_of_forward_and_backward(dtype):
    generator = torch.Generator().manual_seed(0)
    x, dy, w = (torch.randn(*shape, generator=generator).to(dtype) for shape in [(40, 72), (40, 48), (48, 72)])
    check_gemm(x, w, ("tma", "tma"))
    check_gemm(dy, w.T, ("tma", "tma_transposed"))
    check_gemm(dy.T, x.T, ("tma_transposed", "tma_transposed"))


def test_pointers_load_what_tma_cannot():
    x, w = torch.randn(40, 45), torch.randn(50, 45)
    check_gemm(x, w, ("pointer", "pointer"))
    wide = torch.randn(40, 90)
    check_gemm(wide[:, ::2], w, ("pointer", "pointer"))
    check_gemm(torch.randn(40, 48)[:, :45], w, ("tma", "pointer"))


@pytest.mark.parametrize(
    ("operand", "num_tensors", "reason"),
    [
        (torch.zeros(4, 45), 1, r"strides \(45, 1\) of torch.float32 .* needs multiples of 16 bytes"),
        (torch.zeros(4, 64)[:, 1:], 1, "multiples of 16 bytes"),
        (torch.zeros(4, 64)[:, ::2], 1, r"strides \(64, 2\); TMA needs one of them to be 1"),
        (torch.zeros(1, 64).expand(4, 64), 1, "multiples of 16 bytes"),
        (torch.zeros(4, 64), 2, "a TMA descriptor holds one weight, not 2"),
    ],
)
def test_the_reason_for_pointers_is_reported(operand, num_tensors, reason):
    load = choose_load(TMA, operand, num_tensors)
    assert load.path == "pointer"
    assert re.search(reason, load.reason)


def test_nothing_is_reported_where_pointers_were_asked_for():
    assert choose_load(CONFIG, torch.zeros(4, 64)) == Load("pointer", "")
