"""The flag protocol as a model of explicit states: which action may happen when, and what it reads and writes.

A run of W ranks over a few calls is a set of actions, each of which happens once: after certain others (orderings,
which have names and can be left out), and, for a wait, when its flag says so. Everything else may happen in any order:
so peers are late, and run ahead, as far as the protocol lets them. The search goes through all orders, except that of
two adjacent actions that touch nothing in common it tries one (stubborn sets, Valmari 1989; the runs are finite, so
that it still meets every value that a read can see, and every state in which nothing goes on).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

# Epochs wrap, as they do modulo 2^32, in the middle of a run.
MODULUS = 8
FIRST_EPOCH = 6
NUM_BUFFERS = 2
NUM_TILES = 2
# What holds on one rank anyway, by the order of a stream or of a program.
PROGRAM = "program order"


@dataclass(frozen=True)
class Protocol:
    """The protocol, or a broken one.

    Attributes:
        op: all_gather or reduce_scatter.
        chunks: how many each rank owns.
        calls: on the same buffers, one after the other.
        without: names of orderings that are left out.
        unbounded: names of waits without a time limit.
        num_buffers: that the calls use in turn.
        compare: how a wait compares its flag with its epoch: modulo, plain or equal.
    """

    op: str
    chunks: tuple[int, ...]
    calls: int = 4
    without: frozenset[str] = frozenset()
    unbounded: frozenset[str] = frozenset()
    num_buffers: int = NUM_BUFFERS
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


class Model:
    """All actions of all ranks, in an order in which they may happen."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.world = len(protocol.chunks)
        self.actions: list[Action] = []
        self.orderings: set[str] = set()
        self._places: dict[tuple[Any, ...], int] = {}
        for call in range(1, protocol.calls + 1):
            for rank in range(self.world):
                getattr(self, f"_{protocol.op}")(rank, call)
        self._touching: dict[Any, list[int]] = defaultdict(list)
        for place, action in enumerate(self.actions):
            for what in action.touches:
                self._touching[what].append(place)
        # What happens before an action in any order, as bits.
        self._before = [0] * len(self.actions)
        for place, action in enumerate(self.actions):
            for earlier in action.after:
                self._before[place] |= self._before[earlier] | 1 << earlier

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

    def _last_end(self, rank: int, call: int) -> list[tuple[Any, ...]]:
        return [("end", rank, call - 1)] if call > 1 else []

    def _reuse(self, rank: int, peer: int, call: int) -> tuple[Any, ...]:
        """Before the first copy of a call into a buffer of a peer: it has read what was there."""
        return self._add(
            ("reuse", peer),
            rank,
            call,
            [("produced", rank, call)],
            waits=(("done", rank, peer), call - NUM_BUFFERS),
            kind="reuse barrier",
        )

    def _transfer(self, rank: int, call: int, peer: int, chunk: int, source: list, after: list) -> None:
        """Copies a chunk into a peer's buffer and raises its flag there, both on the communication stream."""
        cell = ("buffer", peer, call % self.protocol.num_buffers, rank, chunk)
        sent = self._add(
            ("copy", peer, chunk),
            rank,
            call,
            [*after, *self._stream_order(rank)],
            reads=source,
            writes=[cell],
            kind="copy",
        )
        flag = (("flag", peer, rank, chunk), call)
        self._add(("raise", peer, chunk), rank, call, [("data before flag", sent)], raises=flag)

    def _receive(self, rank: int, call: int, peer: int, chunk: int, after: list) -> tuple[Any, ...]:
        """Waits for a chunk of a peer, then reads it."""
        flag = (("flag", rank, peer, chunk), call)
        came = self._add(("wait", peer, chunk), rank, call, after, waits=flag, kind="chunk flag")
        cell = ("buffer", rank, call % self.protocol.num_buffers, peer, chunk)
        return self._add(("load", peer, chunk), rank, call, [*after, ("chunk flag", came)], reads=[cell], kind="load")

    def _end(self, rank: int, call: int, loads: list, copies: list) -> None:
        produced = ("produced", rank, call)
        after = [produced, *(("reads before done", load) for load in loads)]
        said = [
            self._add(("done", peer), rank, call, after, raises=(("done", peer, rank), call))
            for peer in self._peers(rank)
        ]
        self._add(("end",), rank, call, [produced, *loads, *said, *(("join", copy) for copy in copies)])

    def _all_gather(self, rank: int, call: int) -> None:
        """Our rows are produced; copies push them to the peers; the kernel loads theirs, each behind its flag."""
        chunks = self.protocol.chunks
        produced = self._add(("produced",), rank, call, self._last_end(rank, call), writes=[("x", rank)])
        copies = []
        for peer in self._peers(rank) if chunks[rank] else []:
            after = [("input event", produced)]
            if call > NUM_BUFFERS:
                after.append(("reuse barrier", self._reuse(rank, peer, call)))
            for chunk in range(chunks[rank]):
                self._transfer(rank, call, peer, chunk, [("x", rank)], after)
                copies.append(("copy", peer, chunk, rank, call))
        loads = [
            self._receive(rank, call, peer, chunk, [produced])
            for peer in self._peers(rank)[::-1]
            for chunk in range(chunks[peer])
        ]
        self._end(rank, call, loads, copies)

    def _reduce_scatter(self, rank: int, call: int) -> None:
        """Tiles of a chunk are stored and counted, the last one raises a flag on which the stream sends the chunk."""
        chunks = self.protocol.chunks
        produced = self._add(("produced",), rank, call, self._last_end(rank, call))
        copies, loads = [], []
        for owner in [*self._peers(rank)[::-1], rank]:
            reuse = []
            if call > NUM_BUFFERS and owner != rank and chunks[owner]:
                reuse = [("reuse barrier", self._reuse(rank, owner, call))]
            for chunk in range(chunks[owner]):
                cells = [("partial", rank, owner, chunk, tile) for tile in range(NUM_TILES)]
                counts = []
                for tile, cell in enumerate(cells):
                    stored = self._add(("store", owner, chunk, tile), rank, call, [produced], writes=[cell])
                    counts.append(
                        self._add(("count", owner, chunk, tile), rank, call, [("store before count", stored)])
                    )
                if owner == rank:
                    loads.append(self._add(("own", chunk), rank, call, counts, reads=cells))
                    continue
                ready = (("ready", rank, owner, chunk), call)
                self._add(
                    ("publish", owner, chunk), rank, call, [("all tiles", count) for count in counts], raises=ready
                )
                seen = self._add(("see", owner, chunk), rank, call, [produced], waits=ready, kind="ready flag")
                after = [produced, ("ready flag", seen), *reuse]
                self._transfer(rank, call, owner, chunk, cells, after)
                copies.append(("copy", owner, chunk, rank, call))
        loads += [
            self._receive(rank, call, peer, chunk, [produced])
            for peer in self._peers(rank)
            for chunk in range(chunks[rank])
        ]
        self._end(rank, call, loads, copies)

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
        key, call = action.waits
        flag, epoch = flags.get(key, FIRST_EPOCH), (FIRST_EPOCH + call) % MODULUS
        if self.protocol.compare == "equal":
            return flag == epoch
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
            key, call = action.raises
            flags[key] = (FIRST_EPOCH + call) % MODULUS

    def rivals(self, place: int, happened: int) -> set[int]:
        """Actions still to come that must not be reordered with this one, though nothing makes them come after it."""
        action = self.actions[place]
        found = set()
        for what in action.touches:
            changed = what in action.changes
            for other in self._touching[what]:
                rival = self.actions[other]
                # A flag that rises takes nothing back from a wait, which compares modulo (`search` sees to the range).
                harmless = self.protocol.compare == "modulo" and (action.waits or rival.waits)
                if (changed or what in rival.changes) and not harmless:
                    found.add(other)
        return {other for other in found if not happened >> other & 1 and not self._before[other] >> place & 1} - {
            place
        }

    def enablers(self, place: int, happened: int, closed: set[int]) -> set[int]:
        """Actions of which one must happen before this one can; preferably some that are `closed` already."""
        action = self.actions[place]
        missing = [earlier for earlier in action.after if not happened >> earlier & 1]
        if missing:
            waits = [earlier for earlier in missing if self.actions[earlier].waits]
            return set() if closed & set(missing) else {(waits or missing)[-1]}
        assert action.waits is not None
        key, call = action.waits
        raising = {
            other
            for other in self._touching[key]
            if (raised := self.actions[other].raises) and not happened >> other & 1
            if self.protocol.compare != "modulo" or raised[1] >= call
        }
        return {other for other in raising if not any(self._before[other] >> first & 1 for first in raising)}

    def stubborn(self, seed: int, possible: set[int], happened: int) -> set[int]:
        """The possible actions of a set that what is outside cannot interfere with."""
        todo, closed = [seed], {seed}
        while todo:
            place = todo.pop()
            more = self.rivals(place, happened) if place in possible else self.enablers(place, happened, closed)
            todo += more - closed
            closed |= more
        return closed & possible


