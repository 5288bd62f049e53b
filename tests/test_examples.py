"""What the README shows runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusedcomm.train.config import load_config
from fusedcomm.train.layout import validate_for_world

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_example_learns_alike_on_one_and_two_ranks():
    losses = {}
    for ranks in (1, 2):
        output = run(*TORCHRUN, str(ranks), "examples/tensor_parallel_mlp.py")
        found = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
        assert len(found) == ranks
        losses[ranks] = sum(found) / ranks
    assert losses[1] < 0.1
    assert losses[2] == pytest.approx(losses[1], rel=0.1)


def test_the_readme_shows_the_examples_that_are_tested():
    readme = (ROOT / "README.md").read_text()
    for name in ("tensor_parallel_mlp.py", "ops.py"):
        assert (ROOT / "examples" / name).read_text().strip() in readme, f"README.md and examples/{name} differ"


def test_the_ops_example_runs():
    assert run(*TORCHRUN, "2", "examples/ops.py").count("(512, 256) (256, 64)") == 2


CONFIGURATIONS = sorted({*(ROOT / "examples").glob("*.yaml")} - {ROOT / "examples" / "cluster.yaml"})


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.name)
def test_every_example_configuration_fits_its_world(path):
    config = load_config(path)
    validate_for_world(config, config.parallel_config.world)
