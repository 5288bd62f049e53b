"""The flag protocol as a model of explicit states: which action may happen when, and what it reads and writes.

A run of W ranks over a few calls, which are begun and finished, is a set of actions, each of which happens once: after
certain others (orderings, which have names and can be left out), and, for a wait, when its flag says so. Everything
else may happen in any order: so peers are late, and run ahead, as far as the protocol lets them. `protocol_search`
goes through these orders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Epochs wrap, as they do modulo 2^32, in the middle of a run.
MODULUS = 8
FIRST_EPOCH = 6
NUM_TILES = 2
# What holds on one rank anyway, by the order of a stream or of a program.
PROGRAM = "program order"


def one_after_the_other(calls: int) -> tuple[int, ...]:
    return tuple(event for call in range(1, calls + 1) for event in (call, -call))


@dataclass(frozen=True)
class Protocol:
    """The protocol, or a broken one.

    Attributes:
        op: all_gather or reduce_scatter.
        chunks: how many each rank owns.
        order: in which each rank begins and finishes its calls: n begins call n, -n finishes it.
        without: names of orderings that are left out.
        unbounded: names of waits without a time limit.
        num_buffers: how many there are.
        in_turn: whether calls use them in turn, be they free or not, instead of what has been free for longest.
        compare: how a wait compares its flag with its epoch: modulo or plain.
    """

    op: str
    chunks: tuple[int, ...]
    order: tuple[int, ...] = one_after_the_other(4)
    without: frozenset[str] = frozenset()
    unbounded: frozenset[str] = frozenset()
    num_buffers: int = 2
    in_turn: bool = False
    compare: str = "modulo"


@dataclass
class Action:
    name: tuple[Any, ...]
    rank: int
    call: int
    after: list[int] = field(default_factory=list)
    reads: list[tuple[Any, ...]] = field(default_factory=list)
    writes: list[tuple[Any, ...]] = field(default_factory=list)
    raises: tuple[Any, int] | None = None
    waits: tuple[Any, int] | None = None
    kind: str = ""

    @property
    def changes(self) -> set[Any]:
        return {*self.writes, *([self.raises[0]] if self.raises else [])}

    @property
    def touches(self) -> set[Any]:
        return self.changes | {*self.reads, *([self.waits[0]] if self.waits else [])}


def _buffers(protocol: Protocol) -> tuple[dict[int, int], dict[int, int]]:
    """Which buffer each call uses, and as the how-manieth."""
    buffer: dict[int, int] = {}
    epoch: dict[int, int] = {}
    free = deque(range(protocol.num_buffers))
    for event in protocol.order:
        if event < 0:
            free.append(buffer[-event])
            continue
        buffer[event] = (event - 1) % protocol.num_buffers if protocol.in_turn else free.popleft()
        epoch[event] = 1 + sum(buffer[call] == buffer[event] for call in epoch)
    return buffer, epoch


class Bug(Exception):
    """What a protocol does wrong."""


class Model:
    """All actions of all ranks, in an order in which they may happen."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.world = len(protocol.chunks)
        self.actions: list[Action] = []
        self.orderings: set[str] = set()
        self._places: dict[tuple[Any, ...], int] = {}
        # Of each call its buffer, and which of the calls on that buffer it is.
        self._buffer, self._epoch = _buffers(protocol)
        self.last_epoch = max(self._epoch.values())
        # What each rank's program did last.
        self._last: list[tuple[Any, ...] | None] = [None] * self.world
        for event in protocol.order:
            for rank in range(self.world):
                if event > 0:
                    getattr(self, f"_begin_{protocol.op}")(rank, event)
                else:
                    getattr(self, f"_finish_{protocol.op}")(rank, -event)

    def _add(self, name: tuple[Any, ...], rank: int, call: int, after: Iterable[Any], **what: Any) -> tuple[Any, ...]:
        name = (*name, rank, call)
        self._places[name] = len(self.actions)
        action = Action(name, rank, call, **what)
        for item in after:
            # An action, or one with the name of the ordering.
            ordering, earlier = item if isinstance(item[1], tuple) else (PROGRAM, item)
            self.orderings.add(ordering)
            if ordering not in self.protocol.without:
                action.after.append(self._places[earlier])
        self.actions.append(action)
        return name

    def _peers(self, rank: int) -> list[int]:
        """The others, the one that needs our chunks next first."""
        return [(rank - distance) % self.world for distance in range(1, self.world)]

    def _program(self, name: tuple[Any, ...], rank: int, call: int, after: Iterable[Any] = (), **what: Any) -> None:
        """An action after what the rank's program did last."""
        last = self._last[rank]
        self._last[rank] = self._add(name, rank, call, [*([last] if last else []), *after], **what)

    def _reuse(self, rank: int, peer: int, call: int) -> list[tuple[str, Any]]:
        """Before the first copy of a call into a buffer of a peer: it has read what was there."""
        if self._epoch[call] == 1:
            return []
        flag = (("done", rank, peer, self._buffer[call]), self._epoch[call] - 1)
        free = self._add(("reuse", peer), rank, call, [("produced", rank, call)], waits=flag, kind="reuse barrier")
        return [("reuse barrier", free)]

    def _transfer(self, rank: int, call: int, peer: int, chunk: int, source: list, after: list) -> None:
        """Copies a chunk into a peer's buffer and raises its flag there, both on the communication stream."""
        cell = ("buffer", peer, self._buffer[call], rank, chunk)
        sent = self._add(
            ("copy", peer, chunk),
            rank,
            call,
            [*after, *self._stream_order(rank)],
            reads=source,
            writes=[cell],
            kind="copy",
        )
        flag = (("flag", peer, self._buffer[call], rank, chunk), self._epoch[call])
        self._add(("raise", peer, chunk), rank, call, [("data before flag", sent)], raises=flag)

    def _receive(self, rank: int, call: int, peer: int, chunk: int, after: list) -> tuple[Any, ...]:
        """Waits for a chunk of a peer, then reads it."""
        flag = (("flag", rank, self._buffer[call], peer, chunk), self._epoch[call])
        came = self._add(("wait", peer, chunk), rank, call, after, waits=flag, kind="chunk flag")
        cell = ("buffer", rank, self._buffer[call], peer, chunk)
        return self._add(("load", peer, chunk), rank, call, [*after, ("chunk flag", came)], reads=[cell], kind="load")

    def _end(self, rank: int, call: int, loads: list) -> None:
        after = [("reads before done", load) for load in loads]
        last = self._last[rank]
        said = [
            self._add(
                ("done", peer),
                rank,
                call,
                [last, *after],
                raises=(("done", peer, rank, self._buffer[call]), self._epoch[call]),
            )
            for peer in self._peers(rank)
        ]
        copies = [
            action.name
            for action in self.actions
            if action.rank == rank and action.call == call and action.name[0] == "copy"
        ]
        self._program(("end",), rank, call, [*loads, *said, *(("join", copy) for copy in copies)])

    def _begin_all_gather(self, rank: int, call: int) -> None:
        """Our rows are produced; copies push them to the peers."""
        own = ("buffer", rank, self._buffer[call], rank, 0)
        self._program(("produced",), rank, call, writes=[own])
        for peer in self._peers(rank) if self.protocol.chunks[rank] else []:
            after = [("input event", ("produced", rank, call)), *self._reuse(rank, peer, call)]
            for chunk in range(self.protocol.chunks[rank]):
                self._transfer(rank, call, peer, chunk, [own], after)

    def _finish_all_gather(self, rank: int, call: int) -> None:
        """The kernel loads our rows and those of the peers, each chunk behind its flag."""
        last = self._last[rank]
        loads = [
            self._receive(rank, call, peer, chunk, [last])
            for peer in self._peers(rank)[::-1]
            for chunk in range(self.protocol.chunks[peer])
        ]
        own = ("buffer", rank, self._buffer[call], rank, 0)
        loads.append(self._add(("own",), rank, call, [last], reads=[own]))
        self._end(rank, call, loads)

    def _begin_reduce_scatter(self, rank: int, call: int) -> None:
        """Tiles of a chunk are stored and counted, the last one raises a flag on which the stream sends the chunk."""
        self._program(("produced",), rank, call)
        produced = ("produced", rank, call)
        for owner in [*self._peers(rank)[::-1], rank]:
            chunks = self.protocol.chunks[owner]
            reuse = self._reuse(rank, owner, call) if owner != rank and chunks else []
            for chunk in range(chunks):
                cells = self._partials(rank, call, owner, chunk)
                counts = []
                for tile, cell in enumerate(cells):
                    stored = self._add(("store", owner, chunk, tile), rank, call, [produced], writes=[cell])
                    counts.append(
                        self._add(("count", owner, chunk, tile), rank, call, [("store before count", stored)])
                    )
                if owner == rank:
                    continue
                ready = (("ready", rank, self._buffer[call], owner, chunk), self._epoch[call])
                self._add(
                    ("publish", owner, chunk), rank, call, [("all tiles", count) for count in counts], raises=ready
                )
                seen = self._add(("see", owner, chunk), rank, call, [produced], waits=ready, kind="ready flag")
                self._transfer(rank, call, owner, chunk, cells, [produced, ("ready flag", seen), *reuse])

    def _finish_reduce_scatter(self, rank: int, call: int) -> None:
        """Our own partial sums are added to those of the peers, each chunk behind its flag."""
        last, chunks = self._last[rank], self.protocol.chunks[rank]
        loads = []
        for chunk in range(chunks):
            cells = self._partials(rank, call, rank, chunk)
            counts = [("count", rank, chunk, tile, rank, call) for tile in range(NUM_TILES)]
            loads.append(self._add(("own", chunk), rank, call, [last, *counts], reads=cells))
        loads += [
            self._receive(rank, call, peer, chunk, [last]) for peer in self._peers(rank) for chunk in range(chunks)
        ]
        self._end(rank, call, loads)

    def _partials(self, rank: int, call: int, owner: int, chunk: int) -> list[tuple[Any, ...]]:
        """Where the tiles of a chunk are: in memory that is given back, as the buffer is, at the end of the call."""
        return [("partial", rank, self._buffer[call], owner, chunk, tile) for tile in range(NUM_TILES)]

    def _stream_order(self, rank: int) -> list[tuple[Any, ...]]:
        """What the communication stream did last: it does one thing after the other."""
        last = [action.name for action in self.actions if action.rank == rank and action.name[0] == "raise"]
        return last[-1:]

    def is_possible(self, place: int, happened: int, flags: dict[Any, int]) -> bool:
        action = self.actions[place]
        if any(not happened >> earlier & 1 for earlier in action.after):
            return False
        if action.waits is None:
            return True
        key, count = action.waits
        flag, epoch = flags.get(key, FIRST_EPOCH), (FIRST_EPOCH + count) % MODULUS
        if self.protocol.compare == "plain":
            return flag >= epoch
        return (flag - epoch) % MODULUS < MODULUS // 2

    def perform(self, place: int, memory: dict[Any, int], flags: dict[Any, int]) -> None:
        """Changes memory and flags; raises Bug if it reads other data than its call's."""
        action = self.actions[place]
        for cell in action.reads:
            if memory.get(cell, 0) != action.call:
                raise Bug(f"{action.name} reads {cell} of call {memory.get(cell, 0)}")
        for cell in action.writes:
            memory[cell] = action.call
        if action.raises is not None:
            key, count = action.raises
            flags[key] = (FIRST_EPOCH + count) % MODULUS
