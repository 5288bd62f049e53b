"""Triton kernels: one persistent GEMM for plain, gathering and scattering products, and the sum of partials.

This package imports without Triton. Its modules do not, and say so:

    from fusedcomm.kernels.gemm import gemm
    from fusedcomm.kernels.all_gather_matmul import all_gather_matmul
    from fusedcomm.kernels.matmul_reduce_scatter import matmul_reduce_scatter
    from fusedcomm.kernels.reduce import reduce

Every function takes buffers that exist already and knows nothing of process groups. With TRITON_INTERPRET=1
in the environment before Triton is first imported the kernels run on CPU tensors, slowly; else on a GPU.
"""
