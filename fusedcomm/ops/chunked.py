"""Rows that arrive while earlier ones are used, and rows that leave while later ones are made.

Both loops are generators over chunks of rows, so that an op reads as its computation: `for chunk in gather.chunks()`.
Tensors are `[rows, lead, features]`, contiguous. The method `serial` moves the same bytes and adds the same numbers,
but hands all rows over at once: it is the baseline that overlap is measured against.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.comm.record import Path, note_path, span
from fusedcomm.comm.ring import Chunk, all_gather_steps, cut, reduce_scatter_steps
from fusedcomm.comm.transport import open_exchange
from fusedcomm.tune.cost import choose


@dataclass(frozen=True)
class Call:
    """One op call: what every rank must agree on, and how it is to run."""

    op: str
    group: ProcessGroup
    # Rows per rank.
    sizes: tuple[int, ...]
    method: str

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    @property
    def own(self) -> slice:
        start = sum(self.sizes[: self.rank])
        return slice(start, start + self.sizes[self.rank])


def flat(tensor: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows `start:stop` of `[rows, lead, features]` as the matrix `[rows * lead, features]`; a view."""
    return tensor[start:stop].flatten(0, 1)


class Gather:
    """Everybody's rows, `[sum(sizes), lead, features]` in `full`, chunk by chunk.

    The transfers start when the object is made. At distance 1, 2, ... each rank's rows travel from their owner.
    """

    def __init__(self, call: Call, shard: Tensor) -> None:
        self.call = call
        choice = choose(call.method, world=len(call.sizes), rows=call.rows * shard.shape[1])
        note_path(Path(call.op, choice.method, choice.num_chunks, choice.reason))
        self._serial = choice.method == "serial"
        self.full = shard.new_empty(call.rows, *shard.shape[1:])
        self.full[call.own] = shard
        self._steps = all_gather_steps(call.rank, call.sizes, choice.num_chunks)
        signature = (
            f"gather sizes={list(call.sizes)} of [rows, {shard.shape[1]}, {shard.shape[2]}] "
            f"{str(shard.dtype).removeprefix('torch.')} {choice.method} x{choice.num_chunks}"
        )
        self._exchange = open_exchange(
            call.group,
            call.op,
            f"{call.op}: {signature}",
            self._steps,
            [self._rows(step.send) for step in self._steps],
            [self._rows(step.recv) for step in self._steps],
            shard.device,
            overlapped=not self._serial,
        )
        self._exchange.start()
        for index in range(len(self._steps)):
            self._exchange.send(index)

    def _rows(self, chunk: Chunk | None) -> Tensor | None:
        return None if chunk is None else self.full[chunk.start : chunk.stop]

    def chunks(self) -> Iterator[tuple[int, int]]:
        """`(start, stop)` of rows of `full` that are there: own rows first, then in order of arrival.

        After the last one all buffers are free again.
        """
        if self._serial:
            self.complete()
            yield 0, self.call.rows
            return
        if self.call.own.start < self.call.own.stop:
            yield self.call.own.start, self.call.own.stop
        for index, step in enumerate(self._steps):
            if step.recv is not None:
                self._exchange.wait(index)
                yield step.recv.start, step.recv.stop
        self._exchange.finish()

    def complete(self) -> Tensor:
        """All rows, once they are there."""
        for index in range(len(self._steps)):
            self._exchange.wait(index)
        self._exchange.finish()
        return self.full


class Scatter:
    """Partial sums of everybody's rows, sent to their owners; the sum of the own rows comes out.

    The caller fills a buffer per chunk: `for start, stop, out in scatter.chunks()`. Partials go straight to the owner,
    who adds them in fp32 (fp64 stays fp64) in the order of ranks, whatever the order in which they came in.
    """

    def __init__(self, call: Call, lead: int, features: int, like: Tensor) -> None:
        self.call = call
        choice = choose(call.method, world=len(call.sizes), rows=call.rows * lead)
        note_path(Path(call.op, choice.method, choice.num_chunks, choice.reason))
        self._serial = choice.method == "serial"
        world, rank = len(call.sizes), call.rank
        self._steps = reduce_scatter_steps(rank, call.sizes, choice.num_chunks)
        # What leaves, laid out as the full tensor; the own rows' place in it stays unused but for `serial`.
        self._partial = like.new_empty(call.rows, lead, features)
        own_rows = call.sizes[rank]
        # By source rank: the summands of the own rows.
        self._summands = like.new_empty(world, own_rows, lead, features)
        signature = (
            f"scatter sizes={list(call.sizes)} of [rows, {lead}, {features}] "
            f"{str(like.dtype).removeprefix('torch.')} {choice.method} x{choice.num_chunks}"
        )
        offset = call.own.start
        self._exchange = open_exchange(
            call.group,
            call.op,
            f"{call.op}: {signature}",
            self._steps,
            [None if s.send is None else self._partial[s.send.start : s.send.stop] for s in self._steps],
            [
                None if s.recv is None else self._summands[s.src, s.recv.start - offset : s.recv.stop - offset]
                for s in self._steps
            ],
            like.device,
            overlapped=not self._serial,
        )
        self._own_chunks = cut(call.sizes, choice.num_chunks)[rank]
        self._exchange.start()

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        """`(start, stop, out)`: fill `out` `[stop - start, lead, features]` with this rank's partial of those rows.

        Peers' rows come first, the nearest owner's before the others', and leave as soon as they are filled.
        """
        own = self.call.own
        if self._serial:
            yield 0, self.call.rows, self._partial
            self._summands[self.call.rank] = self._partial[own]
            for index in range(len(self._steps)):
                self._exchange.send(index)
            return
        for index, step in enumerate(self._steps):
            if step.send is not None:
                chunk = step.send
                yield chunk.start, chunk.stop, self._partial[chunk.start : chunk.stop]
            self._exchange.send(index)
        if own.start < own.stop:
            yield own.start, own.stop, self._summands[self.call.rank]

    def finish(self, bias: Tensor | None = None) -> Tensor:
        """The sum of this rank's own rows, `[own rows, lead, features]`, plus `bias`."""
        total = torch.empty_like(self._summands[0])
        offset = self.call.own.start
        ready = dict.fromkeys(self._own_chunks, 0)
        for index, step in enumerate(self._steps):
            self._exchange.wait(index)
            if step.recv is None:
                continue
            ready[step.recv] += 1
            if ready[step.recv] == len(self.call.sizes) - 1:
                rows = slice(step.recv.start - offset, step.recv.stop - offset)
                with span("compute", f"{self.call.op} sum"):
                    total[rows] = _ordered_sum(self._summands[:, rows], bias)
        self._exchange.finish()
        return total


def _ordered_sum(summands: Tensor, bias: Tensor | None) -> Tensor:
    """Sum over the first dimension, first to last, in at least fp32."""
    wide = torch.promote_types(summands.dtype, torch.float32)
    total = summands[0].to(wide, copy=True)
    for summand in summands[1:]:
        total += summand
    if bias is not None:
        total += bias
    return total
