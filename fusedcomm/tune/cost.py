"""How an op may run, judged by its sizes and a few seconds on which all ranks agree: so they come to one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fusedcomm.comm.hierarchical import CHUNK_BYTES
from fusedcomm.comm.ring import Direction
from fusedcomm.comm.transport import TRANSPORTS

# A GEMM cut into pieces of fewer rows loses 10-50 % to packing and launch costs (measured on CPUs).
_ROWS_PER_CHUNK = 128
_MAX_CHUNKS = 5
# Below this a chunk's own cost (a header, a message, a launch) is more than what overlapping it can hide.
_MIN_ROWS = 32
# What is expected to take so much longer than the best is not timed.
_WORTH = 1.2
# With fewer rows a fused kernel's chunk costs more, since copies of few megabytes are slow, than its early start gains.
_ROWS_PER_FUSED_CHUNK = 512
_MAX_FUSED_CHUNKS = 2
METHODS = ("auto", "serial", "chunked", "fused", *(f"fused:{name}" for name in TRANSPORTS))


@dataclass(frozen=True)
class Choice:
    """A method, its chunks, how rows travel (`comm.ring`), and the reason in words.

    Chunks are those of the shard that nothing hides (`comm.ring`), or, if it is fused, of every shard. `nodes` are
    those of the ranks, for the direction `by_node`. `transport` is that of a fused call, empty to let it choose.
    """

    method: Literal["serial", "chunked", "fused"]
    num_chunks: int
    reason: str
    direction: Direction = "pairs"
    nodes: tuple[int, ...] = ()
    transport: str = ""


@dataclass(frozen=True)
class Seconds:
    """What one call takes: not overlapped (`serial`), on the wire alone, and more for every piece of the GEMM."""

    serial: float
    wire: float
    piece: float


def check_method(method: str) -> None:
    """ValueError for a method that is unknown."""
    if method not in METHODS:
        named = ", ".join(repr(name) for name in METHODS if ":" in name)
        raise ValueError(
            f"method={method!r} is unknown; use 'auto', 'chunked', 'serial' or 'fused', which names its transport as "
            f"{named} if it is not to choose itself"
        )


def is_fused(method: str) -> bool:
    """Whether it asks for one kernel, by whatever transport."""
    return method.partition(":")[0] == "fused"


def serial(reason: str) -> Choice:
    return Choice("serial", 1, reason)


def chunked(reason: str, *, world: int, rows: int) -> Choice:
    """Chunked, with as many chunks as leave each enough of the `rows` that are split over `world` ranks."""
    num_chunks = 1
    # The smallest of n tapered chunks is 1 / 2^(n - 1) of a shard.
    while num_chunks < _MAX_CHUNKS and (rows // world) >> num_chunks >= _ROWS_PER_CHUNK:
        num_chunks += 1
    return Choice("chunked", num_chunks, reason)


def fused(reason: str, *, world: int, rows: int, transport: str = "") -> Choice:
    """Fused, with as many chunks a shard as leave each enough rows."""
    num_chunks = rows // world // _ROWS_PER_FUSED_CHUNK
    num_chunks = max(1, min(_MAX_FUSED_CHUNKS, num_chunks))
    return Choice("fused", num_chunks, reason, transport=transport)


def asked_for(method: str, *, world: int, rows: int) -> Choice:
    """By a method that is not `auto`."""
    check_method(method)
    name, _, transport = method.partition(":")
    if name == "serial":
        return serial("asked for")
    if name == "chunked":
        return chunked("asked for", world=world, rows=rows)
    return fused("asked for", world=world, rows=rows, transport=transport)


def candidates(*, world: int, rows: int) -> list[Choice]:
    """What may be worth timing for `auto`, serial first; alone if there is too little to hide behind."""
    shard_rows = -(-rows // world)
    if shard_rows < _MIN_ROWS:
        return [serial(f"{shard_rows} rows a shard are fewer than {_MIN_ROWS}: nothing to hide behind")]
    most = chunked("", world=world, rows=rows).num_chunks
    return [serial("timed"), *(Choice("chunked", count, "timed") for count in range(1, most + 1))]


@dataclass(frozen=True)
class Link:
    """What a message costs: seconds before its first byte, and bytes per second after that."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Links:
    """A rank's link inside its node, and a node's link to the others, which its ranks share."""

    in_node: Link
    across: Link


ALGORITHMS = ("ring", "tree", "hierarchical")


def fastest_algorithm(num_bytes: int, nodes: Sequence[int], links: Links) -> str:
    """Which of `ALGORITHMS` sums a buffer over ranks on these nodes (one entry a rank) soonest.

    The tree only where latency is most of its time. What the links are kept busy with, the buffers behind this one have
    to wait for as well, while latencies pass side by side; and a tree moves all of a buffer in each of its rounds.
    """
    costs_s = {algorithm: all_reduce_s(algorithm, num_bytes, nodes, links) for algorithm in ALGORITHMS}
    if costs_s["tree"] > 2 * all_reduce_s("tree", 0, nodes, links):
        del costs_s["tree"]
    return min(costs_s, key=costs_s.__getitem__)


