"""A copy that takes as long as a link would: what stands in for a peer's push where all ranks share one GPU."""

from __future__ import annotations

from torch import Tensor

from fusedcomm.kernels._triton import tl, triton
from fusedcomm.kernels.checks import check_device
from fusedcomm.kernels.flags import HAS_CLOCK, clock_ns

# What one program copies between two looks at the clock: enough for its loads to overlap, and at 1 GB/s 16 us.
PIECE_BYTES = 16384
NUM_WARPS = 8


# Rates must not make Triton compile the kernel anew.
@triton.jit(do_not_specialize=["piece_ps"])
def paced_copy_kernel(source_ptr, target_ptr, N, piece_ps, ELEMENTS: tl.constexpr, CLOCK: tl.constexpr):
    # 64-bit: a chunk may hold more than 2^31 elements, and last longer than 2^31 ps.
    step = tl.full((), ELEMENTS, tl.int64)
    if CLOCK:
        step_ps = tl.full((), 1, tl.int64) * piece_ps
        start_ns = clock_ns(piece_ps)
    for piece in tl.range(tl.program_id(0), tl.cdiv(N, ELEMENTS), tl.num_programs(0)):  # pyright: ignore[reportGeneralTypeIssues]
        offsets = piece * step + tl.arange(0, ELEMENTS)
        mask = offsets < N
        tl.store(target_ptr + offsets, tl.load(source_ptr + offsets, mask=mask), mask=mask)
        if CLOCK:
            # No piece is over before all those up to it could have passed the link.
            due_ns = start_ns + (piece + 1) * step_ps // 1000
            now_ns = clock_ns(piece_ps)
            while now_ns < due_ns:
                now_ns = clock_ns(piece_ps)


def paced_copy(source: Tensor, target: Tensor, *, gbyte_per_s: float, num_programs: int) -> None:
    """Copies `source` to `target`, contiguous and of one shape and type, no faster than a link of that rate.

    Runs on SMs, as copies within one GPU do: leave it some beside a persistent grid (`grid.num_programs`). It raises
    no flag; a copy of four bytes after it on the same stream does. The interpreter has no clock and copies at once.
    Raises ValueError on tensors that do not fit together.
    """
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(
            f"paced_copy: source is {source.dtype} {tuple(source.shape)}, target is {target.dtype} "
            f"{tuple(target.shape)}; must be of one type and shape"
        )
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError(f"paced_copy: strides are {source.stride()} and {target.stride()}; must be contiguous")
    piece_ps = round(PIECE_BYTES * 1000 / gbyte_per_s) if gbyte_per_s > 0 else 2**31
    # The kernel counts in 32 bits.
    if piece_ps >= 2**31:
        raise ValueError(f"paced_copy: gbyte_per_s={gbyte_per_s}; must be at least 0.01")
    check_device("paced_copy", source, target)
    if source.numel():
        elements = PIECE_BYTES // source.element_size()
        paced_copy_kernel[(min(num_programs, triton.cdiv(source.numel(), elements)),)](
            source,
            target,
            source.numel(),
            piece_ps,
            ELEMENTS=elements,
            CLOCK=HAS_CLOCK,
            num_warps=NUM_WARPS,
        )
