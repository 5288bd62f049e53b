"""Compressed sums: to the bit those of one process that encodes alike, and nothing is ever lost, only late."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from test_collectives import poison, values_of
from torch import Tensor

from fusedcomm.comm import hierarchical
from fusedcomm.comm.collective import AllReduce, Pending
from fusedcomm.comm.compress import BLOCK, Bf16, Codec, Int8, Layout, Place, Residual, TopK
from fusedcomm.comm.hierarchical import Hierarchical, level_groups
from fusedcomm.comm.low_rank import LowRank
from fusedcomm.comm.ring import chunk_sizes

CODECS = {"bf16": Bf16(), "int8": Int8(), "topk": TopK(0.1)}
LENGTHS = (1, 2, 255, 256, 257, 1000)
STEPS = 3


def encoded(codec: Codec, values: Tensor) -> tuple[Tensor, Tensor]:
    """What arrives in place of `values`, and what it misses."""
    wire = torch.full((codec.num_bytes(values.numel()),), 255, dtype=torch.uint8)
    arrived, error = torch.full_like(values, torch.nan), torch.zeros_like(values)
    codec.encode(values, wire, error)
    codec.decode(wire, arrived)
    return arrived, error


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CODECS)
def test_a_codec_keeps_what_it_misses(name, length):
    values = values_of(0, length)
    arrived, error = encoded(CODECS[name], values)
    torch.testing.assert_close(arrived + error, values)


def test_int8_is_off_by_half_a_step_of_its_block_at_most_and_a_quarter_as_large():
    values = values_of(0, 1000) * torch.logspace(-6, 6, 1000)
    arrived, _ = encoded(Int8(), values)
    for part, came in zip(values.split(BLOCK), arrived.split(BLOCK)):
        assert (part - came).abs().max() <= part.abs().max() / 254 * (1 + 1e-5)
    assert 4 * 1024 / Int8().num_bytes(1024) > 3.9
    for scale in (0.0, 1e-45, 1e-43, 1e-40, 1e-37, 1e36):
        tiny = values_of(0, 300).clamp(-3, 3) * scale
        arrived, error = encoded(Int8(), tiny)
        assert arrived.isfinite().all(), scale
        assert (arrived - tiny).abs().max() <= tiny.abs().max(), scale
        torch.testing.assert_close(arrived + error, tiny)


def test_topk_sends_the_largest():
    values = torch.tensor([0.0, -5.0, 1.0, 0.5, 3.0, -0.1])
    arrived, error = encoded(TopK(0.3), values)
    assert arrived.tolist() == [0, -5, 0, 0, 3, 0]
    assert torch.equal(arrived + error, values)
    assert TopK(0.01).num_bytes(1000) == 80


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_arrives_as_such(name, bad):
    values = values_of(0, 600)
    values[300] = bad
    assert not encoded(CODECS[name], values)[0].isfinite().all()


def _sum_compressed(rank: int, world: int, name: str, nodes: list[int], in_node: bool, delay: bool) -> list[Tensor]:
    """The sums of some steps, and the residual at the end."""
    codec, length = CODECS[name], 1000
    whole, hierarchical.CHUNK_BYTES = hierarchical.CHUNK_BYTES, 1600
    jitter = random.Random(rank)
    try:
        residual = torch.zeros(length)
        sums = Hierarchical(
            *level_groups(dist.group.WORLD, nodes, timeout_s=20),
            in_node_codec=codec if in_node else None,
            across_codec=codec,
            residual=residual,
        )
        found = []
        for step in range(STEPS):
            flat = values_of(world * step + rank, length)
            poison(hierarchical._POOL, length)
            if delay:
                time.sleep(jitter.random() * 0.02)
            # In two pieces, as a queue would cut it.
            pending = [sums.start(flat[:416], 0), sums.start(flat[416:], 416)]
            for work in pending:
                work.wait()
            found.append(flat)
    finally:
        hierarchical.CHUNK_BYTES = whole
    return [*found, residual]


def one_process(world: int, codec: Codec) -> tuple[list[Tensor], list[Tensor]]:
    """The same sums over one level, piece by piece, chunk by chunk and owner by owner."""
    length = 1000
    residuals = [torch.zeros(length) for _ in range(world)]
    sums = []
    for step in range(STEPS):
        own = [values_of(world * step + rank, length) + residuals[rank] for rank in range(world)]
        residuals = [torch.zeros(length) for _ in range(world)]
        total, start = torch.empty(length), 0
        for size in (400, 16, 400, 184):
            for owner, share in enumerate(chunk_sizes(size, world)):
                cut = slice(start, start + share)
                start += share
                if not share:
                    continue
                terms = []
                for rank in range(world):
                    term = own[rank][cut]
                    if rank != owner:
                        term, error = encoded(codec, term)
                        residuals[rank][cut] += error
                    terms.append(term)
                total[cut], error = encoded(codec, sum(terms[1:], terms[0]))
                residuals[owner][cut] += error
        sums.append(total)
    return sums, residuals


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_compressed_sums_equal_one_process_bitwise(world, name):
    sums, residuals = one_process(world, CODECS[name])
    ranks = run_ranks(world, _sum_compressed, name, list(range(world)), False, world == 3)
    for (*found, residual), expected in zip(ranks, residuals):
        for actual, total in zip(found, sums):
            assert torch.equal(actual, total)
        assert torch.equal(residual, expected)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("in_node", [False, True])
def test_by_levels_nothing_is_lost_and_all_ranks_hold_the_same(name, in_node):
    ranks = run_ranks(4, _sum_compressed, name, [0, 0, 1, 1], in_node, False)
    for step in range(STEPS):
        assert all(torch.equal(found[step], ranks[0][step]) for found in ranks)
    check_conserved(ranks, 4, 1000)


def check_conserved(ranks: list[list[Tensor]], world: int, length: int) -> None:
    """What has arrived, and what is left in the residuals, is what was given."""
    given = sum(values_of(index, length).double() for index in range(world * STEPS))
    arrived = sum(ranks[0][step].double() for step in range(STEPS))
    left = sum(found[STEPS].double() for found in ranks)
    torch.testing.assert_close(arrived + left, given, rtol=0, atol=1e-5)
    assert (arrived - given).abs().max() > 1e-3


# A matrix that is cut by a piece, one that would not get smaller, and a vector.
PLACES = (
    Place("wide", 0, (12, 20)),
    Place("small", 240, (2, 3)),
    Place("vector", 256, (9,)),
    Place("tall", 272, (40, 6)),
)
LENGTH = 512
LAYOUT = Layout(PLACES, LENGTH, torch.device("cpu"))


def _sum_low_rank(rank: int, world: int, cut: int, resume: bool) -> list[Tensor]:
    def make() -> tuple[LowRank, Tensor]:
        residual = Residual(LAYOUT).whole
        return LowRank(AllReduce(dist.group.WORLD), rank=2, places=PLACES, residual=residual), residual

    sums, residual = make()
    found = []
    for step in range(STEPS):
        if resume:
            old, old_residual = sums, residual
            sums, residual = make()
            sums.load_state_dict(old.state_dict())
            residual.copy_(old_residual)
        flat = values_of(world * step + rank, LENGTH)
        pending = [sums.start(flat[:cut], 0), sums.start(flat[cut:], cut)]
        for work in pending:
            work.wait()
        found.append(flat)
    return [*found, residual]


@pytest.mark.parametrize("cut", [LENGTH, 240, 50])
def test_low_rank_sums_lose_nothing_and_vectors_are_exact(cut):
    ranks = run_ranks(2, _sum_low_rank, cut, False)
    check_conserved(ranks, 2, LENGTH)
    for step in range(STEPS):
        assert torch.equal(ranks[0][step], ranks[1][step])
        exact = values_of(2 * step, LENGTH) + values_of(2 * step + 1, LENGTH)
        assert torch.equal(ranks[0][step][240:272], exact[240:272])
        # Rows of the wide matrix that were summed together span two directions.
        rows = min(12, cut // 20)
        assert torch.linalg.matrix_rank(ranks[0][step][: rows * 20].view(rows, 20), rtol=1e-4) == min(2, rows)


def test_low_rank_sums_go_on_from_a_saved_state_bitwise():
    for straight, resumed in zip(run_ranks(2, _sum_low_rank, LENGTH, False), run_ranks(2, _sum_low_rank, LENGTH, True)):
        for one, other in zip(straight, resumed):
            assert torch.equal(one, other)


class Alone:
    """`Collective` of one rank, which counts what it sums."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def start(self, flat: Tensor, offset: int) -> Pending:
        self.lengths.append(flat.numel())
        return self

    def wait(self) -> None:
        pass


