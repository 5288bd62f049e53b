"""How an op may run, judged by its sizes alone, so that every rank comes to the same answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A GEMM cut into pieces of fewer rows loses 10-50 % to packing and launch costs (measured on CPUs).
_ROWS_PER_CHUNK = 128
_MAX_CHUNKS = 5
# Below this a chunk's own cost (a header, a message, a launch) is more than what overlapping it can hide.
_MIN_ROWS = 32
METHODS = ("auto", "serial", "chunked", "fused")


@dataclass(frozen=True)
class Choice:
    """A method, the chunks of the shard that nothing hides (`comm.ring`), and the reason in words."""

    method: Literal["serial", "chunked"]
    num_chunks: int
    reason: str


def check_method(method: str) -> None:
    """ValueError for a method that is unknown, or that this version cannot run."""
    if method == "fused":
        raise ValueError(
            "method='fused' cannot run: its transports are not part of this version; use 'auto', 'chunked' or 'serial'"
        )
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use 'auto', 'chunked', 'serial' or 'fused'")


def serial(reason: str) -> Choice:
    return Choice("serial", 1, reason)


def chunked(reason: str, *, world: int, rows: int) -> Choice:
    """Chunked, with as many chunks as leave each enough of the `rows` that are split over `world` ranks."""
    num_chunks = 1
    # The smallest of n tapered chunks is 1 / 2^(n - 1) of a shard.
    while num_chunks < _MAX_CHUNKS and (rows // world) >> num_chunks >= _ROWS_PER_CHUNK:
        num_chunks += 1
    return Choice("chunked", num_chunks, reason)


def candidates(*, world: int, rows: int) -> list[Choice]:
    """What is worth timing for `auto`, serial first; alone if there is too little to hide behind."""
    shard_rows = -(-rows // world)
    if shard_rows < _MIN_ROWS:
        return [serial(f"{shard_rows} rows a shard are fewer than {_MIN_ROWS}: nothing to hide behind")]
    most = chunked("", world=world, rows=rows).num_chunks
    return [serial("timed"), *(Choice("chunked", count, "timed") for count in range(1, most + 1))]
