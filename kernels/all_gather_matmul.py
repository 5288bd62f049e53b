"""The product of gathered rows, started before they are all here."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedcomm.kernels.checks import check_matmul, check_timeout, check_words
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.epilogue import NOTHING, Epilogue
from fusedcomm.kernels.flags import Chunks
from fusedcomm.kernels.gemm import Loads, launch


def all_gather_matmul(
    x_full: Tensor,
    w: Tensor | Sequence[Tensor],
    y: Tensor | Sequence[Tensor],
    *,
    chunks: Chunks,
    status: Tensor,
    timeout_us: int,
    config: GemmConfig,
    num_programs: int,
    epilogue: Epilogue = NOTHING,
) -> Loads:
    """Writes `activation(x_full @ w.T + bias) + residual` into `y`, each tile once the chunks of its rows are here.

    x_full [M, K]: our own rows are there and flagged, those of peers arrive while the kernel runs, in any
    order, best rank+1, rank+2, ... w [N, K] is this rank's share of N; y [M, N]. Several of both as for `gemm`.

    A tile waits for every chunk that it touches, for each at most `timeout_us` (on NVIDIA's clock; elsewhere that
    many polls). If one does not come, the kernel records it in `status` ([4] int32, zero before; `read_status`),
    does no more tiles and ends: `y` is void then. Raises ValueError on tensors that do not fit together.

    Source: Flux (Chang et al., 2024) and the fused kernels of Triton-distributed.
    """
    op = "all_gather_matmul"
    weights, outputs = check_matmul(op, x_full, w, y, epilogue=epilogue, num_programs=num_programs)
    chunks.check(op, x_full.shape[0], x_full.device)
    check_words(op, "status", status, 4, x_full.device)
    check_timeout(op, timeout_us)
    return launch(
        x_full,
        weights,
        outputs,
        epilogue=epilogue,
        config=config,
        num_programs=num_programs,
        chunks=chunks,
        status=status,
        timeout_us=timeout_us,
    )
