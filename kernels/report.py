"""What `fusedcomm kernels` prints: every kernel compiled for a GPU that need not be here, and whether it can run."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from fusedcomm.kernels.config import Architecture, architecture
from fusedcomm.kernels.row import Row


def compile_all(target: str) -> Iterator[Row]:
    """Compiles every kernel, configuration and type for a target, one process a core; ValueError if it is unknown."""
    arch = architecture(target)
    # Triton compiles only where it was imported without this, and the processes started here are to.
    os.environ.pop("TRITON_INTERPRET", None)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        num_rows = pool.submit(_num_rows, arch).result()
        yield from pool.map(_row, [arch] * num_rows, range(num_rows))


def write_json(rows: list[Row], path: Path) -> None:
    """Writes the rows as a list of objects."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def _num_rows(arch: Architecture) -> int:
    from fusedcomm.kernels.machine_code import shipped

    return len(list(shipped(arch)))


def _row(arch: Architecture, place: int) -> Row:
    from fusedcomm.kernels.machine_code import compile_row, shipped

    return compile_row(*list(shipped(arch))[place], arch)
