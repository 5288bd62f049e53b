"""The chunk schedule as data: who sends which rows to whom at which step.

Ranks stand in a ring, and at distance 1, 2, ... W-1 every rank exchanges with exactly one other: it sends on its
one outgoing link and receives on its one incoming link, so no two transfers of a step share a link. Rows go
straight from owner to user (a forwarding ring would move the same bytes and add a dependency per hop).

- All-gather: at distance `d` a rank sends its own rows to `rank - d` and receives those of `rank + d`. Rows arrive
  in the order own, rank+1, rank+2, ..., in which they are then used.
- Reduce-scatter: the same with the direction turned round. A rank computes the partial sums of `rank + d` and sends
  them to their owner, while those for its own rows come in from `rank - d`. Its own rows are computed last.

A shard may be cut into several chunks; the chunks of one distance follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Chunk:
    """Rows `start:stop` of the full tensor, owned by rank `owner`; they travel and become ready together."""

    owner: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """What one rank moves at one step; `None` where the rows would be empty."""

    distance: int
    dst: int
    send: Chunk | None
    src: int
    recv: Chunk | None


def chunk_sizes(total: int, world: int) -> tuple[int, ...]:
    """Rows per rank, cut as `torch.chunk` would and filled up with empty shards to `world` entries."""
    per_rank = -(-total // world) if total else 0
    return tuple(min(per_rank, max(0, total - rank * per_rank)) for rank in range(world))


def cut(sizes: Sequence[int], num_chunks: int) -> tuple[tuple[Chunk, ...], ...]:
    """Every rank's shard in at most `num_chunks` chunks of nearly equal size; an empty shard has none."""
    shards: list[tuple[Chunk, ...]] = []
    begin = 0
    for owner, size in enumerate(sizes):
        pieces = min(num_chunks, size)
        bounds = [begin + size * piece // pieces for piece in range(pieces + 1)] if pieces else [begin]
        shards.append(tuple(Chunk(owner, start, stop) for start, stop in pairwise(bounds)))
        begin += size
    return tuple(shards)


def all_gather_steps(rank: int, sizes: Sequence[int], num_chunks: int) -> tuple[Step, ...]:
    """The steps of one rank that gathers everybody's rows, in the order in which they are to run."""
    world = len(sizes)
    shards = cut(sizes, num_chunks)
    return tuple(
        Step(distance, dst, send, src, recv)
        for distance in range(1, world)
        for dst, src in [((rank - distance) % world, (rank + distance) % world)]
        for send, recv in _side_by_side(shards[rank], shards[src])
    )


def reduce_scatter_steps(rank: int, sizes: Sequence[int], num_chunks: int) -> tuple[Step, ...]:
    """The steps of one rank that sends partial sums to the owners of the rows; `recv` is always its own rows."""
    world = len(sizes)
    shards = cut(sizes, num_chunks)
    return tuple(
        Step(distance, dst, send, src, recv)
        for distance in range(1, world)
        for dst, src in [((rank + distance) % world, (rank - distance) % world)]
        for send, recv in _side_by_side(shards[dst], shards[rank])
    )


def _side_by_side(sends: tuple[Chunk, ...], recvs: tuple[Chunk, ...]) -> Iterator[tuple[Chunk | None, Chunk | None]]:
    for index in range(max(len(sends), len(recvs))):
        yield (
            sends[index] if index < len(sends) else None,
            recvs[index] if index < len(recvs) else None,
        )
