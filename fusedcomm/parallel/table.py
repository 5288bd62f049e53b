"""Pipeline schedules as data: which rank does what in which order, its transfers included; no process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Literal, NamedTuple

from torch import nn

from fusedcomm.parallel.schedule import SCHEDULES, stage_to_rank

# Forward; whole backward; its halves, the input's and the weights' gradient; and what travels between the stages.
Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]


class Action(NamedTuple):
    """One entry of a rank's list. Of a transfer `stage` is the one at its own end: `SEND_F 1` meets `RECV_F 2`."""

    kind: Kind
    stage: int
    micro_batch: int


# Where a rank's list has the weight gradients: where the schedule has them, or after everything else.
WeightGradients = Literal["by_schedule", "at_end"]

# One list a pipeline rank.
Table = list[list[Action]]

# The schedules' own unit: a forward and each half of a backward take 1, transfers nothing.
_DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True)
class Simulation:
    """How a table runs; one entry a rank.

    Attributes:
        idle: share of the step in which the rank has nothing to compute: the bubble.
        peak_live: most micro-batches, over its stages, whose forward has begun and whose backward has not ended.
        ends: when each computation ends, in the unit of the durations.
    """

    idle: list[float]
    peak_live: list[int]
    ends: dict[Action, float]


def build_table(
    schedule: str,
    *,
    pp: int,
    micro_batches: int,
    stages_per_rank: int,
    weight_gradients: WeightGradients = "by_schedule",
) -> Table:
    """Every rank's actions; `stages_on_each_rank` says what is possible.

    All transfers of all ranks are in one order, in which each rank's are a part of its list: even ranks that could not
    go on before a transfer has ended would never wait for each other in a circle.

    Source: torch.distributed.pipelining's tables, but for 1F1B's, which starts at the wrong micro-batch (torch 2.13).
    """
    if pp == 1 or schedule == "1f1b":
        compute = [_one_forward_one_backward(rank, pp, micro_batches) for rank in range(pp)]
    elif schedule == "gpipe":
        compute = [_forwards_then_backwards(rank, micro_batches) for rank in range(pp)]
    else:
        compute = _torchs_lists(schedule, pp, micro_batches, stages_per_rank)
    if weight_gradients == "at_end":
        compute = [_weight_gradients_last(actions) for actions in compute]
    table = _with_transfers(compute, stage_to_rank(schedule, pp=pp, stages_per_rank=stages_per_rank))
    simulate(table)
    return table


def forward_only(actions: Sequence[Action]) -> list[Action]:
    """The part of a rank's list that evaluation needs."""
    return [action for action in actions if action.kind in ("F", "RECV_F", "SEND_F")]


def received_by(send: Action) -> Action:
    """The other end of a send."""
    if send.kind == "SEND_F":
        return Action("RECV_F", send.stage + 1, send.micro_batch)
    return Action("RECV_B", send.stage - 1, send.micro_batch)


def in_units(action: Action) -> float:
    """What it takes where every stage takes as long as the others and transfers take no time."""
    return _DURATION.get(action.kind, 0)


def simulate(table: Table, duration: Callable[[Action], float] = in_units) -> Simulation:
    """Run a table on paper: by its order for what is possible, by the clock for the bubble.

    `duration` is that of each computation, and of each transfer by its send; transfers keep no rank from computing.

    Raises:
        ValueError: a rank waits for ever, which a forward or a transfer that is missing or out of order leads to, or
            two ranks that wait for each other.
    """
    done: dict[Action, float] = {}
    clocks = [0.0] * len(table)
    busy = [0.0] * len(table)
    live = [0] * len(table)
    peak = [0] * len(table)
    heads = [0] * len(table)
    last = max(action.stage for action in chain(*table))
    while any(head < len(actions) for head, actions in zip(heads, table)):
        before = list(heads)
        for rank, actions in enumerate(table):
            while heads[rank] < len(actions) and actions[heads[rank]].kind in _DURATION:
                action = actions[heads[rank]]
                ready = _ready_at(action, done, last)
                if ready is None:
                    break
                busy[rank] += duration(action)
                clocks[rank] = done[action] = max(clocks[rank], ready) + duration(action)
                live[rank] += {"F": 1, "I": 0}.get(action.kind, -1)
                peak[rank] = max(peak[rank], live[rank])
                heads[rank] += 1
            if heads[rank] == len(actions):
                continue
            action = actions[heads[rank]]
            if action.kind in ("SEND_F", "SEND_B") and _ready_at(action, done, last) is not None:
                receive = received_by(action)
                for peer, others in enumerate(table):
                    if heads[peer] < len(others) and others[heads[peer]] == receive:
                        # A rank sends what it has just computed.
                        done[action] = clocks[rank]
                        done[receive] = clocks[rank] + duration(action)
                        heads[rank] += 1
                        heads[peer] += 1
                        break
        if heads == before:
            stuck = [f"rank {r}: {a[h]}" for r, (a, h) in enumerate(zip(table, heads)) if h < len(a)]
            raise ValueError(f"pipeline: the schedule cannot go on; {'; '.join(stuck)}")
    if left := [rank for rank, count in enumerate(live) if count]:
        raise ValueError(f"pipeline: the schedule ends without the backward of every forward on ranks {left}")
    total = max(clocks)
    ends = {action: end for action, end in done.items() if action.kind in _DURATION}
    return Simulation([1 - time / total for time in busy], peak, ends)


