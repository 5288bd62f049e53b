"""What a caller can get wrong, found before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedcomm.kernels._triton import INTERPRETED

if TYPE_CHECKING:
    from fusedcomm.kernels.epilogue import Epilogue

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
# The first chip of NVIDIA's that multiplies fp8.
_FP8_CAPABILITY = (8, 9)
MAX_WEIGHTS = 3


def check_matmul(
    op: str,
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    y: Tensor | Sequence[Tensor],
    *,
    num_programs: int,
    epilogue: Epilogue,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Raises unless `y = epilogue(x @ w.T)` is something that the kernel can do; returns the weights and outputs."""
    weights, outputs = ((t,) if isinstance(t, Tensor) else tuple(t) for t in (w, y))
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise ValueError(f"{op}: {len(weights)} weights; must be 1 to {MAX_WEIGHTS} in one launch: use several")
    for weight in weights:
        _check_weight(op, x, weight, weights[0])
    columns = [len(weight) for weight in weights]
    if epilogue.activation == "swiglu":
        if len(set(columns)) > 1:
            raise ValueError(f"{op}: gate and up have {' and '.join(map(str, columns))} rows; must be equally many")
        _check_outputs(op, x, outputs, columns[:1])
    else:
        _check_outputs(op, x, outputs, columns)
    check_device(op, x, *weights, *outputs, *epilogue.tensors)
    if x.dtype == FP8:
        _check_fp8(op, x.device)
    else:
        check_dtypes(op, x=x)
    epilogue.check(op, x.shape[0], sum(columns), len(weights), outputs, fp8=x.dtype == FP8)
    if num_programs < 1:
        raise ValueError(f"{op}: num_programs={num_programs}; must be at least 1")
    return weights, outputs


def _check_outputs(op: str, x: Tensor, outputs: Sequence[Tensor], columns: Sequence[int]) -> None:
    """Raises unless there is one for each number of columns, all of one kind."""
    if len(outputs) != len(columns):
        raise ValueError(
            f"{op}: {len(outputs)} outputs; must be {len(columns)}: each weight has one, swiglu's two share one"
        )
    for output, N in zip(outputs, columns):
        if output.shape != (x.shape[0], N):
            raise ValueError(
                f"{op}: the output is {tuple(output.shape)} for x {tuple(x.shape)} and w {(N, x.shape[1])}; "
                f"must be [M, N] = ({x.shape[0]}, {N})"
            )
        check_dtypes(op, output=output)
        kinds = [(t.dtype, t.stride(1)) for t in (outputs[0], output)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{op}: outputs are {kinds[0][0]} with columns {kinds[0][1]} apart and {kinds[1][0]} with columns "
                f"{kinds[1][1]} apart; must be alike"
            )


def _check_weight(op: str, x: Tensor, w: Tensor, first: Tensor) -> None:
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{op}: x is {tuple(x.shape)} and w is {tuple(w.shape)}; must be [M, K] and [N, K] with one K")
    if w.dtype != x.dtype:
        raise ValueError(f"{op}: x is {x.dtype} and w is {w.dtype}; must be of one type: cast one of them")
    if w.stride() != first.stride():
        raise ValueError(
            f"{op}: weights have strides {first.stride()} and {w.stride()}; must be equal: copy one of them"
        )


def _check_fp8(op: str, device: torch.device) -> None:
    if INTERPRETED:
        return
    if torch.version.hip or torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ValueError(
            f"{op}: x is {FP8}, which {torch.cuda.get_device_name(device)} does not multiply (sm_89 and later do); "
            "use bfloat16"
        )


def check_vector(op: str, name: str, vector: Tensor | None, letter: str, length: int) -> None:
    if vector is not None and (vector.shape != (length,) or not vector.is_contiguous()):
        raise ValueError(
            f"{op}: {name} is {tuple(vector.shape)} with strides {vector.stride()}; must be "
            f"[{letter}] = ({length},), contiguous"
        )


def check_scale(op: str, name: str, scale: Tensor | None, letter: str, length: int, *, fp8: bool) -> None:
    """Raises unless fp8 operands have scales, and others have none."""
    if (scale is not None) != fp8:
        have = "has none" if scale is None else "has one"
        raise ValueError(f"{op}: {name} goes with fp8 operands and only with them; this product {have}")
    check_vector(op, name, scale, letter, length)
    if scale is not None and scale.dtype != torch.float32:
        raise ValueError(f"{op}: {name} is {scale.dtype}; must be float32")


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


def check_timeout(op: str, timeout_us: int) -> None:
    # The kernel counts in 32 bits.
    if not 1 <= timeout_us < 2**31:
        raise ValueError(f"{op}: timeout_us={timeout_us}; must be 1 to {2**31 - 1}")


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
