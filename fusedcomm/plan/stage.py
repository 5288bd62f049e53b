"""What a pipeline stage takes for one micro-batch: its GEMMs, and what of its tensor-parallel transfers they hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fusedcomm.nn.config import TransformerConfig, layer_matrices
from fusedcomm.train.config import TensorParallelConfig
from fusedcomm.tune.cost import Link, Seconds, expected_fused_s, expected_s, is_fused

# Forward; backward, whole or as its halves, the gradients of inputs and of weights.
Pass = Literal["F", "B", "I", "W"]
PASSES: tuple[Pass, ...] = ("F", "B", "I", "W")
# GEMMs of each weight; and products of attention, which has no weights, in those of forward.
_GEMMS = {"F": 1, "B": 2, "I": 1, "W": 1}
_ATTENTION = {"F": 1, "B": 2, "I": 2, "W": 0}
# Of what a layer's forward and backward take in addition.
_OVERHEAD = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}
# As many as the ops cut a shard into at most.
_CHUNKS = range(1, 6)
_FUSED_CHUNKS = range(1, 3)


class PassSeconds(NamedTuple):
    """What something computes, and what it takes with the transfers that stay in sight."""

    compute: float
    total: float


@dataclass(frozen=True)
class _Op:
    """The GEMM of a weight of so many elements, and what passes beside it, in transfers of all rows."""

    elements: int
    wires: dict[Pass, float]


class StageModel:
    """The seconds of one micro-batch of `tokens` tokens on a rank of a stage, recomputation included.

    A GEMM takes its FLOPs at `flops_per_s`, and a layer `overhead_s` more for forward and backward together. What is
    hidden behind a GEMM is what the ops' own model says (`fusedcomm.tune.cost`), from which the tuner takes its
    candidates; with `tp_sync` other than `every_layer` all of a layer's GEMMs hide all of its transfers.
    """

    def __init__(
        self,
        shape: TransformerConfig,
        tensor: TensorParallelConfig,
        *,
        tokens: int,
        itemsize: int,
        link: Link,
        flops_per_s: float,
        overhead_s: float,
    ) -> None:
        self._shape, self._tensor, self._link, self._overhead_s = shape, tensor, link, overhead_s
        world = tensor.size
        self._s_per_element = 2 * tokens / world / flops_per_s
        # To half of the sequence on average.
        self._attention_s = 2 * shape.seq_len * shape.hidden * tokens / world / flops_per_s
        num_bytes = tokens * shape.hidden * itemsize * (world - 1) / world
        self._wire_s = 0.0 if world == 1 else link.latency_s + num_bytes / link.bytes_per_s
        # With `save: shard` rows are gathered again behind the gradient of the input, whose sums travel behind the
        # weights'; one gather of a scattered output's gradient feeds both.
        again = 2 if tensor.save == "shard" else 1
        gather: dict[Pass, float] = {"F": 1, "B": again, "I": again, "W": 0}
        scatter: dict[Pass, float] = {"F": 1, "B": 1, "I": 1, "W": 0}
        # Where MLPs are row-parallel first, their inner features travel.
        inner = shape.ffn_hidden / shape.hidden if tensor.split_dim == 0 else 1
        matrices = layer_matrices(shape)
        self._layer = (
            _Op(matrices.qkv, gather),
            _Op(matrices.out, scatter),
            _Op(matrices.up, {kind: inner * count for kind, count in gather.items()}),
            _Op(matrices.down, {kind: inner * count for kind, count in scatter.items()}),
        )
        self._embedding = _Op(0, scatter)
        self._head = _Op(shape.hidden * shape.vocab_size, gather)

    def seconds(self, kind: Pass, layers: Sequence[int], *, first: bool, last: bool) -> PassSeconds:
        """Of a stage of these layers of the model."""
        parts = [self._of_layer(kind)] * len(layers)
        if kind in ("B", "I"):
            modes = self._shape.checkpointing_of_layers
            parts += [self._of_layer("F") for layer in layers if modes[layer] == "full"]
        parts += [self._of_op(self._embedding, kind)] * first + [self._of_op(self._head, kind)] * last
        return PassSeconds(sum(part.compute for part in parts), sum(part.total for part in parts))

    def wire_s(self, num_layers: int) -> float:
        """What the transfers of layers take by themselves, forward and backward."""
        return num_layers * self._wire_s * sum(op.wires["F"] + op.wires["B"] for op in self._layer)

    def _of_layer(self, kind: Pass) -> PassSeconds:
        parts = [self._of_op(op, kind) for op in self._layer]
        compute_s = _OVERHEAD[kind] * self._overhead_s + _ATTENTION[kind] * self._attention_s
        compute_s += sum(part.compute for part in parts)
        if self._tensor.tp_sync == "every_layer":
            return PassSeconds(compute_s, compute_s + sum(part.total - part.compute for part in parts))
        return PassSeconds(compute_s, max(compute_s, self._wire_s * sum(op.wires[kind] for op in self._layer)))

    def _of_op(self, op: _Op, kind: Pass) -> PassSeconds:
        gemms_s = _GEMMS[kind] * op.elements * self._s_per_element
        return PassSeconds(gemms_s, self._overlapped_s(gemms_s, op.wires[kind] * self._wire_s))

    def _overlapped_s(self, gemm_s: float, wire_s: float) -> float:
        """GEMM and wire together, by the method that is asked for."""
        if wire_s == 0.0:
            return gemm_s
        method, world = self._tensor.method, self._tensor.size
        seconds = Seconds(serial=gemm_s + wire_s, wire=wire_s, piece=self._link.latency_s)
        if is_fused(method):
            return min(expected_fused_s(count, seconds, world) for count in _FUSED_CHUNKS)
        times_s = [] if method == "chunked" else [seconds.serial]
        if method != "serial":
            times_s += [expected_s(count, seconds, world) for count in _CHUNKS]
        return min(times_s)
