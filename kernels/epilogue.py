"""What becomes of a tile between the product and memory: scales, bias, activation, residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fusedcomm.kernels._triton import tl, triton
from fusedcomm.kernels.checks import check_dtypes, check_scale, check_vector

ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "swiglu")


@dataclass(frozen=True)
class Epilogue:
    """`activation(product * x_scale * w_scale + bias) + residual`, in fp32.

    Bias and w_scale run over the columns of all weights, in their order.

    Attributes:
        bias: [columns of all weights].
        activation: "gelu" (exact), "gelu_tanh" (its usual approximation), "silu", or "swiglu" of two weights, gate and
            up: silu(gate) * up.
        residual: of the shape of the output, of which there is one, with any strides.
        x_scale, w_scale: [M] and [columns of all weights] fp32, the row-wise scales of fp8 operands.
    """

    bias: Tensor | None = None
    activation: str | None = None
    residual: Tensor | None = None
    x_scale: Tensor | None = None
    w_scale: Tensor | None = None

    def check(
        self, op: str, rows: int, columns: int, num_weights: int, outputs: Sequence[Tensor], *, fp8: bool
    ) -> None:
        """Raises ValueError unless these go with x of `rows` rows and weights of `columns` rows together."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"{op}: activation={self.activation!r}; must be one of {ACTIVATIONS}")
        if self.activation == "swiglu" and num_weights != 2:
            raise ValueError(f"{op}: activation='swiglu' with {num_weights} weights; must be two, gate and up")
        check_vector(op, "bias", self.bias, "N", columns)
        check_dtypes(op, bias=self.bias, residual=self.residual)
        check_scale(op, "x_scale", self.x_scale, "M", rows, fp8=fp8)
        check_scale(op, "w_scale", self.w_scale, "N", columns, fp8=fp8)
        if self.residual is None:
            return
        if len(outputs) > 1:
            raise ValueError(f"{op}: a residual and {len(outputs)} outputs; must be one: use several launches")
        if self.residual.shape != outputs[0].shape:
            raise ValueError(
                f"{op}: residual is {tuple(self.residual.shape)} and the output is {tuple(outputs[0].shape)}; "
                "must be of one shape"
            )

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.bias, self.residual, self.x_scale, self.w_scale


NOTHING = Epilogue()
# The most columns of a tile that are finished at once; half as many where a residual needs registers too.
MAX_WIDTH = tl.constexpr(64)


@triton.jit
def activate(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(u)) is sigmoid(2 u).
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    if ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    if ACTIVATION == "swiglu":
        # Their columns alternate.
        gate, up = y.reshape(y.shape[0], y.shape[1] // 2, 2).split()
        y = gate * tl.sigmoid(gate) * up
    return y


@triton.jit
def store_tile(
    accumulator,
    bias_ptr,
    residual_ptr,
    x_scale_ptr,
    w_scale_ptr,
    y_ptr,
    offs_m,
    begin,
    column,
    M,
    N,
    stride_rm,
    stride_rn,
    stride_ym,
    stride_yn,
    ACTIVATION: tl.constexpr,
    TILE_M: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Finishes and stores columns `begin:begin + WIDTH` of a weight's product.

    N is the number of its columns, `column` how many those before it have. For swiglu there are twice as many, of gate
    and up in turn.
    """
    LIMIT: tl.constexpr = MAX_WIDTH if residual_ptr is None else MAX_WIDTH // 2
    if WIDTH > LIMIT:
        # One half after the other needs fewer registers.
        HALF: tl.constexpr = WIDTH // 2
        left, right = accumulator.reshape(TILE_M, 2, HALF).permute(0, 2, 1).split()
        for part in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
            store_tile(
                left if part == 0 else right,
                bias_ptr,
                residual_ptr,
                x_scale_ptr,
                w_scale_ptr,
                y_ptr,
                offs_m,
                begin + part * HALF,
                column,
                M,
                N,
                stride_rm,
                stride_rn,
                stride_ym,
                stride_yn,
                ACTIVATION,
                TILE_M,
                HALF,
            )
    else:
        lane = begin + tl.arange(0, WIDTH)
        if ACTIVATION == "swiglu":
            mask_w = lane < 2 * N
            offs_w = lane % 2 * N + lane // 2
            offs_y = begin // 2 + tl.arange(0, WIDTH // 2)
        else:
            mask_w = lane < N
            offs_w = column + lane
            offs_y = lane
        mask_m = offs_m < M
        y = accumulator
        if x_scale_ptr is not None:
            y *= tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
            y *= tl.load(w_scale_ptr + offs_w, mask=mask_w, other=0.0)[None, :]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + offs_w, mask=mask_w, other=0.0).to(tl.float32)[None, :]
        y = activate(y, ACTIVATION)
        mask = mask_m[:, None] & (offs_y < N)[None, :]
        rows = offs_m.to(tl.int64)[:, None]
        columns = offs_y.to(tl.int64)[None, :]
        if residual_ptr is not None:
            residual_ptrs = residual_ptr + rows * stride_rm + columns * stride_rn
            y += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + rows * stride_ym + columns * stride_yn, y.to(y_ptr.dtype.element_ty), mask=mask)