class Bug(Exception):
    """What a protocol does wrong."""


@dataclass
class Search:
    """What an exhaustive search saw."""

    states: int = 0
    ends: int = 0
    # How many calls a rank was ahead of another one.
    lead: int = 0


def search(protocol: Protocol, *, reduced: bool = True) -> Search:
    """Goes through all runs of a protocol; raises Bug at a wrong read, and where nothing goes on before the end."""
    if protocol.calls > MODULUS // 2:
        raise ValueError(f"{protocol.calls} calls; at most {MODULUS // 2}, half of which flags can be told apart")
    model = Model(protocol)
    everything = (1 << len(model.actions)) - 1
    result = Search()
    start: tuple[int, dict[Any, int], dict[Any, int]] = (0, {}, {})
    seen = set()
    todo = [start]
    while todo:
        happened, memory, flags = todo.pop()
        # Where two actions race, what happened does not tell what memory holds.
        state = (happened, frozenset(memory.items()), frozenset(flags.items()))
        if state in seen:
            continue
        seen.add(state)
        result.states += 1
        result.lead = max(result.lead, _lead(model, happened))
        possible = {
            place
            for place in range(len(model.actions))
            if not happened >> place & 1 and model.is_possible(place, happened, flags)
        }
        if not possible:
            if happened != everything:
                raise Bug(f"nothing goes on; waiting: {[action.name for action in _waiting(model, happened)]}")
            result.ends += 1
        for place in _chosen(model, possible, happened) if reduced else possible:
            new_memory, new_flags = dict(memory), dict(flags)
            model.perform(place, new_memory, new_flags)
            todo.append((happened | 1 << place, new_memory, new_flags))
    return result


