"""The shapes of the GPU benchmark: what one rank of eight multiplies in models that are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

WORLD = 8
# Rows of a micro-batch, the most telling first: a run that is short of time leaves the last ones out.
ROWS = (4096, 8192, 2048, 1024, 512)


@dataclass(frozen=True)
class Shape:
    """The GEMM of one rank of `world`, `x [m, k] @ w.T [k, n]`, and the op that it is part of."""

    op: str
    model: str
    m: int
    n: int
    k: int
    world: int = WORLD

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of every rank."""
        return (self.m // self.world,) * self.world

    def __str__(self) -> str:
        return f"{self.op} {self.model} M,N,K = {self.m},{self.n},{self.k}"


# Model, N of the first product of an MLP on one rank of eight, and K, the hidden size; the second one is its mirror.
_MODELS = (
    ("Llama-3 8B", 1792, 4096),
    ("Llama-3 70B", 3584, 8192),
    ("Llama-3 405B", 6656, 16384),
    ("GPT-3 175B", 6144, 12288),
)


def shapes() -> Iterator[Shape]:
    """All of them, in the order in which they are worth measuring."""
    for rows in ROWS:
        for model, inner, hidden in _MODELS:
            yield Shape("all_gather_matmul", model, rows, inner, hidden)
            yield Shape("matmul_reduce_scatter", model, rows, hidden, inner)
