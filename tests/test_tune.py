"""What `auto` chooses: the same on every rank, remembered, and never what gains nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from op_cases import equal

from fusedcomm import all_gather_matmul, matmul_reduce_scatter
from fusedcomm.comm import transport
from fusedcomm.comm.channel import channel_of
from fusedcomm.comm.transport import flag_transport_of
from fusedcomm.ops.all_gather_matmul import _forward as gather_forward
from fusedcomm.ops.chunked import Call
from fusedcomm.ops.matmul_reduce_scatter import _forward as scatter_forward
from fusedcomm.tune import cache, propose_sizes
from fusedcomm.tune.cache import Tuner, fastest, tuner_of
from fusedcomm.tune.cost import (
    Choice,
)
from fusedcomm.tune.speed import proportional

# Seconds that each way of running is made to take, by rank.
CASES = {
    "a chunked one is faster": ([{"serial": 0.03, 2: 0.004}] * 2, ("chunked", 2)),
    "nothing gains": ([{"serial": 0.004}] * 2, ("serial", 1)),
    "the slowest rank counts": (
        [{"serial": 0.03, 2: 0.05, 3: 0.01}, {"serial": 0.03, 2: 0.004, 3: 0.01}],
        ("chunked", 3),
    ),
    "one kernel is faster": ([{"serial": 0.03, 2: 0.02, "fused": 0.004}] * 2, ("fused", 2)),
}


def run_tuner(rank, world, seconds, folder, kind):
    os.environ["FUSEDCOMM_CACHE"] = folder
    tuner = Tuner(channel_of(dist.group.WORLD))
    runs = []

    def run(choice):
        runs.append(choice)
        way = choice.num_chunks if choice.method == "chunked" else choice.method
        time.sleep(seconds[rank].get(way, 0.03))

    arguments = {
        "rows": 8192,
        "shapes": kind,
        "local": "",
        # On any wire it takes far longer than everything else, whatever the number of chunks: all are timed.
        "wire_bytes": 10**12,
        "weight_bytes": 1,
        "directions": ("ring",),
        "device": torch.device("cpu"),
        "can_fuse": True,
        "run": run,
    }
    # The machine's real rate varies with what else runs on it, and another link would be timed anew. On a GPU there may
    # be a transport for the one kernel.
    carrier = "symmetric" if "fused" in seconds[rank] else ""
    with (
        patch.object(Tuner, "_measure_link", lambda self, device: cache._Link([0] * world, 1000.0)),
        patch.object(Tuner, "_carrier", lambda self, op, device: carrier),
    ):
        first = tuner.choose("op", "auto", **arguments)
        num_timed = len(runs)
        assert tuner.choose("op", "auto", **arguments) == first
        with (
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        ):
            # A graph takes what is known.
            assert tuner.choose("op", "auto", **arguments) == first
            unknown = tuner.choose("op", "auto", **arguments | {"shapes": "others"})
            assert unknown.reason == "a graph is captured: nothing can be timed"
        # A new process would have the disk alone.
        again = Tuner(channel_of(dist.group.WORLD)).choose("op", "auto", **arguments)
    return (first.method, first.num_chunks, first.reason), num_timed, len(runs), again == first


@pytest.mark.parametrize("name", CASES)
def test_the_fastest_is_chosen_by_all_ranks_and_remembered(name, tmp_path):
    seconds, expected = CASES[name]
    results = run_ranks(2, run_tuner, seconds, str(tmp_path), name)
    for choice, num_timed, num_runs, same in results:
        assert choice[:2] == expected
        assert num_timed > 0
        assert num_runs == num_timed, "a remembered choice was timed again"
        assert same
    assert results[0][0] == results[1][0]
    assert len(list(tmp_path.iterdir())) == 1


SERIAL, TWO, FOUR = Choice("serial", 1, ""), Choice("chunked", 2, ""), Choice("chunked", 4, "")


@pytest.mark.parametrize(
    ("rounds", "method", "num_chunks"),
    [
        ([(1.0, 0.8, 0.7)] * 3, "chunked", 4),
        # Long calls are timed once.
        ([(10.0, 9.0, 11.0)], "chunked", 2),
        ([(1.0, 0.98, 1.1)] * 3, "serial", 1),
        # By luck: in the middle it is faster, but a third of the rounds say otherwise.
        ([(1.0, 0.9, 2.0), (1.1, 0.95, 2.0), (1.0, 1.3, 2.0)], "serial", 1),
        # A single round that is late is luck too.
        ([(1.0, 0.8, 2.0)] * 11 + [(1.0, 5.0, 2.0)], "chunked", 2),
    ],
)
def test_what_overlaps_is_taken_if_most_rounds_say_so(rounds, method, num_chunks):
    choice = fastest([SERIAL, TWO, FOUR], rounds)
    assert (choice.method, choice.num_chunks) == (method, num_chunks)


def test_what_is_as_fast_as_serial_is_hardly_ever_taken():
    """Times of a tiny call on a busy machine: a few tenths more or less, and now and then several times as much."""
    generator = torch.Generator().manual_seed(0)

    def taken(factor: float) -> int:
        times = (0.25 * torch.randn(200, cache._num_rounds(5e-4), 2, generator=generator)).exp()
        times *= 1 + 3 * (torch.rand(times.shape, generator=generator) < 0.05)
        times[..., 1] *= factor
        return sum(fastest([SERIAL, TWO], rounds).method == "chunked" for rounds in times.tolist())

    assert taken(1.0) <= 10
    assert taken(0.6) >= 190


@pytest.mark.parametrize(("major", "reason"), [(9, ""), (12, "RTX is none of sm_80, sm_90, sm_100, gfx942")])
def test_a_gpu_that_kernels_do_not_know_is_named(major, reason):
    properties = SimpleNamespace(name="RTX", gcnArchName="RTX", major=major, minor=0)
    with patch.object(torch.cuda, "get_device_properties", lambda device: properties):
        assert transport._unknown_gpu(torch.device("cuda", 0)) == reason


def run_on_an_unknown_gpu(rank, world):
    group, device = dist.group.WORLD, torch.device("cuda", 0)
    reason = "RTX is none of those" if rank else ""
    with (
        patch.object(transport, "_unknown_gpu", lambda device: reason),
        patch.object(transport, "_check_kernels", lambda op, device: None),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        carrier = tuner_of(group)._carrier("op", device)
        with pytest.raises(ValueError, match=r"^op: method='fused' cannot run: on rank 1, RTX is none of those"):
            flag_transport_of(group, "op", device)
    return carrier


def test_where_kernels_do_not_know_a_gpu_the_other_ways_are_timed():
    assert run_ranks(2, run_on_an_unknown_gpu) == ["", ""]


def run_on_two_devices(rank, world, folder):
    """What is chosen for tensors of the same shapes on a CPU, on a GPU, and once more."""
    os.environ["FUSEDCOMM_CACHE"] = folder
    tuner, links = Tuner(channel_of(dist.group.WORLD)), []

    def measure(self, device):
        links.append(device.type)
        return cache._Link([0] * world, 1000.0)

    def time_none(self, options, wire_s, piece_s, directions, nodes, device, run):
        return options[-1] if device.type == "cuda" else options[0]

    work = {"rows": 8192, "shapes": "of one kind", "local": "", "wire_bytes": 1, "weight_bytes": 1, "directions": ()}
    with (
        patch.object(Tuner, "_measure_link", measure),
        patch.object(Tuner, "_carrier", lambda self, op, device: "symmetric" if device.type == "cuda" else ""),
        patch.object(Tuner, "_time", time_none),
    ):
        methods = [
            tuner.choose("op", "auto", **work, device=torch.device(name), can_fuse=True, run=print).method
            for name in ("cuda", "cpu") * 2
        ]
    return methods, links


def test_what_is_chosen_on_a_gpu_says_nothing_of_the_cpu(tmp_path):
    for methods, links in run_ranks(2, run_on_two_devices, str(tmp_path)):
        assert methods == ["fused", "serial"] * 2
        assert links == ["cuda", "cpu"]


def run_differing(rank, world, folder):
    kind = "ranks remember different things"
    folders = [Path(folder) / "0", Path(folder) / "1"]
    # Both ranks know rank 0's; then rank 1 forgets, or remembers something else.
    first = run_tuner(rank, world, [{2: 0.004}] * 2, str(folders[0]), kind)[0]
    if rank == 1:
        folders[1].mkdir()
        for path in folders[0].iterdir():
            (folders[1] / path.name).write_text(path.read_text().replace('"chunked"', '"serial"'))
    dist.barrier()
    second, num_timed, _, _ = run_tuner(rank, world, [{3: 0.004}] * 2, str(folders[rank]), kind)
    return first, second, num_timed


def test_ranks_that_remember_different_things_time_again_and_agree(tmp_path):
    for first, second, num_timed in run_ranks(2, run_differing, str(tmp_path)):
        assert first[:2] == ("chunked", 2)
        assert num_timed > 0
        assert second[:2] == ("chunked", 3)


def run_homeless(rank, world):
    # As in a container whose user has no name.
    with (
        patch.dict(os.environ, {"FUSEDCOMM_CACHE": "", "XDG_CACHE_HOME": ""}),
        patch.object(Path, "home", side_effect=RuntimeError("Could not determine home directory.")),
    ):
        return all_gather_matmul(torch.ones(64, 3), torch.ones(2, 3), group=dist.group.WORLD).unique().tolist()


def test_without_a_home_nothing_is_remembered():
    assert run_ranks(2, run_homeless) == [[3.0]] * 2


def run_backwards(rank, world, folder):
    """How many kinds of backward calls were timed after each of several calls on tensors of the same shapes."""
    os.environ["FUSEDCOMM_CACHE"] = folder
    timed, counts = [], []

    def time_none(self, options, *rest):
        timed.append(options)
        return options[0]

    with patch.object(Tuner, "_time", time_none):
        for op, options in (
            (all_gather_matmul, {}),
            (all_gather_matmul, {"save": "gathered"}),
            (matmul_reduce_scatter, {}),
        ):
            for x_needs, w_needs in ((True, True), (False, True), (True, False), (True, True)):
                x, w = torch.ones(128, 8, requires_grad=x_needs), torch.ones(8, 8, requires_grad=w_needs)
                y = op(x, w, group=dist.group.WORLD, **options)
                timed.clear()
                y.sum().backward()
                counts.append(len(timed))
    return counts


def test_what_backward_has_to_do_makes_its_kind(tmp_path):
    """With nothing to hide `serial` is as good, which says nothing about a layer of the same shapes."""
    for counts in run_ranks(2, run_backwards, str(tmp_path)):
        # Where the input was kept, or needs no dw, dx is all that travels.
        assert counts == [1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0]


WAYS = [
    Choice("serial", 1, ""),
    *(Choice("chunked", count, "", direction) for direction in ("pairs", "ring", "both_ways") for count in range(1, 5)),
]


def run_every_way(rank, world, rows):
    """Twice in every way, on the same inputs."""
    generator = torch.Generator().manual_seed(rank)
    # Uneven, so that chunks of different shards differ too.
    sizes = tuple(rows + 3 * other for other in range(world))
    x = torch.randn(sizes[rank], 2, 48, generator=generator)
    w = torch.randn(40, 48, generator=generator)
    results = []
    for way in WAYS:
        for _ in range(2):
            call = Call("op", dist.group.WORLD, sizes, way)
            full, y = gather_forward(x, [w], [], call, None, keep=True)
            results.append((y, full, scatter_forward([full], w, None, None, call)))
    return results


# Few rows are sent by the calling thread, many by the sender's.
@pytest.mark.parametrize("rows", [40, 800])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_choice_moves_the_same_bits_and_repeats_itself(world, rows):
    for results in run_ranks(world, run_every_way, rows):
        serial = results[0]
        for first, second in zip(results[::2], results[1::2]):
            assert equal(first, second), "two runs of one choice differ"
        for y, full, z in results:
            assert torch.equal(full, serial[1])
            torch.testing.assert_close(y, serial[0], rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(z, serial[2], rtol=1e-5, atol=1e-3)


def run_uneven(rank, world):
    # Rank 1 multiplies 128 times as many rows in the measurement: slower whatever else the machine does.
    x, w = torch.randn(2048 if rank == 1 else 16, 512), torch.randn(512, 512)
    sizes = propose_sizes(96, x, w, group=dist.group.WORLD, multiple=8)
    # The layers' weights cut by it give what even shares give.
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(96, 24, generator=generator), torch.randn(24, 96, generator=generator)
    x = torch.randn(10, 24, generator=generator)
    h = all_gather_matmul(x.chunk(world)[rank], up.split(sizes)[rank], group=dist.group.WORLD)
    z = matmul_reduce_scatter(h, down.split(sizes, 1)[rank], group=dist.group.WORLD)
    return sizes, z, ((x @ up.t()) @ down.t()).chunk(world)[rank]


def test_a_slow_rank_gets_a_smaller_share():
    results = run_ranks(2, run_uneven)
    assert results[0][0] == results[1][0]
    for sizes, z, expected in results:
        assert sum(sizes) == 96
        assert all(size % 8 == 0 for size in sizes)
        assert sizes[0] > sizes[1]
        torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-3)


@given(st.integers(0, 1000), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_shares_are_whole_and_proportional(total, weights):
    sizes = proportional(total, weights)
    assert sum(sizes) == total
    assert all(abs(size - total * weight / sum(weights)) < 1 for size, weight in zip(sizes, weights))
