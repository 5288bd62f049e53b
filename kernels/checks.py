"""What a caller can get wrong, found before anything is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedcomm.kernels._triton import INTERPRETED

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = (None, "gelu", "silu")


def check_matmul(
    op: str,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    num_programs: int,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Raises unless `y = activation(x @ w.T + bias)` is something that the kernel can do."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{op}: x is {tuple(x.shape)} and w is {tuple(w.shape)}; must be [M, K] and [N, K] with one K")
    if y.shape != (x.shape[0], w.shape[0]):
        raise ValueError(
            f"{op}: the output is {tuple(y.shape)} for x {tuple(x.shape)} and w {tuple(w.shape)}; "
            f"must be [M, N] = ({x.shape[0]}, {w.shape[0]})"
        )
    if w.dtype != x.dtype:
        raise ValueError(f"{op}: x is {x.dtype} and w is {w.dtype}; must be of one type: cast one of them")
    check_dtypes(op, x=x, output=y, bias=bias)
    check_bias(op, bias, w.shape[0])
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation={activation!r}; must be one of {ACTIVATIONS}")
    if num_programs < 1:
        raise ValueError(f"{op}: num_programs={num_programs}; must be at least 1")
    check_device(op, x, w, y, bias)


def check_bias(op: str, bias: Tensor | None, columns: int) -> None:
    if bias is not None and (bias.shape != (columns,) or not bias.is_contiguous()):
        raise ValueError(
            f"{op}: bias is {tuple(bias.shape)} with strides {bias.stride()}; must be [N] = ({columns},), contiguous"
        )


def check_dtypes(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            raise ValueError(f"{op}: {name} is {tensor.dtype}; must be float32, bfloat16 or float16: cast it")


def check_device(op: str, *tensors: Tensor | None) -> None:
    """Raises unless the tensors are all where Triton runs its kernels."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        names = " and ".join(sorted(str(device) for device in devices))
        raise ValueError(f"{op}: tensors are on {names}; must be on one device: move them")
    (device,) = devices
    if (device.type == "cpu") != INTERPRETED:
        mode = "interprets kernels on the CPU" if INTERPRETED else "compiles kernels for a GPU"
        raise ValueError(
            f"{op}: tensors are on {device}, but in this process Triton {mode}; for CPU tensors set "
            "TRITON_INTERPRET=1 before Triton is first imported, for a GPU leave it unset"
        )


def check_words(
    op: str,
    name: str,
    words: Tensor,
    length: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = (torch.int32,),
) -> None:
    """Raises unless `words` is a contiguous [length] tensor of such a type on `device`."""
    fits = words.shape == (length,) and words.dtype in dtypes and words.is_contiguous()
    if not fits or words.device != device:
        rule = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"{op}: {name} is {words.dtype} {tuple(words.shape)} with strides {words.stride()} "
            f"on {words.device}; must be {rule} ({length},), contiguous, on {device}"
        )