def _one_forward_one_backward(rank: int, pp: int, micro_batches: int) -> list[Action]:
    # As many forwards first as there are later stages: then the first backward comes back.
    warm_up = min(pp - 1 - rank, micro_batches)
    actions = [Action("F", rank, index) for index in range(warm_up)]
    for index in range(micro_batches):
        if index + warm_up < micro_batches:
            actions.append(Action("F", rank, index + warm_up))
        actions.append(Action("B", rank, index))
    return actions


def _forwards_then_backwards(rank: int, micro_batches: int) -> list[Action]:
    return [Action(kind, rank, index) for kind in ("F", "B") for index in range(micro_batches)]


def _weight_gradients_last(actions: Sequence[Action]) -> list[Action]:
    """Every backward without its weight gradients, and these after everything else.

    Stage by stage, in the order in which the next forward needs them.
    """
    rest = [
        action._replace(kind="I" if action.kind == "B" else action.kind) for action in actions if action.kind != "W"
    ]
    backwards = [action for action in rest if action.kind == "I"]
    return rest + [action._replace(kind="W") for action in sorted(backwards, key=lambda action: action.stage)]


def _torchs_lists(schedule: str, pp: int, micro_batches: int, stages_per_rank: int) -> Table:
    # What the constructors ask of a stage; they make every rank's list.
    stage = SimpleNamespace(num_stages=pp * stages_per_rank, group_size=pp, group_rank=0, submod=nn.Identity())
    runtime = SCHEDULES[schedule].torchs
    assert runtime is not None, "the schedules without one are made here"
    orders = runtime([stage] * stages_per_rank, micro_batches).pipeline_order  # pyright: ignore[reportArgumentType]
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    # An overlapped forward and backward, of DualPipeV, is run one after the other, as torch does.
    return [
        [
            Action(kinds[part.computation_type.value], part.stage_index, part.microbatch_index)
            for entry in orders[rank]
            if entry is not None
            for part in entry.sub_actions or (entry,)
            if part.microbatch_index is not None
        ]
        for rank in range(pp)
    ]


def _with_transfers(compute: Table, rank_of_stage: Sequence[int]) -> Table:
    """Send each result when it is there, and receive it where the receiver has got to by then.

    Runs the lists by the clock. The action that ends first goes next, so that transfers come in the order of time.
    """
    table: Table = [[] for _ in compute]
    done: dict[Action, float] = {}
    clocks = [0.0] * len(compute)
    heads = [0] * len(compute)
    last = len(rank_of_stage) - 1
    # Of the ranks that can go on, when they have done their next action.
    ends: dict[int, float] = {}
    changed = set(range(len(compute)))
    for _ in range(sum(map(len, compute))):
        for rank in changed:
            if heads[rank] < len(compute[rank]):
                action = compute[rank][heads[rank]]
                ready = _ready_at(action, done, last)
                if ready is not None:
                    ends[rank] = max(clocks[rank], ready) + _DURATION[action.kind]
        if not ends:
            raise ValueError("pipeline: the schedule's actions depend on each other in a circle")
        rank = min(ends, key=lambda rank: (ends[rank], rank))
        action = compute[rank][heads[rank]]
        clocks[rank] = done[action] = ends.pop(rank)
        heads[rank] += 1
        changed = {rank}
        table[rank].append(action)
        there = action.stage + (1 if action.kind == "F" else -1)
        if action.kind != "W" and 0 <= there <= last and rank_of_stage[there] != rank:
            send = Action("SEND_F" if action.kind == "F" else "SEND_B", action.stage, action.micro_batch)
            receive = received_by(send)
            table[rank].append(send)
            table[rank_of_stage[there]].append(receive)
            done[receive] = clocks[rank]
            changed.add(rank_of_stage[there])
    return table


def _ready_at(action: Action, done: dict[Action, float], last: int) -> float | None:
    """When what a computation or a send needs was done; None if some of it is not.

    From the stage before or behind comes what was received, or what this rank computed itself.
    """
    kind, stage, index = action
    needs: list[tuple[Action, ...]]
    if kind == "F":
        needs = [] if stage == 0 else [(Action("RECV_F", stage, index), Action("F", stage - 1, index))]
    elif kind == "W":
        needs = [(Action("I", stage, index),)]
    elif kind == "SEND_F":
        needs = [(Action("F", stage, index),)]
    elif kind == "SEND_B":
        needs = [(Action("B", stage, index), Action("I", stage, index))]
    else:
        needs = [(Action("F", stage, index),)]
        if stage != last:
            behind = (Action("B", stage + 1, index), Action("I", stage + 1, index))
            needs.append((Action("RECV_B", stage, index), *behind))
    found = [max((done[choice] for choice in choices if choice in done), default=None) for choices in needs]
    times = [time for time in found if time is not None]
    return None if len(times) < len(needs) else max(times, default=0)
