"""A row of the report on the machine code of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

# How the reason of a row ends whose type the chip lacks.
NOT_SUPPORTED = "is not supported on {}"


@dataclass(frozen=True)
class Row:
    """What the compiler made of one kernel; all counts are 0 where the chip lacks the type."""

    kernel: str
    config: str
    target: str
    dtype: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_core_ops: int
    async_loads: int
    fits: bool
    reason: str

    @property
    def is_wrong(self) -> bool:
        """Whether it should fit and does not; that a chip lacks a type is no mistake."""
        return not self.fits and not self.reason.endswith(NOT_SUPPORTED.format(self.target))
