"""The kernels compiled, on a GPU; with TRITON_INTERPRET=1 the same cases, small, on the CPU: a typo shows there."""

from __future__ import annotations

import os

import pytest

# Before CUDA is initialised: streams that share a queue of the hardware would wait for each other's kernels.
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"

import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; this machine has none"))


@pytest.fixture(scope="session")
def device():
    from place import open_device

    return open_device()
