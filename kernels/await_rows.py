"""A wait for rows by the stream alone, where what reads them has no wait of its own."""

from __future__ import annotations

from torch import Tensor

from fusedcomm.kernels._triton import tl, triton
from fusedcomm.kernels.checks import check_device, check_timeout, check_words
from fusedcomm.kernels.flags import AWAIT_ROWS, HAS_CLOCK, Chunks, num_lanes, wait_for_rows
from fusedcomm.kernels.tile_order import all_chunks


@triton.jit(do_not_specialize=["rows", "timeout_us"])
def await_rows_kernel(
    chunk_starts_ptr,
    flags_ptr,
    epoch_ptr,
    status_ptr,
    rows,
    num_chunks,
    world,
    timeout_us,
    LANES: tl.constexpr,
    CLOCK: tl.constexpr,
):
    # After a wait in vain there is nothing left to wait for.
    if tl.load(status_ptr) == 0:
        chunk, starts, stops = all_chunks(chunk_starts_ptr, num_chunks, LANES)
        wait_for_rows(
            chunk,
            starts,
            stops,
            flags_ptr,
            status_ptr,
            tl.load(epoch_ptr),
            starts >= stops,
            0,
            rows,
            num_chunks // world,
            timeout_us,
            OP=AWAIT_ROWS,
            TMA=False,
            CLOCK=CLOCK,
        )


def await_rows(chunks: Chunks, rows: int, *, status: Tensor, timeout_us: int) -> None:
    """Lets what is launched next on the stream see all `rows` of `chunks`: one program waits for their flags.

    It waits for each chunk at most `timeout_us`, as `all_gather_matmul` does, and records one that does not come in
    `status` [4] int32: whatever is computed then is void. Raises ValueError on tensors that do not fit together.
    """
    chunks.check("await_rows", rows, chunks.flags.device)
    check_device("await_rows", chunks.flags, status)
    check_words("await_rows", "status", status, 4, chunks.flags.device)
    check_timeout("await_rows", timeout_us)
    await_rows_kernel[(1,)](
        chunks.starts,
        chunks.flags,
        chunks.epoch,
        status,
        rows,
        chunks.num_chunks,
        chunks.world,
        timeout_us,
        LANES=num_lanes(chunks.num_chunks, num_warps=1),
        CLOCK=HAS_CLOCK,
        num_warps=1,
    )
