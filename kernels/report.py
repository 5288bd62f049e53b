"""What `fusedcomm kernels` prints: every kernel compiled for a GPU that need not be here, and whether it can run."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
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


def print_rows(rows: Sequence[Row]) -> None:
    """A table for the console, and how many kernels run."""
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", "config", "dtype", title=f"kernels on {rows[0].target}")
    for name in ("registers", "spilled", "shared", "tensor ops", "async loads"):
        table.add_column(name, justify="right")
    table.add_column("runs")
    for row in rows:
        counts = (row.registers, row.spill_bytes, row.shared_bytes, row.tensor_core_ops, row.async_loads)
        table.add_row(row.kernel, row.config, row.dtype, *map(str, counts), "yes" if row.fits else f"no: {row.reason}")
    # Where the output is no terminal, nothing is cut to the width of one.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    wrong = sum(row.is_wrong for row in rows)
    print(f"{sum(row.fits for row in rows)} of {len(rows)} run, {wrong} should and do not")


def write_json(rows: list[Row], path: Path) -> None:
    """Writes the rows as a list of objects."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def _num_rows(arch: Architecture) -> int:
    from fusedcomm.kernels.machine_code import shipped

    return len(list(shipped(arch)))


def _row(arch: Architecture, place: int) -> Row:
    from fusedcomm.kernels.machine_code import compile_row, shipped

    return compile_row(*list(shipped(arch))[place], arch)
