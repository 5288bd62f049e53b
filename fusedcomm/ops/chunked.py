"""Rows that arrive while earlier ones are used, and rows that leave while later ones are made.

Both loops are generators over chunks of rows, so that an op reads as its computation: `for chunk in gather.chunks()`.
Tensors are `[rows, lead, features]`, contiguous. The method `serial` moves the same bytes and adds the same numbers,
but hands all rows over at once: it is the baseline that overlap is measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import channel_of
from fusedcomm.comm.pool import STAGING
from fusedcomm.comm.record import Path, note_path, span
from fusedcomm.comm.ring import Chunk, Direction, all_gather_steps, reduce_scatter_steps
from fusedcomm.comm.transport import FlagTransport, flag_transport_of, open_exchange
from fusedcomm.ops.check import FUSED_DTYPES, check_current_gpu, check_fused_dtype, refusing
from fusedcomm.ops.wgrad import Sink
from fusedcomm.tune.cache import tuner_of
from fusedcomm.tune.cost import Choice

Result = TypeVar("Result")
# What a gather may be tried by.
GATHER_DIRECTIONS: tuple[Direction, ...] = ("ring", "both_ways")


@dataclass(frozen=True)
class Call:
    """One op call: what every rank must agree on, and how it is to run."""

    op: str
    group: ProcessGroup
    # Rows per rank.
    sizes: tuple[int, ...]
    choice: Choice
    # Who carries the chunks of a fused call.
    transport: FlagTransport | None = None

    def signature(self, kind: str, features: Sequence[int], dtype: torch.dtype) -> str:
        """What every rank must agree on, in words."""
        return (
            f"{self.op}: {kind} sizes={list(self.sizes)} of [rows, {features[0]}, {features[1]}] "
            f"{str(dtype).removeprefix('torch.')} {self.choice.method} x{self.choice.num_chunks} "
            f"{self.choice.direction}{list(self.choice.nodes) or ''}"
        )

    def path(self, device: torch.device) -> Path:
        """The way that this call goes, for `last_path()`."""
        choice, transport = self.choice, self.transport
        carrier = transport.name if transport is not None else channel_of(self.group).backend_of(self.op, device)
        why = "" if transport is None else transport.reason
        return Path(self.op, choice.method, choice.num_chunks, choice.reason, carrier, why)

    @property
    def is_serial(self) -> bool:
        """Whether nothing may be computed while something travels."""
        return self.choice.method == "serial"

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


def run_by(
    method: str,
    op: str,
    group: ProcessGroup,
    sizes: Sequence[int],
    like: Tensor,
    travel: Sequence[int],
    local: Sequence[int],
    run: Callable[[Call], Result],
    *,
    directions: Sequence[Direction] = (),
    work: Sequence[str] = (),
    trial: Callable[[Call], object] | None = None,
) -> Result:
    """Settle with the group how the call is to run, note that, and run it.

    What travels is `[rows, *travel]`, of `like`'s dtype; `local` are the GEMMs' other features, which may differ from
    rank to rank. `directions` are those that rows could take instead of pairs. `work` names what the call does, if not
    all calls of the op do the same. `trial` runs the call while ways are timed, if that must not do all that `run`
    does.
    """
    rows = sum(sizes) * travel[0]
    shapes = " ".join([f"{list(sizes)} x {list(travel)} {str(like.dtype).removeprefix('torch.')}", *work])
    call_of = partial(new_call, op, group, tuple(sizes), like)
    choice = tuner_of(group).choose(
        op,
        method,
        rows=rows,
        shapes=shapes,
        local=str(list(local)),
        wire_bytes=(len(sizes) - 1) * rows * travel[1] * like.element_size() // len(sizes),
        weight_bytes=sum(local) * travel[1] * like.element_size(),
        directions=directions,
        device=like.device,
        can_fuse=like.dtype in FUSED_DTYPES,
        run=lambda choice: (trial or run)(call_of(choice)),
    )
    call = call_of(choice)
    note_path(call.path(like.device))
    return run(call)


def run_backward(
    method: str,
    op: str,
    group: ProcessGroup,
    sizes: Sequence[int],
    like: Tensor,
    local: Sequence[int],
    run: Callable[[Call, Sink], Result],
    sink: Sink,
    *,
    needs: Mapping[str, bool],
    directions: Sequence[Direction] = (),
) -> Result:
    """`run_by` for the backward of an op on rows like `like` [rows of this rank, lead, features].

    `sink` takes the weights' gradients of the call itself, and another one those of calls that are only timed. `needs`
    says what else it may have to do: without dx there may be nothing to hide.
    """

    def into(sink: Sink, call: Call) -> Result:
        result = run(call, sink)
        sink.close()
        return result

    return run_by(
        method,
        f"{op} backward",
        group,
        sizes,
        like,
        like.shape[1:],
        local,
        partial(into, sink),
        directions=directions,
        work=[name for name, needed in (*needs.items(), ("dw", sink.is_needed)) if needed],
        trial=lambda call: into(sink.for_trial(), call),
    )


def new_call(op: str, group: ProcessGroup, sizes: tuple[int, ...], like: Tensor, choice: Choice) -> Call:
    """A call on tensors like that one; ValueError, of which the peers are told, if it cannot run as it should."""
    with refusing(op, group):
        check_current_gpu(op, like.device)
        if choice.method != "fused":
            return Call(op, group, sizes, choice)
        check_fused_dtype(op, like.dtype)
        return Call(op, group, sizes, choice, flag_transport_of(group, op, like.device, choice.transport))


def flat(tensor: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows `start:stop` of `[rows, lead, features]` as the matrix `[rows * lead, features]`; a view."""
    return tensor[start:stop].flatten(0, 1)