def survive(protocol: Protocol, dead: int) -> int:
    """Lets a rank die after each of its actions, and without each of them; raises Bug if another waits for ever.

    A rank whose wait has a time limit gives up there, and does no more. Until then a dead rank is but a late one, so
    `search` has seen all reads; and as flags only rise, what can happen in the end does not depend on the order.
    Returns the number of deaths.
    """
    model = Model(protocol)
    own = [place for place, action in enumerate(model.actions) if action.rank == dead]
    deaths = {frozenset(own[:count]) for count in range(len(own) + 1)}
    for left_out in own:
        # All that can happen without this one action.
        lost = {left_out}
        for place in own:
            if lost & set(model.actions[place].after):
                lost.add(place)
        deaths.add(frozenset(own) - lost)
    for lived in deaths:
        _run_with_death(model, dead, lived)
    return len(deaths)


def _run_with_death(model: Model, dead: int, lived: Collection[int]) -> None:
    happened, memory, flags = 0, {}, {}
    alive = [place for place, action in enumerate(model.actions) if action.rank != dead or place in lived]
    progress = True
    while progress:
        progress = False
        for place in alive:
            if not happened >> place & 1 and model.is_possible(place, happened, flags):
                model.perform(place, memory, flags)
                happened |= 1 << place
                progress = True
    waiting = [action for action in _waiting(model, happened) if action.rank != dead]
    for rank in {model.actions[place].rank for place in alive if not happened >> place & 1} - {dead}:
        bounded = [action for action in waiting if action.rank == rank and action.kind not in model.protocol.unbounded]
        endless = [action for action in waiting if action.rank == rank and action.kind in model.protocol.unbounded]
        if endless or not bounded:
            raise Bug(f"rank {rank} waits for ever: {[action.name for action in endless]}")


def _waiting(model: Model, happened: int) -> list[Action]:
    """Waits whose turn it is."""
    return [
        action
        for place, action in enumerate(model.actions)
        if action.waits and not happened >> place & 1 and all(happened >> earlier & 1 for earlier in action.after)
    ]


def _chosen(model: Model, possible: set[int], happened: int) -> set[int]:
    best = possible
    for seed in possible:
        found = model.stubborn(seed, possible, happened)
        if found and len(found) < len(best):
            best = found
        if len(best) == 1:
            break
    return best


def _lead(model: Model, happened: int) -> int:
    calls = [0] * model.world
    for place, action in enumerate(model.actions):
        if action.name[0] == "end" and happened >> place & 1:
            calls[action.rank] = max(calls[action.rank], action.call)
    return max(calls) - min(calls)
