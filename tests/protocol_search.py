"""What can go wrong with a protocol: in any order of its actions, and where a rank dies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from protocol_model import MODULUS, Action, Bug, Model, Protocol


@dataclass
class Search:
    """What an exhaustive search saw."""

    states: int = 0
    ends: int = 0
    # How many calls a rank was ahead of another one.
    lead: int = 0


class StubbornSets:
    """Sets of actions that what is outside cannot interfere with: only their possible ones need be tried next.

    So of two adjacent actions that touch nothing in common one order is tried (Valmari 1989). As runs are finite, the
    search still meets every value that a read can see, and every state in which nothing goes on.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._touching: dict[Any, list[int]] = defaultdict(list)
        for place, action in enumerate(model.actions):
            for what in action.touches:
                self._touching[what].append(place)
        # What happens before an action in any order, as bits.
        self._before = [0] * len(model.actions)
        for place, action in enumerate(model.actions):
            for earlier in action.after:
                self._before[place] |= self._before[earlier] | 1 << earlier

    def chosen(self, possible: set[int], happened: int) -> set[int]:
        """The possible actions of the smallest set that was found."""
        best = possible
        for seed in possible:
            found = self._stubborn(seed, possible, happened)
            if found and len(found) < len(best):
                best = found
            if len(best) == 1:
                break
        return best

    def _rivals(self, place: int, happened: int) -> set[int]:
        """Actions still to come that must not be reordered with this one, though nothing makes them come after it."""
        action = self._model.actions[place]
        found = set()
        for what in action.touches:
            changed = what in action.changes
            for other in self._touching[what]:
                rival = self._model.actions[other]
                # A flag that rises takes nothing back from a wait, which compares modulo (`search` sees to the range).
                harmless = self._model.protocol.compare == "modulo" and (action.waits or rival.waits)
                if (changed or what in rival.changes) and not harmless:
                    found.add(other)
        return {other for other in found if not happened >> other & 1 and not self._before[other] >> place & 1} - {
            place
        }

    def _enablers(self, place: int, happened: int, closed: set[int]) -> set[int]:
        """Actions of which one must happen before this one can; preferably some that are `closed` already."""
        action = self._model.actions[place]
        missing = [earlier for earlier in action.after if not happened >> earlier & 1]
        if missing:
            waits = [earlier for earlier in missing if self._model.actions[earlier].waits]
            return set() if closed & set(missing) else {(waits or missing)[-1]}
        assert action.waits is not None
        key, count = action.waits
        raising = {
            other
            for other in self._touching[key]
            if (raised := self._model.actions[other].raises) and not happened >> other & 1
            if self._model.protocol.compare != "modulo" or raised[1] >= count
        }
        return {other for other in raising if not any(self._before[other] >> first & 1 for first in raising)}

    def _stubborn(self, seed: int, possible: set[int], happened: int) -> set[int]:
        """The possible actions of a set that what is outside cannot interfere with."""
        todo, closed = [seed], {seed}
        while todo:
            place = todo.pop()
            more = self._rivals(place, happened) if place in possible else self._enablers(place, happened, closed)
            todo += more - closed
            closed |= more
        return closed & possible


def search(protocol: Protocol, *, reduced: bool = True) -> Search:
    """Goes through all runs of a protocol; raises Bug at a wrong read, and where nothing goes on before the end."""
    model = Model(protocol)
    if model.last_epoch > MODULUS // 2:
        raise ValueError(f"{model.last_epoch} calls on a buffer; at most {MODULUS // 2} can be told apart")
    stubborn = StubbornSets(model)
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
        for place in stubborn.chosen(possible, happened) if reduced else possible:
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


def _lead(model: Model, happened: int) -> int:
    calls = [0] * model.world
    for place, action in enumerate(model.actions):
        if action.name[0] == "end" and happened >> place & 1:
            calls[action.rank] += 1
    return max(calls) - min(calls)
