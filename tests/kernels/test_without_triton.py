from __future__ import annotations

import os
import subprocess
import sys

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import fusedcomm.kernels
from fusedcomm.kernels.config import GemmConfig
try:
    from fusedcomm.kernels.gemm import gemm
except ModuleNotFoundError as error:
    print(error)
"""


def test_kernels_import_without_triton_and_say_what_is_missing():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WITHOUT_TRITON]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == (
        "fusedcomm.kernels: Triton is not installed; the kernels need it (Linux: pip install triton); "
        "every other method works without it"
    )
