"""Tests that need a GPU carry the marker `gpu`; without one they are skipped, and the summary says so."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; this machine has none"))