class Gather:
    """Everybody's rows, `[sum(sizes), lead, features]`, chunk by chunk.

    The transfers start when the object is made, by the schedule of `comm.ring`. With `keep` the whole is fresh memory
    that outlives the call (`complete()` returns it); without, it is staging that `release()` gives back unless it is
    `kept()`, and the own rows are not even copied into it unless the whole is asked for.
    """

    def __init__(self, call: Call, shard: Tensor, *, keep: bool) -> None:
        self.call = call
        self._serial = call.is_serial
        self._shard = shard
        shape = (call.rows, *shard.shape[1:])
        self._keep = keep
        self._full = shard.new_empty(shape) if keep else STAGING.take(shape, shard)
        self._steps = all_gather_steps(call.rank, call.sizes, call.choice.num_chunks, call.choice.direction)
        self._exchange = open_exchange(
            call.group,
            call.op,
            call.signature("gather", shard.shape[1:], shard.dtype),
            self._steps,
            [None if step.send is None else self._rows(step.send) for step in self._steps],
            [None if step.recv is None else self._full[step.recv.start : step.recv.stop] for step in self._steps],
            shard.device,
            overlapped=not self._serial,
            paced=True,
        )
        self._exchange.start()
        for index in range(len(self._steps)):
            self._exchange.send(index)

    def _rows(self, chunk: Chunk) -> Tensor:
        """Where they are when they are sent: own ones, or others' to hand on."""
        if chunk.owner != self.call.rank:
            return self._full[chunk.start : chunk.stop]
        return self._shard[chunk.start - self.call.own.start : chunk.stop - self.call.own.start]

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        """`(start, stop, rows)` as they are there: own rows first, then in order of arrival.

        After the last one every transfer is over.
        """
        if self._serial:
            yield 0, self.call.rows, self.complete()
            return
        own = self.call.own
        if own.start < own.stop:
            yield own.start, own.stop, self._shard
        for index, step in enumerate(self._steps):
            if step.recv is not None:
                self._exchange.wait(index)
                yield step.recv.start, step.recv.stop, self._full[step.recv.start : step.recv.stop]
        self._exchange.finish()
        if self._keep:
            self._full[own] = self._shard

    def complete(self) -> Tensor:
        """All rows, once they are there."""
        self._full[self.call.own] = self._shard
        for index in range(len(self._steps)):
            self._exchange.wait(index)
        self._exchange.finish()
        return self._full

    @property
    def full(self) -> Tensor:
        """All rows; after `complete()`, or with `keep` after the last chunk."""
        return self._full

    def kept(self) -> Tensor:
        """All rows, from now on the caller's; after `complete()` or the last chunk."""
        if not self._keep:
            self._full[self.call.own] = self._shard
            self._keep = True
        return self._full

    def release(self) -> None:
        """The rows are not needed any more by those to whom they are lent."""
        if not self._keep:
            STAGING.give(self._full)


class Scatter:
    """Partial sums of everybody's rows, sent to their owners; the sum of the own rows comes out.

    The caller fills a buffer per chunk: `for start, stop, out in scatter.chunks()`. Partials go straight to the owner,
    who adds them in fp32 (fp64 stays fp64) in the order of ranks, whatever the order in which they came in.
    """

    def __init__(self, call: Call, lead: int, features: int, like: Tensor) -> None:
        self.call = call
        self._serial = call.is_serial
        world, rank, own = len(call.sizes), call.rank, call.own
        self._steps = reduce_scatter_steps(rank, call.sizes, call.choice.num_chunks)
        # What leaves, laid out as the full tensor; the own rows' place in it stays unused but for `serial`.
        self._partial = STAGING.take((call.rows, lead, features), like)
        # By source rank: the summands of the own rows.
        self._summands = STAGING.take((world, call.sizes[rank], lead, features), like)
        self._exchange = open_exchange(
            call.group,
            call.op,
            call.signature("scatter", (lead, features), like.dtype),
            self._steps,
            [None if s.send is None else self._partial[s.send.start : s.send.stop] for s in self._steps],
            [
                None if s.recv is None else self._summands[s.src, s.recv.start - own.start : s.recv.stop - own.start]
                for s in self._steps
            ],
            like.device,
            overlapped=not self._serial,
            paced=False,
        )
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

    def arrive(self) -> None:
        """Return when all partials for the own rows are here."""
        for index in range(len(self._steps)):
            self._exchange.wait(index)

    def finish(self, bias: Tensor | None = None) -> Tensor:
        """The sum of this rank's own rows, `[own rows, lead, features]`, plus `bias`."""
        total = torch.empty_like(self._summands[0])
        offset, last = self.call.own.start, len(self.call.sizes) - 1
        for index, step in enumerate(self._steps):
            self._exchange.wait(index)
            # Whatever the other distances have sent for these rows was waited for before.
            if step.recv is not None and step.distance == last:
                rows = slice(step.recv.start - offset, step.recv.stop - offset)
                with span("compute", f"{self.call.op} sum"):
                    ordered_sum(self._summands[:, rows], bias, total[rows])
        self._exchange.finish()
        STAGING.give(self._partial)
        STAGING.give(self._summands)
        return total


def ordered_sum(summands: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Sum over the first dimension into `out`, first to last, in at least fp32."""
    wide = torch.promote_types(summands.dtype, torch.float32)
    if wide == out.dtype:
        torch.add(summands[0], summands[1], out=out)
        total = out
    else:
        total = summands[0].to(wide)
        total += summands[1]
    for summand in summands[2:]:
        total += summand
    if bias is not None:
        total += bias
    if total is not out:
        out.copy_(total)
