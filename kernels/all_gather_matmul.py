"""The product of gathered rows, started before they are all here."""

from __future__ import annotations

from torch import Tensor

from fusedcomm.kernels.checks import check_matmul, check_words
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.flags import Chunks
from fusedcomm.kernels.gemm import launch


def all_gather_matmul(
    x_full: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    chunks: Chunks,
    status: Tensor,
    max_polls: int,
    config: GemmConfig,
    num_programs: int,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Writes `activation(x_full @ w.T + bias)` into `y`, each tile once the chunks of its rows are here.

    x_full [M, K]: our own rows are there and flagged, those of peers arrive while the kernel runs, in any
    order, best rank+1, rank+2, ... w [N, K] is this rank's share of N; y [M, N]; bias [N].

    A tile waits for every chunk that it touches, and polls each flag at most `max_polls` times. If one does
    not come, the kernel records it in `status` ([4] int32, zero before; `read_status`), does no more tiles
    and ends: `y` is void then. Raises ValueError on tensors that do not fit together.

    Source: Flux (Chang et al., 2024) and the fused kernels of Triton-distributed.
    """
    op = "all_gather_matmul"
    check_matmul(op, x_full, w, y, bias=bias, activation=activation, num_programs=num_programs)
    chunks.check(op, x_full.shape[0], x_full.device)
    check_words(op, "status", status, 4, x_full.device)
    if max_polls < 1:
        raise ValueError(f"{op}: max_polls={max_polls}; must be at least 1")
    launch(
        x_full,
        w,
        y,
        bias=bias,
        activation=activation,
        config=config,
        num_programs=num_programs,
        chunks=chunks,
        status=status,
        max_polls=max_polls,
    )
