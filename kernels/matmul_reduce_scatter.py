"""The product whose rows leave before it is finished."""

from __future__ import annotations

from torch import Tensor

from fusedcomm.kernels.checks import check_matmul, check_words
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.epilogue import Epilogue
from fusedcomm.kernels.flags import Chunks
from fusedcomm.kernels.gemm import Loads, launch


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    y_partial: Tensor,
    *,
    chunks: Chunks,
    counters: Tensor,
    config: GemmConfig,
    num_programs: int,
    residual: Tensor | None = None,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
) -> Loads:
    """Writes our partial sum `x @ w.T + residual` into `y_partial`, and publishes each chunk's flag when it is done.

    x [M, K] and w [N, K], this rank's share of K; y_partial and residual [M, N]. The chunks of rank+1 are
    computed first, then those of rank+2, ..., our own last. Whoever acquires a chunk's flag at `chunks.epoch`
    may send its rows to their owner, who adds the partial sums of all ranks and the bias (`reduce`).

    Scales [M] and [N] go with fp8 operands.

    `counters` [number of chunks] int32 are zero before and after. Raises ValueError on tensors that do not
    fit together.

    Source: Flux (Chang et al., 2024) and the fused kernels of Triton-distributed.
    """
    op = "matmul_reduce_scatter"
    epilogue = Epilogue(residual=residual, x_scale=x_scale, w_scale=w_scale)
    weights, outputs = check_matmul(op, x, w, y_partial, epilogue=epilogue, num_programs=num_programs)
    chunks.check(op, x.shape[0], x.device)
    check_words(op, "counters", counters, chunks.num_chunks, x.device)
    return launch(
        x,
        weights,
        outputs,
        epilogue=epilogue,
        config=config,
        num_programs=num_programs,
        chunks=chunks,
        counters=counters,
    )
