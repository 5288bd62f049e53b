"""Memory on disk: mapped files that vanish with the process, and activations that wait in them for their backward."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fusedcomm.comm.record import span
from fusedcomm.comm.worker import Worker

# Less is not worth a file.
_MIN_BYTES = 64 * 1024
# Activations that are not written yet; a disk that is slower than computing holds computing up beyond that.
_MAX_UNWRITTEN_BYTES = 256 * 2**20
# Of the tensors in files, those that are in memory together.
_PART_BYTES = 32 * 2**20


class DiskFolder:
    """Makes mapped files in one folder. They have no name, so that they are gone when the process is, however it ends.

    Errors: OSError naming the folder, here where it cannot be written to, later where it is full: room is reserved
    when a file is made, since a full disk is otherwise noticed as a crash.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_bytes = 0
        self.map(mmap.PAGESIZE)

    def map(self, num_bytes: int) -> MappedFile:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                mapped = MappedFile(mmap.mmap(file.fileno(), num_bytes))
        except OSError as error:
            raise OSError(
                f"offload: {self.folder} cannot take {num_bytes} bytes more than the {self.num_bytes} of this rank "
                f"({error.strerror}); choose another folder (train.offload.folder), or free space"
            ) from error
        self.num_bytes += num_bytes
        return mapped


class MappedFile:
    """`bytes` [n] uint8 lie in a file; what of them is in memory is the operating system's choice, or ours."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)

    def view(self, like: Tensor) -> Tensor:
        """Its beginning, as a contiguous tensor of `like`'s shape and dtype."""
        return self.bytes[: like.nbytes].view(like.dtype).view(like.shape)

    def read_ahead(self) -> None:
        self._mapping.madvise(mmap.MADV_WILLNEED)

    def leave_memory(self) -> None:
        """Nothing is lost: the pages are the file's."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


class DiskTensors:
    """Named tensors that stay in files. Those in use are in memory, and the next ones are read ahead by a thread."""

    def __init__(self, folder: DiskFolder) -> None:
        self._folder = folder
        self._files: dict[str, list[MappedFile]] = {}
        self._worker = Worker("fusedcomm-disk")
        weakref.finalize(self, self._worker.close)

    def zeros(self, name: str, like: Tensor) -> Tensor:
        """A tensor of `like`'s shape and dtype, one of those that are used when `name` is."""
        file = self._folder.map(_pages(like.nbytes))
        self._files.setdefault(name, []).append(file)
        return file.view(like)

    def in_turn(self, names: Iterable[str]) -> Iterator[list[str]]:
        """The names in parts: while one is used, the next is read and the one before leaves memory."""
        parts: list[list[str]] = []
        num_bytes = _PART_BYTES
        for name in names:
            if num_bytes >= _PART_BYTES:
                parts.append([])
                num_bytes = 0
            parts[-1].append(name)
            num_bytes += sum(file.bytes.numel() for file in self._files[name])
        for part, following in zip_longest(parts, parts[1:], fillvalue=()):
            self._worker.submit(partial(self._each, MappedFile.read_ahead, following))
            yield list(part)
            self._worker.submit(partial(self._each, MappedFile.leave_memory, part))

    def _each(self, do: Callable[[MappedFile], None], names: Iterable[str]) -> None:
        for name in names:
            for file in self._files[name]:
                do(file)


def _pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


class _Saved:
    """One saved tensor: in memory, on disk or on its way."""

    def __init__(self, tensor: Tensor, free: deque[MappedFile]) -> None:
        self.like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self.version = tensor._version
        self.tensor: Tensor | None = tensor
        self.file: MappedFile | None = None
        self.free = free
        # Backward is near: it is read, and if it has not been written yet it stays.
        self.wanted = False
        self.ready = threading.Event()

    def __del__(self) -> None:
        # The graph was given up on. No lock: this may run within anything.
        if self.file is not None:
            self.free.append(self.file)


class ParkedActivations:
    """What autograd saves of one forward, from `saving()` to the backward that uses it.

    `fetch()` before that backward has it read ahead.
    """

    def __init__(self, parking: ActivationParking, kept: Collection[int]) -> None:
        self._parking, self._kept = parking, kept
        self._saved: list[weakref.ref[_Saved]] = []

    def saving(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self._pack, self._parking.unpack)

    def fetch(self) -> None:
        # Backward uses first what forward saved last.
        while self._saved:
            saved = self._saved.pop()()
            if saved is not None:
                self._parking.want(saved)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if tensor.nbytes < _MIN_BYTES or tensor.untyped_storage().data_ptr() in self._kept or not _is_dense(tensor):
            return tensor
        saved = self._parking.park(tensor)
        self._saved.append(weakref.ref(saved))
        return saved


