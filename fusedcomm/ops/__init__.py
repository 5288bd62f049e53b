"""The ops: check, run, differentiate."""

from fusedcomm.ops.all_gather_matmul import all_gather_matmul
from fusedcomm.ops.begin import begin_all_gather_matmul, begin_matmul_reduce_scatter
from fusedcomm.ops.matmul_all_reduce import matmul_all_reduce
from fusedcomm.ops.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.ops.reshard import all_gather, all_to_all, reduce_scatter

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_to_all",
    "begin_all_gather_matmul",
    "begin_matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
]
