"""Triton, or one line that says how to get it: every kernel takes `triton` and `tl` from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton.language as tl

    # Its annotations know neither launches nor what a kernel returns.
    triton: Any = None
    TensorDescriptor: Any = None
else:
    try:
        import triton
        import triton.language as tl
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "fusedcomm.kernels: Triton is not installed; the kernels need it (Linux: pip install triton); "
            "every other method works without it",
            name="triton",
        ) from error

# Whether kernels are interpreted, on CPU tensors. Triton settles that for the process when it is first
# imported.
INTERPRETED = not isinstance(tl.cdiv, triton.JITFunction)

__all__ = ["INTERPRETED", "TensorDescriptor", "tl", "triton"]
