"""Tests that need a GPU carry the marker `gpu`; without one they are skipped, and the summary says so."""

from __future__ import annotations

import os
import signal
import tempfile

import pytest
import torch

# What `auto` remembers stays out of the user's cache; set before any rank is forked.
_CACHE = tempfile.TemporaryDirectory()
os.environ["FUSEDCOMM_CACHE"] = _CACHE.name
# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; this machine has none"))
