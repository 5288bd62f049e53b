"""How an op should run, from its sizes alone, so that every rank comes to the same answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["auto", "serial", "chunked", "fused"]

# Measured: a GEMM cut into pieces of fewer rows loses 10-50 % to packing and launch costs.
_ROWS_PER_CHUNK = 256
_MAX_CHUNKS = 4
# Below this a chunk's own cost (a header, a message, a launch) is more than what overlapping it can hide.
_MIN_ROWS = 32


@dataclass(frozen=True)
class Choice:
    """A method that can run, the number of chunks per shard, and the reason in words."""

    method: Literal["serial", "chunked"]
    num_chunks: int
    reason: str


def choose(method: str, *, world: int, rows: int) -> Choice:
    """Choose for a GEMM of `rows` rows that are split over `world` ranks.

    Raises:
        ValueError: an unknown method, or one that this version cannot run.
    """
    shard_rows = -(-rows // world)
    num_chunks = min(_MAX_CHUNKS, max(1, shard_rows // _ROWS_PER_CHUNK))
    if method == "serial":
        return Choice("serial", num_chunks, "asked for")
    if method == "chunked":
        return Choice("chunked", num_chunks, "asked for")
    if method == "fused":
        raise ValueError(
            "method='fused' cannot run: its transports are not part of this version; use 'auto', 'chunked' or 'serial'"
        )
    if method != "auto":
        raise ValueError(f"method={method!r} is unknown; use 'auto', 'chunked', 'serial' or 'fused'")
    if shard_rows < _MIN_ROWS:
        return Choice("serial", 1, f"{shard_rows} rows a shard are fewer than {_MIN_ROWS}: nothing to hide behind")
    return Choice("chunked", num_chunks, f"{shard_rows} rows a shard in {num_chunks} chunks")