def all_reduce_s(algorithm: str, num_bytes: int, nodes: Sequence[int], links: Links) -> float:
    """Seconds that the algorithm needs, by latency and rate of the busiest link; infinite where it cannot run."""
    world = len(nodes)
    if algorithm == "ring":
        flows = [(rank, (rank + 1) % world) for rank in range(world)]
        return 2 * (world - 1) * _round_s(num_bytes / world, flows, nodes, links)
    if algorithm == "tree":
        power = 1 << (world.bit_length() - 1)
        extra = [(rank, rank - power) for rank in range(power, world)]
        rounds = [[(rank, rank ^ (1 << bit)) for rank in range(power)] for bit in range(power.bit_length() - 1)]
        rounds += [extra, [(dst, src) for src, dst in extra]]
        return sum(_round_s(num_bytes, flows, nodes, links) for flows in rounds if flows)
    return _hierarchical_s(num_bytes, nodes, links)


def _round_s(num_bytes: float, flows: Sequence[tuple[int, int]], nodes: Sequence[int], links: Links) -> float:
    """Seconds until `num_bytes` have gone from src to dst of all flows at once."""
    crossing = [nodes[src] for src, dst in flows if nodes[src] != nodes[dst]]
    inside_s = links.in_node.latency_s + num_bytes / links.in_node.bytes_per_s if len(crossing) < len(flows) else 0.0
    if not crossing:
        return inside_s
    busiest = max(crossing.count(node) for node in crossing)
    return max(inside_s, links.across.latency_s + busiest * num_bytes / links.across.bytes_per_s)


def _hierarchical_s(num_bytes: int, nodes: Sequence[int], links: Links) -> float:
    sizes = {nodes.count(node) for node in nodes}
    if len(sizes) > 1:
        return float("inf")
    (per_node,) = sizes
    num_nodes = len(nodes) // per_node
    # Bytes that a rank sends in its node, and a node to the others, each half of them in the summands' phase.
    inside_s = 2 * (per_node - 1) / per_node * num_bytes / links.in_node.bytes_per_s
    across_s = 2 * (num_nodes - 1) / num_nodes * num_bytes / links.across.bytes_per_s
    latency_s = 2 * (per_node > 1) * links.in_node.latency_s + 2 * (num_nodes > 1) * links.across.latency_s
    # The phases run side by side but for the first and the last chunk.
    num_chunks = max(1, num_bytes / CHUNK_BYTES)
    return latency_s + max(inside_s, across_s) + min(inside_s, across_s) / num_chunks


def expected_s(num_chunks: int, seconds: Seconds, world: int) -> float:
    """Of a chunked call: the longer of GEMM and wire, and what nothing can hide of the other."""
    wire = min(seconds.wire, seconds.serial)
    gemm = seconds.serial - wire
    last_chunk = gemm / world / 2 ** (num_chunks - 1)
    # The own shard, those that travel whole, and the chunks of the last one.
    num_pieces = world - 1 + num_chunks
    return max(gemm + num_pieces * seconds.piece, wire + last_chunk + seconds.piece)


def expected_fused_s(num_chunks: int, seconds: Seconds, world: int) -> float:
    """Of a fused call: the longer of GEMM and wire, and what nothing can hide of the other; no piece costs more."""
    wire = min(seconds.wire, seconds.serial)
    gemm = seconds.serial - wire
    return max(gemm, wire + gemm / world / num_chunks)


def worth_timing(
    options: Sequence[Choice], seconds: Seconds, *, directions: Sequence[Direction], nodes: Sequence[int]
) -> list[Choice]:
    """Those of the `candidates`, and of fused ones, that may be the fastest, and the other `directions` with the best.

    Which direction is best depends on which ranks share which links, which only timing tells; but in a ring of two
    there is one way, and going by `nodes`, one entry a rank, needs several with equally many ranks each.
    """
    world = len(nodes)
    models = {"chunked": expected_s, "fused": expected_fused_s}
    expected = {option: models[option.method](option.num_chunks, seconds, world) for option in options[1:]}
    limit_s = _WORTH * min(expected.values())
    worth = [option for option in expected if expected[option] <= limit_s]
    # What a direction is tried with.
    best = min((option for option in expected if option.method == "chunked"), key=expected.__getitem__)
    for direction in directions:
        if direction == "by_node":
            counts = {nodes.count(node) for node in nodes}
            if len(counts) == 1 and 1 < max(counts) < world:
                worth.append(replace(best, direction=direction, nodes=tuple(nodes)))
        elif world > 2:
            worth.append(replace(best, direction=direction))
    return [options[0], *worth]
