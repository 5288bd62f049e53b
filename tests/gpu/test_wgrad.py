"""Weight gradients of 16-bit operands, computed where fp32 gradients are kept."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_as_accurate
from place import INTERPRETED, poisoned, randn

from fusedcomm.ops.wgrad import WeightGradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_gradient_is_not_rounded_on_its_way_into_an_fp32_buffer(dtype):
    dy, x = randn(0, 3, 67, 48, dtype=dtype), randn(1, 3, 67, 40, dtype=dtype)
    out = poisoned(48, 40, dtype=torch.float32)
    WeightGradient(dy, [x]).add_to(out, overwrite=True)
    WeightGradient(dy, [x]).add_to(out)
    rows, columns = dy.flatten(0, 1).t(), x.flatten(0, 1)
    # A CPU has no such GEMM.
    plain = (rows @ columns).float() if INTERPRETED else rows.float() @ columns.float()
    assert_as_accurate(out, 2 * (rows.double() @ columns.double()), 2 * plain)
