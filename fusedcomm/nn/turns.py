"""Blocks computed in turns, so that what one has sent travels while another is computed.

A block (attention or MLP, with its norm) is a generator of three steps: it lets its input travel; multiplies and does
what lies between its GEMMs; multiplies again and lets the sums travel. It pauses between them, and ends with a function
that waits for the result. Whoever drives the generators decides what runs in the pauses; backward runs in the reverse
order (see `ops.begin`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from itertools import zip_longest
from typing import TypeVar

from torch import Tensor

Result = TypeVar("Result")
# The steps of a block; the function that they end with waits for the result, and is called once.
Steps = Generator[None, None, Callable[[], Tensor]]
# From the hidden states to the steps of a block that reads them.
Block = Callable[[Tensor], Steps]


def residual_steps(blocks: Iterable[Block], x: Tensor) -> Generator[None, None, Tensor]:
    """`x = x + block(x)` for one block after the other, with a pause wherever something is under way."""
    for block in blocks:
        finish = yield from block(x)
        yield
        x = x + finish()
    return x


def in_turns(first: Generator[None, None, Result], second: Generator[None, None, Result]) -> tuple[Result, Result]:
    """Run two generators step by step, the first one step ahead: what one waits for had the other's step to travel."""
    results: dict[str, Result] = {}

    def run(name: str, generator: Generator[None, None, Result]) -> Generator[None, None, None]:
        results[name] = yield from generator

    ahead, behind = run("first", first), run("second", second)
    next(ahead, None)
    for _ in zip_longest(ahead, behind):
        pass
    return results["first"], results["second"]


def ladder(blocks: Iterable[Block], x: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Every block reads the hidden states to which the output of the block before has not been added yet.

    So the sums of a block travel while the next one is computed, and its input while the last GEMM of the block before
    is. `previous` is that missing output for the first block here, None where no block is before. Returns the hidden
    states without the last block's output, and that output.
    """
    running: Steps | None = None
    for block in blocks:
        steps = block(x)
        next(steps)
        finish = None if running is None else _last_step(running)
        next(steps)
        output = previous if finish is None else finish()
        x = x if output is None else x + output
        running = steps
    return x, previous if running is None else _last_step(running)()


def _last_step(steps: Steps) -> Callable[[], Tensor]:
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a block has three steps, and this one goes on")