def test_low_rank_finds_a_matrix_of_that_rank():
    left, right = values_of(1, 24).view(12, 2), values_of(2, 40).view(2, 20)
    places = PLACES[:1]

    sums = LowRank(Alone(), rank=2, places=places, residual=torch.zeros(240))
    for _ in range(2):
        flat = (left @ right).flatten()
        sums.start(flat, 0).wait()
    torch.testing.assert_close(flat, (left @ right).flatten(), rtol=1e-4, atol=1e-4)


def test_low_rank_sums_of_vectors_alone_are_one_transfer():
    inner = Alone()
    LowRank(inner, rank=2, places=PLACES, residual=torch.zeros(LENGTH)).start(values_of(0, 16), 256).wait()
    assert inner.lengths == [16]


def test_low_rank_keeps_no_directions_of_pieces_that_are_cut_otherwise_now():
    sums = LowRank(Alone(), rank=2, places=PLACES, residual=torch.zeros(LENGTH))
    for cut, keys in (
        (LENGTH, {"wide[0:12]", "tall[0:40]"}),
        (100, {"wide[0:5]", "wide[5:12]", "tall[0:40]"}),
        (120, {"wide[0:6]", "wide[6:12]", "tall[0:40]"}),
    ):
        for start, piece in zip((0, cut), values_of(0, LENGTH).split([cut, LENGTH - cut])):
            sums.start(piece, start).wait()
        assert set(sums.state_dict()) == keys


def test_a_residual_is_known_by_name():
    residual = Residual(LAYOUT)
    residual.whole.copy_(torch.arange(LENGTH))
    state = residual.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        place.name: place.shape for place in PLACES
    }
    assert state["vector"].tolist() == list(range(256, 265))
    state["vector"].fill_(-1)
    assert residual.whole[256].item() == -1
