"""The whole trainer on the fused kernels: its steps are those of one process."""

from __future__ import annotations

import pytest
from test_verify import report_of, tiny

# Layers and steps that the interpreter does in seconds.
LAYOUTS = {
    "tp": tiny(1, 1, 2, model__layers=2, tensor_parallel__method="fused"),
    "tp x pp": tiny(2, 1, 2, model__layers=2, tensor_parallel__method="fused"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify_passes_with_fused_kernels(layout, tmp_path):
    report = report_of(LAYOUTS[layout], tmp_path, steps=1)
    assert report["rows"]
