"""What a perfect tile schedule allows: how long the persistent GEMM takes whose rows arrive, or leave, in chunks.

The model knows the order of the kernel's tiles and nothing else: all tiles take equally long, waiting and announcing
cost nothing, and the link moves one chunk after the other at its rate. A real kernel of that order takes no less, so
what it hides of the communication is held against what the model hides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fusedcomm.comm.ring import Chunk, cut
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.tile_order import gather_order, scatter_order

# Into how many equal pieces a shard is cut; none shorter than a tile, since nobody could use it by itself.
PIECES = (1, 2, 4, 8)


@dataclass(frozen=True)
class TiledGemm:
    """The GEMM of one rank, `[sum(sizes), columns]`, as the kernel runs it.

    Attributes:
        sizes: rows of every rank.
        num_programs: the persistent grid.
        gemm_s: seconds that this grid takes when nothing has to be waited for.
    """

    sizes: tuple[int, ...]
    columns: int
    config: GemmConfig
    num_programs: int
    gemm_s: float

    @property
    def num_tiles_n(self) -> int:
        return -(-self.columns // self.config.tile_n)

    @property
    def num_waves(self) -> int:
        """Tiles of the busiest program."""
        return -(-(-(-sum(self.sizes) // self.config.tile_m) * self.num_tiles_n) // self.num_programs)

    @property
    def tile_s(self) -> float:
        return self.gemm_s / self.num_waves

    @property
    def shard_starts(self) -> list[int]:
        return [sum(self.sizes[:rank]) for rank in range(len(self.sizes) + 1)]

    def group_m(self, pieces: int) -> int:
        """As `kernels.gemm.launch` has it."""
        chunk_rows = sum(self.sizes) // (len(self.sizes) * pieces)
        return self.config.group_for(chunk_rows, self.num_tiles_n, self.num_programs)


@dataclass(frozen=True)
class Link:
    """What one rank has for receiving, or for sending.

    Attributes:
        wire_s: seconds in which all peers' rows pass, if nothing comes in between.
        chunk_s: seconds that each chunk costs besides: a copy's start, its flag.
    """

    wire_s: float
    chunk_s: float = 0.0


def gather_s(gemm: TiledGemm, link: Link, rank: int, pieces: int) -> float:
    """Seconds until `rank` has its product of gathered rows, every shard of which travels in so many pieces.

    Own rows are there at the start; those of rank+1, rank+2, ... arrive one chunk after the other, without pause. A
    tile waits for every chunk that it touches.
    """
    arrival_s: dict[Chunk, float] = {}
    chunks = [_cut(gemm, owner, pieces) for owner in range(len(gemm.sizes))]
    clock_s = 0.0
    for chunk in _travelling(gemm, rank, chunks):
        clock_s += _chunk_s(gemm, link, rank, chunk)
        arrival_s[chunk] = clock_s
    order = gather_order(
        gemm.shard_starts, rank, gemm.num_tiles_n, tile_m=gemm.config.tile_m, group_m=gemm.group_m(pieces)
    )
    ready_s = {
        row: max((arrival_s.get(chunk, 0.0) for chunk in touched), default=0.0)
        for row, touched in _chunks_of_tile_rows(gemm, chunks)
    }
    return max(_finish_s(gemm, order, ready_s.__getitem__))


def scatter_s(gemm: TiledGemm, link: Link, rank: int, pieces: int) -> float:
    """Seconds until the partial sums of `rank` are computed and those of its peers' rows have left, in pieces.

    A chunk may leave when all tiles that it touches are done; those of rank+1, rank+2, ... leave in that order.
    """
    chunks = [_cut(gemm, owner, pieces) for owner in range(len(gemm.sizes))]
    order = scatter_order(
        gemm.shard_starts, rank, gemm.num_tiles_n, tile_m=gemm.config.tile_m, group_m=gemm.group_m(pieces)
    )
    finish_s = _finish_s(gemm, order, lambda row: 0.0)
    row_s: dict[int, float] = {}
    for (row, _), end_s in zip(order, finish_s):
        row_s[row] = max(row_s.get(row, 0.0), end_s)
    done_s: dict[Chunk, float] = {}
    for row, touched in _chunks_of_tile_rows(gemm, chunks):
        for chunk in touched:
            done_s[chunk] = max(done_s.get(chunk, 0.0), row_s[row])
    clock_s = 0.0
    for chunk in _travelling(gemm, rank, chunks):
        clock_s = max(clock_s, done_s[chunk]) + _chunk_s(gemm, link, rank, chunk)
    return max(clock_s, *finish_s)


Makespan = Callable[[TiledGemm, Link, int, int], float]


def slowest_s(makespan: Makespan, gemm: TiledGemm, link: Link, pieces: int) -> float:
    """The makespan (`gather_s` or `scatter_s`) of the rank that takes longest."""
    return max(makespan(gemm, link, rank, pieces) for rank in range(len(gemm.sizes)))


def efficiency(total_s: float, gemm_s: float, wire_s: float) -> float:
    """Overlap efficiency: the share of the communication that is hidden, 1 - exposed / not overlapped."""
    return 1.0 - (total_s - gemm_s) / wire_s


def best_pieces(makespan: Makespan, gemm: TiledGemm, link: Link) -> int:
    """Into how many pieces every shard is best cut; the fewest of those that are equally good."""
    smallest_shard = min((size for size in gemm.sizes if size), default=0)
    options = [pieces for pieces in PIECES if pieces == 1 or smallest_shard // pieces >= gemm.config.tile_m]
    return min(options, key=lambda pieces: slowest_s(makespan, gemm, link, pieces))


def _finish_s(gemm: TiledGemm, order: Sequence[tuple[int, int]], ready_s: Callable[[int], float]) -> list[float]:
    """When each tile of `order` is done; `ready_s(row)` is when its inputs are there."""
    free_s = [0.0] * gemm.num_programs
    finish_s = []
    for index, (row, _) in enumerate(order):
        # The grid is static: program p does tiles p, p + P, p + 2 P, ...
        program = index % gemm.num_programs
        free_s[program] = max(free_s[program], ready_s(row)) + gemm.tile_s
        finish_s.append(free_s[program])
    return finish_s


def _cut(gemm: TiledGemm, owner: int, pieces: int) -> tuple[Chunk, ...]:
    return cut(gemm.sizes, owner, (1,) * pieces)


def _travelling(gemm: TiledGemm, rank: int, chunks: Sequence[Sequence[Chunk]]) -> Iterator[Chunk]:
    """The chunks that pass the link, in their order."""
    world = len(gemm.sizes)
    for distance in range(1, world):
        yield from chunks[(rank + distance) % world]


def _chunk_s(gemm: TiledGemm, link: Link, rank: int, chunk: Chunk) -> float:
    return link.wire_s * chunk.rows / (sum(gemm.sizes) - gemm.sizes[rank]) + link.chunk_s


def _chunks_of_tile_rows(gemm: TiledGemm, chunks: Sequence[Sequence[Chunk]]) -> Iterator[tuple[int, list[Chunk]]]:
    """Every tile row and the chunks that it touches."""
    in_order = [chunk for shard in chunks for chunk in shard]
    tile_m = gemm.config.tile_m
    first = 0
    for row in range(-(-sum(gemm.sizes) // tile_m)):
        begin, end = row * tile_m, (row + 1) * tile_m
        while in_order[first].stop <= begin:
            first += 1
        last = first
        while last < len(in_order) and in_order[last].start < end:
            last += 1
        yield row, in_order[first:last]
