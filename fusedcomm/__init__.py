"""Tensor-parallel layers whose communication hides behind their GEMMs. Importing this needs torch and einops alone."""

from fusedcomm.comm.record import last_path, recording
from fusedcomm.errors import PeerError
from fusedcomm.ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

__all__ = ["PeerError", "all_gather_matmul", "last_path", "matmul_all_reduce", "matmul_reduce_scatter", "recording"]
__version__ = "0.1.0"
