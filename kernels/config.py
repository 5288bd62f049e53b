"""How a GEMM is cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmConfig:
    """Tile sizes and the resources of one program; the defaults fit sm_90 without spilling registers.

    Attributes:
        tile_m, tile_n: rows and columns of the output that one program computes at a time.
        tile_k: depth of one step of its inner loop.
        group_m: tile rows visited together, column by column, so that the weights they share stay in L2.
        num_warps: warps of a program.
        num_stages: steps of the inner loop whose loads are in flight at once.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k"):
            value = getattr(self, name)
            # Tensor cores work on at least 16 of each.
            if value < 16 or value & (value - 1):
                raise ValueError(f"GemmConfig: {name}={value}; tiles are powers of two from 16; use 16, 32, 64, ...")
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"GemmConfig: num_warps={self.num_warps}; warps are a power of two; use 4 or 8")
        for name in ("group_m", "num_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"GemmConfig: {name}={getattr(self, name)}; must be at least 1")

    def group_for(self, chunk_rows: int) -> int:
        """Tile rows to visit together when rows arrive or leave `chunk_rows` at a time.

        A larger group would make the first programs wait for later chunks, or finish no chunk until the end.
        """
        return max(1, min(self.group_m, chunk_rows // self.tile_m))
