"""What waits on disk comes back bit for bit, leaves no file behind, and a disk that cannot take it is named."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from test_overlap_forward import assert_same_trajectory, changed
from torch import Tensor, nn

from fusedcomm.parallel import disk
from fusedcomm.parallel.disk import ActivationParking, DiskFolder, DiskTensors
from fusedcomm.parallel.optimizer import Optimizer


@pytest.fixture(autouse=True)
def _park_everything(monkeypatch):
    monkeypatch.setattr(disk, "_MIN_BYTES", 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.nn.functional.silu(self.first(x.t().t() * 1.5)))


def gradients(parking: ActivationParking | None, *, fetch: bool = True) -> list[Tensor]:
    """Four forwards, then their backwards, the last first."""
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(), Block(), Block())
    kept = {param.untyped_storage().data_ptr() for param in blocks.parameters()}
    waiting = []
    for index in range(4):
        x = torch.randn(33, 64).requires_grad_()
        if parking is None:
            waiting.append((x, blocks(x).square().sum(), None))
            continue
        parked = parking.open(kept)
        with parked.saving():
            waiting.append((x, blocks(x).square().sum(), parked))
        if index == 1:
            # Until all is written: then backward reads it from the files.
            parking._worker.submit(lambda: None).wait()
    found = []
    while waiting:
        x, loss, parked = waiting.pop()
        if fetch and waiting and waiting[-1][2] is not None:
            waiting[-1][2].fetch()
        loss.backward()
        found.append(x.grad)
    return [*found, *(param.grad for param in blocks.parameters())]


@pytest.mark.parametrize("fetch", [True, False])
def test_parked_activations_give_the_same_gradients_to_the_bit(tmp_path, fetch):
    expected = gradients(None)
    folder = DiskFolder(tmp_path / "new")
    parking = ActivationParking(folder)
    sizes = []
    for _ in range(3):
        for ours, plain in zip(gradients(parking, fetch=fetch), expected):
            assert torch.equal(ours, plain)
        sizes.append(folder.num_bytes)
    assert parking.num_written_bytes > 3 * 2 * 33 * 64 * 4
    # Files are used again.
    parking._worker.submit(lambda: None).wait()
    assert sizes[2] <= 2 * sizes[0]
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]


def test_parked_activations_leave_memory_and_given_up_ones_their_files(tmp_path):
    parking = ActivationParking(DiskFolder(tmp_path))
    parked = parking.open(())
    x = torch.randn(100, 100)
    with parked.saving():
        y = x.clone().requires_grad_().exp()
    reference = weakref.ref(y)
    loss = y.sum()
    parking._worker.submit(lambda: None).wait()
    saved = [ref() for ref in parked._saved]
    assert len(saved) == 1
    assert saved[0].tensor is None
    free = saved[0].free
    del y, loss, saved
    assert reference() is None
    assert len(free) == 1


def test_what_is_modified_in_place_is_refused(tmp_path):
    parking = ActivationParking(DiskFolder(tmp_path))
    weight = torch.ones(50, requires_grad=True)
    x = torch.randn(50)
    before_it_is_written = threading.Event()
    parking._worker.submit(before_it_is_written.wait)
    with parking.open(()).saving():
        loss = (x * weight).sum()
        x.add_(1)
    before_it_is_written.set()
    with pytest.raises(RuntimeError, match=r"shape \[50\] .* modified in place"):
        loss.backward()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"offload: .*file/below cannot take .*train\.offload\.folder"):
        DiskFolder(tmp_path / "file" / "below")


def test_a_full_disk_is_an_error_of_the_next_forward_or_backward(tmp_path, monkeypatch):
    parking = ActivationParking(DiskFolder(tmp_path))

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"cannot take \d+ bytes more than the \d+ of this rank \(No space left"):
        gradients(parking)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_on_disk_is_the_one_in_memory(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(disk, "_PART_BYTES", 3000)
    results = []
    for tensors in (None, DiskTensors(DiskFolder(tmp_path))):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(4))).to(dtype)
        optimizer = Optimizer(model.named_parameters(), clip_norm=0.5, disk=tensors)
        for step in range(4):
            model(torch.randn(7, 20, dtype=dtype)).square().sum().backward()
            optimizer.step(step, lr=0.01)
            model.zero_grad()
        # As from a checkpoint.
        optimizer.load_state_dict(
            {name: {key: value.clone() for key, value in own.items()} for name, own in optimizer.state_dict().items()}
        )
        results.append((list(model.parameters()), optimizer.state_dict()))
    (params, state), (params_on_disk, state_on_disk) = results
    assert all(map(torch.equal, params, params_on_disk))
    for name, own in state.items():
        assert all(torch.equal(value, state_on_disk[name][key]) for key, value in own.items())
    assert any(own["exp_avg"].abs().sum() > 0 for own in state.values())
    assert list(tmp_path.iterdir()) == []


ON_DISK = {
    "backward+forward": {"overlap": "backward+forward"},
    "local_sgd": {"sync": "local_sgd", "sync_every": 3},
    "diloco": {"sync": "diloco", "sync_every": 3},
    "overlapped diloco": {"sync": "diloco", "sync_every": 1, "outer_overlap": True},
}


@pytest.mark.parametrize("name", ON_DISK)
def test_modes_that_change_weights_at_other_times_train_alike_on_disk(tmp_path, name):
    # In bf16, so that masters are on disk too, and on two stages, of which the first has activations to park.
    raw = changed("model.ffn_hidden", 512, changed("data.seq_len", 96, changed("train.precision", "bf16")))
    raw = changed("parallel_config.pipeline_parallel", {"depth": 2, "micro_batches": 2}, raw)
    raw["parallel_config"]["data_parallel"] |= ON_DISK[name]
    on_disk = changed("train.offload", {"activations": "disk", "optimizer": "disk", "folder": str(tmp_path)}, raw)
    assert_same_trajectory(raw, on_disk, 4, jitter_seed=1)


def test_tensors_in_files_are_used_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_PART_BYTES", 3 * mmap.PAGESIZE)
    tensors = DiskTensors(DiskFolder(tmp_path))
    like = torch.empty(100)
    for name in "abcde":
        tensors.zeros(name, like), tensors.zeros(name, like)
    assert list(tensors.in_turn("abcde")) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(tensors.in_turn("")) == []


_DYING = """
import os, sys, torch
from pathlib import Path
from fusedcomm.parallel.disk import DiskFolder
kept = DiskFolder(Path(sys.argv[1])).map(1 << 20)
kept.bytes.fill_(1)
os.kill(os.getpid(), 9)
"""


def test_nothing_is_left_of_a_killed_process(tmp_path):
    result = subprocess.run([sys.executable, "-c", _DYING, str(tmp_path)], check=False, timeout=120)
    assert result.returncode == -9
    assert list(Path(tmp_path).iterdir()) == []
