"""Who may import whom, and what importing the package needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Leftmost knows nothing of the rest.
ORDER = [
    {"errors"},
    {"kernels"},
    {"comm"},
    {"tune"},
    {"ops", "reference"},
    {"nn"},
    {"parallel"},
    {"train"},
    {"plan"},
    {"bench"},
    {"cli"},
]
# Folders beside the package, which holds symlinks to them.
LINKED = ("kernels", "bench")
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def violations(room: str, source: str) -> list[str]:
    """Imports of fusedcomm rooms to the right of `room`, or of another room on its level."""
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            parts = module.split(".")
            if parts[0] != "fusedcomm" or len(parts) < 2 or parts[1] == room:
                continue
            if LEVEL.get(parts[1], -1) >= LEVEL[room]:
                found.append(f"{room} imports {module}")
    return found


def sources():
    for path in sorted((ROOT / "fusedcomm").rglob("*.py")):
        parts = path.relative_to(ROOT / "fusedcomm").with_suffix("").parts
        if parts[0] in ("__init__", "__main__", *LINKED):
            continue
        yield parts[0], path
    for room in LINKED:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield room, path


@pytest.mark.parametrize(
    ("room", "path"), [pytest.param(*pair, id=str(pair[1].relative_to(ROOT))) for pair in sources()]
)
def test_imports_go_one_way(room, path):
    assert room in LEVEL, f"{path.name} is in no room of the design"
    assert violations(room, path.read_text()) == []


def test_the_rule_can_fail():
    assert violations("ops", "from fusedcomm.nn import MLP") == ["ops imports fusedcomm.nn"]
    assert violations("kernels", "import fusedcomm.comm.ring") == ["kernels imports fusedcomm.comm.ring"]
    assert violations("nn", "from fusedcomm.ops import all_gather_matmul") == []


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize(
    "module", ["fusedcomm", "fusedcomm.ops", "fusedcomm.nn", "fusedcomm.kernels", "fusedcomm.parallel"]
)
def test_the_library_needs_only_torch_and_einops(module):
    # Blocks what serves the trainer and the command line alone; triton too, which is optional at import.
    run_python(
        "import sys\n"
        "for name in ('pydantic', 'yaml', 'rich', 'typer', 'safetensors', 'matplotlib', 'tokenizers', 'triton'):\n"
        "    sys.modules[name] = None\n"
        f"import {module}\n"
    )


@pytest.mark.parametrize("room", LINKED)
def test_an_uninstalled_checkout_holds_the_folders_beside_the_package(room):
    run_python(f"import pathlib, fusedcomm.{room} as m; assert pathlib.Path(m.__file__).parent.name == '{room}'")


def test_a_kernel_without_triton_says_so():
    run_python(
        "import sys; sys.modules['triton'] = None\n"
        "try:\n"
        "    import fusedcomm.kernels.gemm\n"
        "except ImportError as error:\n"
        "    assert 'Triton is not installed' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )


# On a GPU machine torch, Triton and these are all there is (`make gpu`).
GPU_MACHINE = ("torch", "triton", "einops", "numpy", "pytest", "hypothesis", "yaml", "rich", "typer", "matplotlib")


def test_the_gpu_run_needs_no_more_than_a_gpu_machine_has():
    # Everything else that an installed distribution of ours asks for is blocked: pydantic above all.
    blocked = {"pydantic", "safetensors", "tokenizers", "tensorboard", "transformers"}
    assert not blocked & {*GPU_MACHINE}
    run_python(
        "import os, sys\n"
        f"for name in {sorted(blocked)}:\n"
        "    sys.modules[name] = None\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "import pytest\n"
        "import fusedcomm.bench.gpu\n"
        "import fusedcomm.comm.simulated\n"
        "assert pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', '-p', 'no:timeout', 'tests/gpu']) == 0\n"
    )
