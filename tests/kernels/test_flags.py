from __future__ import annotations

import pytest
import torch
from peers import has_arrived, make_chunks, publish_kernel

from fusedcomm.kernels._triton import tl, triton
from fusedcomm.kernels.flags import Chunks, Timeout, arrive, read_status, record_timeout

LAST, WRAPPED = 2**31 - 1, -(2**31)


@pytest.mark.parametrize(
    ("flag", "epoch", "arrived"),
    [
        (4, 5, False),
        (5, 5, True),
        (6, 5, True),
        (LAST, WRAPPED, False),
        (WRAPPED, LAST, True),
        (-1, 0, False),
        (0, -1, True),
    ],
)
def test_wait_compares_epochs_modulo_2_to_32(flag, epoch, arrived):
    chunks = make_chunks(0, [1])
    chunks.flags.fill_(flag)
    chunks.epoch.fill_(epoch)
    assert has_arrived(chunks, 0, timeout_us=3) is arrived


def test_publish_raises_one_flag():
    chunks = make_chunks(0, [1, 1, 1])
    chunks.epoch.fill_(WRAPPED)
    publish_kernel[(1,)](chunks.flags[1:], chunks.epoch)
    assert chunks.flags.tolist() == [0, WRAPPED, 0]


@triton.jit
def arrive_kernel(counter_ptr, before_ptr):
    before = arrive(counter_ptr + tl.arange(0, 1), tl.full((1,), True, tl.int1))
    tl.store(before_ptr + tl.program_id(0) + tl.arange(0, 1), before)


def test_arrive_tells_each_program_how_many_came_before():
    counter, before = torch.zeros(1, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
    arrive_kernel[(5,)](counter, before)
    assert before.sort().values.tolist() == [0, 1, 2, 3, 4]
    assert counter.item() == 5


@triton.jit
def timeout_kernel(status_ptr):
    record_timeout(status_ptr, 1, 7, 10 + tl.program_id(0), -3)


def test_status_keeps_the_first_timeout():
    status = torch.zeros(4, dtype=torch.int32)
    assert read_status(status) is None
    timeout_kernel[(3,)](status)
    assert read_status(status) == Timeout("all_gather_matmul", rank=7, chunk=10, epoch=-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 3}, "rank=3 of world=3; must be in 0..world-1"),
        ({"world": 2}, "3 flags for world=2; every rank has equally many chunks"),
        ({"flags": torch.zeros(0, dtype=torch.int32)}, "0 flags for world=3"),
        ({"flags": torch.zeros(3)}, r"flags is torch.float32 \(3,\).*must be torch.int32 \(3,\)"),
        ({"starts": torch.tensor([0, 4, 8])}, r"starts is torch.int64 \(3,\).*int32 or torch.int64 \(4,\)"),
        ({"starts": torch.tensor([0, 4, 8, 11])}, r"starts are \[0, 4, 8, 11\]; must ascend from 0 to .*, 12"),
        ({"starts": torch.tensor([0, 8, 4, 12])}, "must ascend"),
        ({"epoch": torch.zeros(1, dtype=torch.int64)}, r"epoch is torch.int64 \(1,\)"),
        ({"epoch": torch.zeros(2, dtype=torch.int32)[::2]}, None),
        ({"flags": torch.zeros(6, dtype=torch.int32)[::2]}, r"strides \(2,\).*contiguous"),
    ],
)
def test_chunks_reject_what_does_not_fit(changes, message):
    chunks = make_chunks(0, [4, 4, 4])
    fields = {name: getattr(chunks, name) for name in ("rank", "world", "starts", "flags", "epoch")} | changes
    if message is None:
        Chunks(**fields).check("op", 12, torch.device("cpu"))
        return
    with pytest.raises(ValueError, match="op: .*" + message):
        Chunks(**fields).check("op", 12, torch.device("cpu"))
