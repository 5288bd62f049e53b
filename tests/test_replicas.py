"""Replicas that sync seldom, and gradients that come late, equal a plain simulation in one process to the bit."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from torch import Tensor

from fusedcomm.comm.collective import Pending
from fusedcomm.comm.hierarchical import Hierarchical
from fusedcomm.parallel.replicas import Delayed, Outer, Replicas

SHAPES = {"a": (5, 3), "b": (7,)}
EVERY, STEPS = 2, 8
MODES = {"local_sgd": None, "diloco": Outer(0.7, 0.9), "overlapped": Outer(0.7, 0.9, overlap=True)}


def initial() -> Tensor:
    return torch.randn(22, generator=torch.Generator().manual_seed(5))


def movement(rank: int, step: int) -> Tensor:
    """What a replica's own optimizer does in a step."""
    return 0.1 * torch.randn(22, generator=torch.Generator().manual_seed(100 * rank + step))


def unflat(flat: Tensor) -> dict[str, Tensor]:
    parts = flat.split([15, 7])
    return {name: part.view(shape).clone() for (name, shape), part in zip(SHAPES.items(), parts)}


def flat_of(masters: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in masters.values()])


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


class LateSums:
    """Direct sums that begin late at random."""

    def __init__(self, rank: int) -> None:
        self._sums = Hierarchical(None, dist.group.WORLD)
        self._jitter = random.Random(rank)

    def start(self, flat: Tensor, offset: int) -> Pending:
        time.sleep(self._jitter.random() * 0.01)
        return self._sums.start(flat, offset)


def _train(rank: int, world: int, mode: str, resume_at: int | None) -> list[Tensor]:
    """The masters after every step, and the shared weights after every sync; broken off and resumed at a step."""
    masters = unflat(initial())
    changes = []

    def make() -> Replicas:
        return Replicas(
            masters,
            LateSums(rank),
            world=world,
            sync_every=EVERY,
            outer=MODES[mode],
            after_change=lambda: changes.append(1),
        )

    replicas, found = make(), []
    for done in range(1, STEPS + 1):
        for name, moved in unflat(movement(rank, done)).items():
            masters[name] -= moved
        replicas.after_step(done, is_last=done == STEPS)
        found.append(flat_of(masters))
        if done % EVERY == 0:
            with replicas.shared_weights():
                found.append(flat_of(masters))
            assert torch.equal(flat_of(masters), found[-2])
        if done == resume_at:
            holds_sum, saved = replicas.holds_sum, clones(replicas.shared_state() | replicas.own_state())
            assert all(tensor.shape == SHAPES[name.partition(".")[0]] for name, tensor in saved.items())
            with replicas.shared_weights():
                weights = clones(masters)
            masters = unflat(torch.full((22,), torch.nan))
            replicas = make()
            for name, tensor in (masters | replicas.shared_state() | replicas.own_state()).items():
                tensor.copy_((weights | saved)[name])
            replicas.restart(holds_sum=holds_sum)
    assert len(changes) >= STEPS / EVERY
    return found


def mean(terms: list[Tensor]) -> Tensor:
    return sum(terms[1:], terms[0]) / len(terms)


def simulated(world: int, mode: str) -> list[list[Tensor]]:
    outer = MODES[mode]
    own = [initial() for _ in range(world)]
    shared, momentum = initial(), torch.zeros(22)
    starts, waiting = [initial() for _ in range(world)], []
    found: list[list[Tensor]] = [[] for _ in range(world)]

    def step(moved: list[Tensor]) -> None:
        nonlocal shared, momentum
        gradient = mean(moved)
        momentum = momentum * outer.momentum + gradient
        # As torch's `add` with `alpha`, which rounds once.
        shared = torch.sub(shared, torch.add(gradient, momentum, alpha=outer.momentum), alpha=outer.lr)

    for done in range(1, STEPS + 1):
        own = [weights - movement(rank, done) for rank, weights in enumerate(own)]
        if done % EVERY == 0:
            if mode == "local_sgd":
                shared = mean(own)
                own = [shared] * world
            elif mode == "diloco":
                step([shared - weights for weights in own])
                own = [shared] * world
            else:
                moved = [start - weights for start, weights in zip(starts, own)]
                if waiting:
                    step(waiting)
                own = starts = [shared - one for one in moved]
                waiting = moved
                if done == STEPS:
                    step(waiting)
                    own = [shared] * world
        for rank in range(world):
            found[rank].append(own[rank])
            if done % EVERY == 0:
                found[rank].append(shared)
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_replicas_equal_one_process_bitwise(mode, world):
    for found, expected in zip(run_ranks(world, _train, mode, None), simulated(world, mode), strict=True):
        for index, (actual, reference) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(actual, reference), f"entry {index}: {(actual - reference).abs().max()}"


@pytest.mark.parametrize("mode", MODES)
def test_replicas_go_on_from_a_saved_state_bitwise(mode):
    for straight, resumed in zip(run_ranks(2, _train, mode, None), run_ranks(2, _train, mode, 4)):
        assert all(torch.equal(one, other) for one, other in zip(straight, resumed, strict=True))


def test_diloco_moves_the_way_the_replicas_moved():
    # A pseudo-gradient of the wrong sign is a known mistake.
    found = run_ranks(2, _train, "diloco", None)
    moved = mean([movement(rank, 1) + movement(rank, 2) for rank in range(2)])
    first_sync = found[0][1]
    assert torch.dot(initial() - first_sync, moved) > 0


def _delay(rank: int, world: int, resume_at: int | None) -> list[Tensor | None]:
    flat = torch.full((22,), torch.nan)
    delayed, found = Delayed(flat, LateSums(rank)), []
    for step in range(STEPS):
        flat.copy_(movement(rank, step))
        found.append(flat.clone() if delayed.exchange() else None)
        if step == resume_at:
            saved = delayed.land().clone()
            flat = torch.full((22,), torch.nan)
            delayed = Delayed(flat, LateSums(rank))
            delayed.land().copy_(saved)
            delayed.has_sum = True
    return found


@pytest.mark.parametrize("resume_at", [None, 3])
def test_delayed_gradients_are_the_sums_of_the_step_before(resume_at):
    for found in run_ranks(3, _delay, resume_at):
        assert found[0] is None
        for step in range(1, STEPS):
            terms = [movement(rank, step - 1) for rank in range(3)]
            assert torch.equal(found[step], sum(terms[1:], terms[0]))
