"""The chunk schedule as data: who sends which rows to whom at which step.

Ranks stand in a ring, and at distance 1, 2, ... W-1 every rank exchanges with exactly one other: it sends on its
one outgoing link and receives on its one incoming link, so no two transfers of a step share a link.

- All-gather in `pairs`: rows go straight from owner to user. At distance `d` a rank sends its own rows to `rank - d`
  and receives those of `rank + d`. Rows arrive in the order own, rank+1, rank+2, ..., in which they are then used.
- All-gather round the `ring`: the same rows in the same order, but each rank hands on to `rank - 1` what it received
  from `rank + 1` at the distance before. As many bytes leave every rank, and only neighbours talk: where several ranks
  share a machine's link to the others, each shard crosses it once, instead of once for every rank beyond it.
- All-gather `both_ways` round the ring: half of the shards come from either side, in half as many hops; for links
  that carry both ways at once to different neighbours.
- Reduce-scatter: pairs with the direction turned round. A rank computes the partial sums of `rank + d` and sends
  them to their owner, while those for its own rows come in from `rank - d`. Its own rows are computed last. Never a
  ring: sums would be rounded at every hop, in an order that differs from row to row.

A shard is cut into chunks only where that shortens the whole. Nothing can hide the computing of the last rows to
arrive, nor of the first rows to leave: an all-gather cuts the last distance's shard into ever smaller chunks, a
reduce-scatter the first distance's into ever larger ones, and its last one's into equal ones, so that the owner adds
up some while others travel. All the rest travels whole: fewer messages, larger GEMMs.

An all-reduce is both, block by block: while the rows of a block are computed, partial sums of the block before travel
to their owners, and finished sums from there to everybody. Where a node's ranks share its link to the others, blocks
are summed up in the node first, and what that leaves across nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

# Schedules that are kept: a model has few kinds of calls, and a tiny one should not pay for planning it again.
_KEPT = 256
# How an all-gather's shards travel; an all-reduce in pairs, or `by_node`.
Direction = Literal["pairs", "ring", "both_ways", "by_node"]


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


def cut(sizes: Sequence[int], owner: int, weights: Sequence[int]) -> tuple[Chunk, ...]:
    """The shard of `owner` in chunks whose sizes are as the `weights`; chunks that would be empty are left out."""
    begin, total = sum(sizes[:owner]), sum(weights)
    bounds = [begin + sizes[owner] * weight // total for weight in accumulate(weights, initial=0)]
    return tuple(Chunk(owner, start, stop) for start, stop in pairwise(bounds) if start < stop)


def chunk_bounds(sizes: Sequence[int], pieces: int) -> tuple[int, ...]:
    """Where the chunks of all shards begin, and where the last one ends, each shard cut into `pieces` equal ones.

    Every rank has as many chunks as any other, some of them empty where rows are few.
    """
    starts = accumulate(sizes, initial=0)
    inner = [start + size * piece // pieces for start, size in zip(starts, sizes) for piece in range(pieces)]
    return (*inner, sum(sizes))


def tapered(num_chunks: int) -> tuple[int, ...]:
    """Weights 1/2, 1/4, ... with the last one twice: (4, 2, 1, 1)."""
    return (*(1 << power for power in range(num_chunks - 2, -1, -1)), 1)


@lru_cache(_KEPT)
def all_gather_steps(
    rank: int, sizes: tuple[int, ...], num_chunks: int, direction: Direction = "pairs"
) -> tuple[Step, ...]:
    """The steps of one rank that gathers everybody's rows, in the order in which they are to run.

    `num_chunks` is that of the last distance. What a step sends is there at the distance before, or is its own.
    """
    world = len(sizes)
    # Where shards come from; those of one distance come from both sides when they go both ways.
    sides = (1, -1) if direction == "both_ways" else (1,)
    last = world // 2 if direction == "both_ways" else world - 1
    steps: list[Step] = []
    for distance in range(1, last + 1):
        weights = tapered(num_chunks) if distance == last else (1,)
        # The shard opposite on a ring of even length comes from one side only.
        for side in sides[:1] if direction == "both_ways" and 2 * distance == world else sides:
            hop = distance if direction == "pairs" else 1
            owner = rank if direction == "pairs" else (rank + side * (distance - 1)) % world
            sends, recvs = cut(sizes, owner, weights), cut(sizes, (rank + side * distance) % world, weights)
            dst, src = (rank - side * hop) % world, (rank + side * hop) % world
            steps += [Step(distance, dst, send, src, recv) for send, recv in _side_by_side(sends, recvs)]
    return tuple(steps)


@lru_cache(_KEPT)
def reduce_scatter_steps(rank: int, sizes: tuple[int, ...], num_chunks: int) -> tuple[Step, ...]:
    """The steps of one rank that sends partial sums to the owners of the rows; `recv` is always its own rows.

    `num_chunks` is that of the first distance and of the last.
    """
    world = len(sizes)
    steps: list[Step] = []
    for distance in range(1, world):
        weights = (1,)
        if distance == 1:
            weights = tapered(num_chunks)[::-1]
        elif distance == world - 1:
            weights = (1,) * num_chunks
        dst, src = (rank + distance) % world, (rank - distance) % world
        for send, recv in _side_by_side(cut(sizes, dst, weights), cut(sizes, rank, weights)):
            steps.append(Step(distance, dst, send, src, recv))
    return tuple(steps)


@dataclass(frozen=True)
class Level:
    """Rows that some ranks sum up together: the steps of the partials, and those of the finished sums.

    `own` are the rows that this rank sums up, `members` the ranks whose partials they are, in the order of summing.
    """

    members: tuple[int, ...]
    own: Chunk
    scatter: tuple[Step, ...]
    gather: tuple[Step, ...]


# One level: all ranks. By nodes: the ranks of this one, and then those that have this rank's place on every node, which
# sum up what it has of its node's sum.
Block = tuple[Level, ...]


@lru_cache(_KEPT)
def all_reduce_blocks(
    rank: int, world: int, rows: int, num_chunks: int, nodes: tuple[int, ...] = ()
) -> tuple[Block, ...]:
    """The blocks of `rows` in the order in which they are to run: 1, 2, 3, 5, 9 of them for 1, 2, ... chunks.

    Of several, the first and the last are half as large as the others, since nothing can hide the computing of the
    one and the travelling of the other. `nodes`, the node of each rank, with as many ranks on each, makes them sum up
    by nodes: a node's link then carries each row once each way, whatever the number of its ranks.
    """
    weights = (1,) if num_chunks == 1 else (1, *(2,) * (2 ** (num_chunks - 2) - 1), 1)
    if nodes:
        by_node = [[other for other in range(world) if nodes[other] == node] for node in dict.fromkeys(nodes)]
        in_node = next(ranks for ranks in by_node if rank in ranks)
        groups = [in_node, [ranks[in_node.index(rank)] for ranks in by_node]]
    else:
        groups = [list(range(world))]
    blocks: list[Block] = []
    for block in cut((rows,), 0, weights):
        levels: list[Level] = []
        for members in groups:
            levels.append(_level(rank, members, levels[-1].own if levels else block))
        blocks.append(tuple(levels))
    return tuple(blocks)


def _level(rank: int, members: Sequence[int], rows: Chunk) -> Level:
    """The steps of a group of ranks that sum up `rows`."""
    place, sizes = members.index(rank), chunk_sizes(rows.rows, len(members))

    def moved(chunk: Chunk | None) -> Chunk | None:
        if chunk is None:
            return None
        return Chunk(members[chunk.owner], chunk.start + rows.start, chunk.stop + rows.start)

    def steps(of_group: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(
            Step(step.distance, members[step.dst], moved(step.send), members[step.src], moved(step.recv))
            for step in of_group
        )

    start = rows.start + sum(sizes[:place])
    return Level(
        tuple(members),
        Chunk(rank, start, start + sizes[place]),
        steps(reduce_scatter_steps(place, sizes, 1)),
        steps(all_gather_steps(place, sizes, 1)),
    )


def _side_by_side(sends: tuple[Chunk, ...], recvs: tuple[Chunk, ...]) -> Iterator[tuple[Chunk | None, Chunk | None]]:
    for index in range(max(len(sends), len(recvs))):
        yield (
            sends[index] if index < len(sends) else None,
            recvs[index] if index < len(recvs) else None,
        )
