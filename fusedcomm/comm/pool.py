"""Staging buffers, used again from call to call: fresh large memory costs a page fault per 4 KiB on the CPU."""

from __future__ import annotations

import ctypes
import sys
import threading

import torch
from torch import Tensor

# Buffers have sizes of which there are eight to each doubling, so that shapes that are nearly alike share them.
_SMALLEST_BYTES = 4096


class BufferPool:
    """Buffers of one process, lent and given back. Their content is whatever the last user left."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, int], list[Tensor]] = {}
        self._lock = threading.Lock()
        self.num_allocations = 0

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of `shape`, with `like`'s dtype and device."""
        num_bytes = like.element_size()
        for size in shape:
            num_bytes *= size
        step = max(_SMALLEST_BYTES, 1 << max(0, num_bytes.bit_length() - 4))
        size_class = max(1, -(-num_bytes // step)) * step
        with self._lock:
            free = self._free.setdefault((like.device, size_class), [])
            if free:
                storage = free.pop()
            else:
                storage = torch.empty(size_class, dtype=torch.uint8, device=like.device)
                self.num_allocations += 1
        return storage[:num_bytes].view(like.dtype).view(shape)

    def give(self, tensor: Tensor) -> None:
        """Take back what `take` lent. No transfer or kernel may still use it, but those of the current stream."""
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        with self._lock:
            self._free.setdefault((tensor.device, whole.numel()), []).append(whole)


# One per process: the ops' staging buffers.
STAGING = BufferPool()

# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones; elsewhere nothing is changed.

    By itself it hands large blocks back to the system at once, and every new tensor of that size then costs a page
    fault per 4 KiB, in the middle of a GEMM. For processes that do the same from step to step, as a training's ranks,
    since what was once needed stays theirs.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        # Another C library.
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