class ActivationParking:
    """Writes saved activations to files and reads them back, on one thread in the background.

    Values come back bit for bit, with their strides. What backward wants before it was written never leaves memory.
    Errors: OSError as `DiskFolder`, from the forward or backward that follows.
    """

    def __init__(self, folder: DiskFolder) -> None:
        self._folder = folder
        # By size; files are used again from step to step.
        self._free: dict[int, deque[MappedFile]] = {}
        self._lock = threading.Condition()
        self._unwritten_bytes = 0
        self._error: Exception | None = None
        self._worker = Worker("fusedcomm-disk")
        weakref.finalize(self, self._worker.close)
        self.num_written_bytes = 0

    def open(self, kept: Collection[int]) -> ParkedActivations:
        """For one forward; storages at the addresses `kept` stay in memory: weights, and what lives on anyway."""
        return ParkedActivations(self, kept)

    def park(self, tensor: Tensor) -> _Saved:
        size = _pages(tensor.nbytes)
        saved = _Saved(tensor, self._free.setdefault(size, deque()))
        with self._lock:
            if self._unwritten_bytes >= _MAX_UNWRITTEN_BYTES:
                with span("wait", "offload: unwritten activations"):
                    # Every write ends, if only with an error.
                    self._lock.wait_for(lambda: self._unwritten_bytes < _MAX_UNWRITTEN_BYTES)
            self._raise_error()
            self._unwritten_bytes += tensor.nbytes
        # The job must not keep alive what backward has done with.
        self._worker.submit(partial(self._write, weakref.ref(saved), size, tensor.nbytes))
        return saved

    def want(self, saved: _Saved) -> None:
        with self._lock:
            if saved.wanted:
                return
            saved.wanted = True
            if saved.tensor is not None:
                saved.ready.set()
                return
        self._worker.submit(partial(self._read, saved))

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.want(saved)
        if not saved.ready.is_set():
            with span("wait", "offload: activations from disk"):
                saved.ready.wait()
        self._raise_error()
        assert saved.tensor is not None
        self._check_version(saved, saved.tensor)
        return saved.tensor

    def _write(self, reference: weakref.ref[_Saved], size: int, num_bytes: int) -> None:
        try:
            saved = reference()
            tensor = None if saved is None or saved.wanted else saved.tensor
            if saved is None or tensor is None:
                return
            self._check_version(saved, tensor)
            file = saved.free.pop() if saved.free else self._folder.map(size)
            _flat(file, saved.like).copy_(tensor)
            self._check_version(saved, tensor)
            file.leave_memory()
            self.num_written_bytes += tensor.nbytes
            with self._lock:
                if saved.wanted:
                    saved.free.append(file)
                else:
                    saved.file, saved.tensor = file, None
        except Exception as error:
            self._error = self._error or error
        finally:
            with self._lock:
                self._unwritten_bytes -= num_bytes
                self._lock.notify_all()

    def _read(self, saved: _Saved) -> None:
        try:
            file, saved.file = saved.file, None
            assert file is not None
            tensor = torch.empty_strided(saved.like.shape, saved.like.stride(), dtype=saved.like.dtype)
            tensor.copy_(_flat(file, saved.like))
            file.leave_memory()
            saved.free.append(file)
            saved.version = tensor._version
            saved.tensor = tensor
        except Exception as error:
            self._error = self._error or error
        finally:
            saved.ready.set()

    def _check_version(self, saved: _Saved, tensor: Tensor) -> None:
        if tensor._version != saved.version:
            raise RuntimeError(
                f"offload: an activation of shape {list(tensor.shape)} that backward needs was modified in place after "
                "it was saved"
            )

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _flat(file: MappedFile, like: Tensor) -> Tensor:
    """The file as a tensor with `like`'s strides."""
    count = like.untyped_storage().nbytes() // like.element_size()
    return file.bytes[: count * like.element_size()].view(like.dtype).as_strided(like.shape, like.stride())


def _is_dense(tensor: Tensor) -> bool:
    """On the CPU, and laid out so that a copy can have the same strides without gaps."""
    return tensor.device.type == "cpu" and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
