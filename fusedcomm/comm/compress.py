"""What travels in place of fp32 gradients, and the residual that makes up for what is lost."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Codec(Protocol):
    """A smaller form of fp32 numbers. Deterministic, and of a size that depends on their number alone."""

    def num_bytes(self, length: int) -> int:
        """How many bytes stand for `length` numbers."""
        ...

    def encode(self, values: Tensor, wire: Tensor, error: Tensor | None) -> None:
        """Write what stands for `values` [n] into `wire` [num_bytes], and add what that misses to `error` [n]."""
        ...

    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Write the numbers that `wire` stands for into `values`."""
        ...
