"""Blocks computed in turns, so that what one has sent travels while another is computed.

A block (attention or MLP, with its norm) is a generator of three steps: it lets its input travel; multiplies and does
what lies between its GEMMs; multiplies again and lets the sums travel. It pauses between them, and ends with a function
that waits for the result. Whoever drives the generators decides what runs in the pauses; backward runs in the reverse
order (see `ops.begin`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from itertools import zip_longest

from torch import Tensor

# The steps of a block; the function that they end with waits for the result, and is called once.
Steps = Generator[None, None, Callable[[], Tensor]]
# From the hidden states to the steps of a block that reads them.
Block = Callable[[Tensor], Steps]


def residual_steps(blocks: Iterable[Block], x: Tensor) -> Steps:
    """`x = x + block(x)` for one block after the other, with a pause wherever something is under way."""
    finish: Callable[[], Tensor] | None = None
    for block in blocks:
        if finish is not None:
            x = x + finish()
        finish = yield from block(x)
        yield
    return lambda: x if finish is None else x + finish()


def in_turns(first: Steps, second: Steps) -> tuple[Tensor, Tensor]:
    """Run two generators step by step, the first one step ahead: what one lets travel has the other's to do so.

    Both begin before either computes, and both results are waited for when all is computed: so at both ends, and hence
    in backward too, the one's transfers follow straight upon the other's.
    """
    results: dict[str, Callable[[], Tensor]] = {}

    def run(name: str, steps: Steps) -> Generator[None, None, None]:
        results[name] = yield from steps

    ahead, behind = run("first", first), run("second", second)
    for steps in (ahead, behind, ahead):
        next(steps, None)
    for _ in zip_longest(ahead, behind):
        pass
    return results["first"](), results["second"]()


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
