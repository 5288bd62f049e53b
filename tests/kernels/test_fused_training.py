"""The whole trainer on the fused kernels: its steps are those of one process."""

from __future__ import annotations

import pytest
from test_verify import report_of, tiny

# Layers and steps that the interpreter does in seconds.
FUSED = {"model__layers": 2, "tensor_parallel__method": "fused"}
LAYOUTS = {
    "tp": tiny(1, 1, 2, **FUSED),
    "tp x pp": tiny(2, 1, 2, **FUSED),
    "tp x pp, weight gradients put off": tiny(2, 1, 2, **FUSED, pipeline_parallel__schedule="zero_bubble"),
    "tp in turns": tiny(1, 1, 2, **FUSED, tensor_parallel__tp_sync="interleave"),
    "tp in a ladder": tiny(1, 1, 2, **FUSED, tensor_parallel__tp_sync="ladder"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify_passes_with_fused_kernels(layout, tmp_path):
    report = report_of(LAYOUTS[layout], tmp_path, steps=1)
    assert report["rows"]
