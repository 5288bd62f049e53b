"""The rows of the GPU benchmark, as JSON and as Markdown, and whether they reach what is asked of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Asked of the GEMM from so many rows on.
_ROWS_OF_ROOF = 2048
# Less than this share of the communication is none.
_NOTHING = 0.01


@dataclass(frozen=True)
class GpuRow:
    """One method at one shape; times are medians over rounds, of one run, and ratios medians within a round."""

    op: str
    model: str
    world: int
    dtype: str
    # M, N, K of the GEMM that one rank runs.
    shape: tuple[int, int, int]
    config: str
    # Time of the wire over that of the GEMM as asked for; None: nothing travels.
    link: float | None
    method: str
    # Chunks of a shard.
    pieces: int
    median_us: float
    p25_us: float
    p75_us: float
    # cuBLAS's time over this method's: above 1 ours is faster. Of `roof` alone.
    vs_cublas: float | None
    # What waiting for flags that are up, or raising them, adds to `roof`, as a share of it. Of `hook` alone.
    overhead: float | None
    # Of methods with a link: the time of what travels, moved alone; `serial`'s time over this method's; the share of
    # the communication that is hidden; and the share that a perfect tile schedule would hide (of `fused`).
    wire_us: float | None
    vs_serial: float | None
    efficiency: float | None
    bound: float | None
    rounds: int
    # Its result was compared with an fp64 reference, by the tolerance rule.
    checked: bool
    machine: str


def write_json(path: Path, rows: Sequence[GpuRow]) -> None:
    """A list of objects, one a line."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def markdown(rows: Sequence[GpuRow]) -> str:
    """Two tables: GEMMs and what the hooks cost, and methods over links."""
    parts = [_gemm_table(rows), _link_table(rows), "\n".join(f"- {line}" for line in verdicts(rows))]
    parts.append(f"Measured on {', '.join(sorted({row.machine for row in rows}))}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def verdicts(rows: Sequence[GpuRow]) -> list[str]:
    """What is asked of the kernels, and at how many shapes it was reached."""
    fused = [row for row in rows if row.method == "fused"]
    return [
        line
        for line in (
            _verdict(
                f"GEMM >= 0.95 of cuBLAS from {_ROWS_OF_ROOF} rows",
                [row for row in rows if row.method == "roof" and row.shape[0] >= _ROWS_OF_ROOF],
                lambda row: row.vs_cublas,
                lambda ratio: ratio >= 0.95,
            ),
            *(
                _verdict(
                    f"{hook} costs <= {limit:.0%}",
                    [row for row in rows if row.method == "hook" and row.op == op],
                    lambda row: row.overhead,
                    lambda share, limit=limit: share <= limit,
                )
                for op, hook, limit in (
                    ("all_gather_matmul", "the wait hook", 0.02),
                    ("matmul_reduce_scatter", "the publish hook", 0.03),
                )
            ),
            _verdict(
                "overlap efficiency >= 0.95 of the bound",
                fused,
                _of_bound,
                lambda ratio: ratio >= 0.95,
            ),
            _verdict("fused is never slower than serial", fused, lambda row: row.vs_serial, lambda ratio: ratio >= 1.0),
        )
        if line
    ]


def _verdict(
    rule: str,
    rows: Sequence[GpuRow],
    value_of: Callable[[GpuRow], float | None],
    holds: Callable[[float], bool],
) -> str:
    values = [value for row in rows if (value := value_of(row)) is not None]
    if not values:
        return ""
    reached = sum(map(holds, values))
    return (
        f"{rule}: {reached} of {len(values)} shapes (median {statistics.median(values):.3f}, "
        f"{min(values):.3f} to {max(values):.3f})"
    )


def _gemm_table(rows: Sequence[GpuRow]) -> str:
    lines = [
        "| GEMM of | model | M, N, K | tiles | cuBLAS us | ours us | cuBLAS / ours | hook |",
        "| --- | --- | --: | --- | --: | --: | --: | --: |",
    ]
    groups = _grouped([row for row in rows if row.link is None])
    for group in groups:
        methods = {row.method: row for row in group}
        cublas, roof, hook = (methods[name] for name in ("cublas", "roof", "hook"))
        cells = (
            *(roof.op, roof.model, _shape(roof), roof.config),
            *(_us(cublas), _us(roof), _ratio(roof.vs_cublas), _percent(hook.overhead)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if groups else ""


def _link_table(rows: Sequence[GpuRow]) -> str:
    lines = [
        "| op | model | M, N, K | wire / GEMM | wire us | serial us | chunked: us, vs serial "
        "| fused: us, vs serial | pieces | hidden: chunked, fused | bound | of the bound |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    groups = _grouped([row for row in rows if row.link is not None])
    for group in groups:
        methods = {row.method: row for row in group}
        serial, chunked, fused = (methods[name] for name in ("serial", "chunked", "fused"))
        cells = (
            *(fused.op, fused.model, _shape(fused), f"{fused.link:g}", f"{fused.wire_us:.0f}", _us(serial)),
            *(f"{_us(row)}, {_ratio(row.vs_serial)}" for row in (chunked, fused)),
            *(str(fused.pieces), f"{_ratio(chunked.efficiency)}, {_ratio(fused.efficiency)}"),
            *(_ratio(fused.bound), _ratio(_of_bound(fused))),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if groups else ""


def _grouped(rows: Sequence[GpuRow]) -> list[list[GpuRow]]:
    """The rows of one shape and link together."""
    found: dict[object, list[GpuRow]] = {}
    for row in rows:
        found.setdefault((row.op, row.world, row.dtype, row.shape, row.link), []).append(row)
    return list(found.values())


def _of_bound(row: GpuRow) -> float | None:
    """Efficiency over its bound; None where nothing can hide, as in a GEMM of one wave."""
    if row.efficiency is None or row.bound is None or row.bound < _NOTHING:
        return None
    return row.efficiency / row.bound


def _shape(row: GpuRow) -> str:
    return ", ".join(map(str, row.shape))


def _us(row: GpuRow) -> str:
    return f"{row.median_us:.0f}" + ("" if row.checked else " WRONG")


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
