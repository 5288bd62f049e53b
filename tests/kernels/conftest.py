"""The kernels in Triton's interpreter, which Triton chooses for the process when it is first imported."""

from __future__ import annotations

import os
import sys

import torch

if "triton" in sys.modules:
    raise RuntimeError("tests/kernels: Triton is imported already; run these tests in a process of their own")
os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)
