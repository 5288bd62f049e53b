"""A benchmark's rows: as JSON, as a table, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Ours that a summary shows: what runs by default, and what else a user would choose.
_SHOWN = ("auto", "backward", "backward+forward", "zero1", "fsdp", "int8")


@dataclass(frozen=True)
class Row:
    """One method of one benchmark."""

    op: str
    world: int
    dtype: str
    # M, N, K of the GEMM that one rank runs.
    shape: tuple[int, int, int]
    # None: loopback, not shaped.
    link_gbps: float | None
    method: str
    num_chunks: int
    median_s: float
    p25_s: float
    p75_s: float
    # The GEMMs alone; the least bytes that must leave a node over the link's rate (loopback: the transfers alone).
    gemm_s: float
    wire_s: float
    # max(gemm_s, wire_s) / median_s
    of_ideal: float
    # Medians of the ratios of a round: above 1 this method is faster. None: the baseline was not run.
    vs_serial: float | None
    vs_torch: float | None
    # Sent by the busiest node in one run, counted from its interface with headers. None on loopback.
    wire_bytes: int | None
    checked: bool
    note: str
    # What `serial` moves, moved alone.
    transfer_s: float
    rounds: int
    machine: str
    # Whose ranks share a link each; None: every rank has its own.
    nodes: int | None = None
    # Pipeline x data x tensor, where it was asked for.
    layout: str | None = None


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """A list of objects, one a line."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read_json(path: Path) -> list[Row]:
    """Rows that `write_json` wrote."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**{**row, "shape": tuple(row["shape"])}) for row in rows]


def summary(rows: Sequence[Row]) -> str:
    """A table for a README: a line for each of our methods, beside `serial` and torch's."""
    lines = [
        "| what | ours | ms | limit | of the limit | serial | vs serial | torch | vs torch |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for benchmark in benchmarks(rows):
        serial = next((_ms(row.median_s) for row in benchmark if row.method == "serial"), "-")
        torchs = next((_ms(row.median_s) for row in benchmark if row.vs_torch == 1.0), "-")
        for row in benchmark:
            if row.method in _SHOWN:
                limit = _ms(max(row.gemm_s, row.wire_s))
                ours = (title_of(row), row.method, _ms(row.median_s), limit, f"{row.of_ideal:.2f}")
                cells = (*ours, serial, _ratio(row.vs_serial), torchs, _ratio(row.vs_torch))
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """A table of all rows."""
    lines = [
        "| what | method | ms (quartiles) | limit | of the limit | vs serial | vs torch | MB sent |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for row in (row for benchmark in benchmarks(rows) for row in benchmark):
        cells = (
            title_of(row),
            row.method,
            f"{_ms(row.median_s)} ({_ms(row.p25_s)}-{_ms(row.p75_s)})",
            _ms(max(row.gemm_s, row.wire_s)),
            f"{row.of_ideal:.2f}",
            _ratio(row.vs_serial),
            _ratio(row.vs_torch),
            _megabytes(row),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Measured on {', '.join(sorted({row.machine for row in rows}))}."])


def write_table(rows: Sequence[Row]) -> None:
    """To the terminal."""
    from rich.console import Console
    from rich.table import Column, Table

    first = rows[0]
    numbers = ("ms", "quartiles", "of ideal", "vs serial", "vs torch", "MB sent")
    table = Table(
        Column("method", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in numbers),
        Column("chunks", justify="right", no_wrap=True),
        box=None,
        title=f"GEMM {first.gemm_s * 1e3:.2f} ms, wire {first.wire_s * 1e3:.2f} ms, {first.rounds} rounds",
    )
    for row in rows:
        table.add_row(
            row.method if row.checked else f"{row.method} [red]WRONG",
            f"{row.median_s * 1e3:.2f}",
            f"{row.p25_s * 1e3:.2f}-{row.p75_s * 1e3:.2f}",
            f"{row.of_ideal:.3f}",
            _ratio(row.vs_serial),
            _ratio(row.vs_torch),
            _megabytes(row),
            str(row.num_chunks),
        )
    # On a narrower terminal lines break, in place of numbers that lose their digits.
    Console(width=max(Console().width, 120)).print(table)
    for row in rows:
        if row.note:
            print(f"{row.method}: {row.note}")


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """Each method's time as compute and the communication that it leaves exposed; one panel per benchmark."""
    from matplotlib import pyplot

    panels = benchmarks(rows)
    num_columns = min(3, len(panels))
    num_lines = -(-len(panels) // num_columns)
    width = 1.6 + 0.95 * max(len(panel) for panel in panels)
    figure, grid = pyplot.subplots(
        num_lines, num_columns, figsize=(width * num_columns, 4.0 * num_lines), layout="constrained", squeeze=False
    )
    for axes, panel in zip(grid.flat, panels):
        _draw_panel(axes, panel)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def benchmarks(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each benchmark together: those of one op, world, dtype, shape, link and layout."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault((row.op, row.world, row.dtype, row.shape, row.link_gbps, row.nodes, row.layout), []).append(
            row
        )
    return list(found.values())


def title_of(row: Row) -> str:
    """What the row's benchmark is."""
    link = "loopback" if row.link_gbps is None else f"{row.link_gbps:.3g} Gbit/s"
    ranks = f"{row.world} ranks" if row.nodes is None else f"{row.world} ranks on {row.nodes} nodes"
    if row.layout is not None:
        ranks += f" as {row.layout}"
    return f"{row.op}, {ranks}, {row.dtype}, M,N,K = {','.join(map(str, row.shape))}, {link}"


def _draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    names = [row.method for row in rows]
    compute_ms = [min(row.gemm_s, row.median_s) * 1e3 for row in rows]
    exposed_ms = [row.median_s * 1e3 - compute for row, compute in zip(rows, compute_ms)]
    # Distances from the median to the quartiles.
    spread_ms = [[(row.median_s - row.p25_s) * 1e3 for row in rows], [(row.p75_s - row.median_s) * 1e3 for row in rows]]
    axes.bar(names, compute_ms, color="#4c9f70", label="compute")
    axes.bar(names, exposed_ms, bottom=compute_ms, color="#d9534f", label="exposed communication", yerr=spread_ms)
    limit_ms = max(rows[0].gemm_s, rows[0].wire_s) * 1e3
    axes.axhline(limit_ms, color="black", linestyle="--", linewidth=1, label="limit: max(GEMM, wire)")
    for index, row in enumerate(rows):
        axes.annotate(f"{row.of_ideal:.0%}", (index, compute_ms[index] / 2), ha="center", va="center", color="white")
    axes.set_ylabel("ms (bars: quartiles; numbers: limit / time)")
    axes.set_title(title_of(rows[0]), fontsize=9)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _megabytes(row: Row) -> str:
    return "-" if row.wire_bytes is None else f"{row.wire_bytes / 1e6:.2f}"
