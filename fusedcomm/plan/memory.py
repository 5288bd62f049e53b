"""What a rank holds at most: weights, gradients, optimizer state, and what forward keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence

from fusedcomm.nn.config import TransformerConfig, layer_matrices
from fusedcomm.train.config import Config

_FP32_BYTES = 4
# Logits, what the loss makes of them in fp32, and their gradient.
_LOGITS_FP32_COPIES = 2


def itemsize(config: Config) -> int:
    """Bytes of a weight, and of a feature that travels or is kept."""
    return 4 if config.train.precision == "fp32" else 2


def weights_of(shape: TransformerConfig, layers: Sequence[int], *, first: bool, last: bool, tp: int) -> float:
    """Elements on one rank of a stage. Norms and biases are not counted: they are few."""
    table = shape.hidden * shape.vocab_size
    tables = 1 if first and last and shape.tied_embeddings else first + last
    return (len(layers) * sum(layer_matrices(shape)) + tables * table) / tp


def state_bytes(config: Config, weights: float, shares: int) -> float:
    """Of that many weights with their gradients, masters and moments, which are cut into so many shares."""
    size = itemsize(config)
    masters = 0 if size == _FP32_BYTES else _FP32_BYTES
    return weights * (size + _FP32_BYTES + (masters + 2 * _FP32_BYTES) / shares)


def kept_bytes(config: Config, shape: TransformerConfig, layers: Sequence[int], *, tokens: int) -> float:
    """What forward keeps of one micro-batch in these layers on one rank, for backward.

    `full` keeps each layer's input, and one layer at a time is computed again; `selective` what comes out of GEMMs and
    attention.
    """
    size, tensor = itemsize(config), config.parallel_config.tensor_parallel
    hidden, kv, inner = shape.hidden, shape.kv_heads * shape.head_dim, _inner_features(shape)
    # Norms keep what they have in fp32, of which RMSNorm has two; the gathered inputs of GEMMs may be kept whole.
    norms = 2 * hidden * _FP32_BYTES * (2 if shape.norm == "rmsnorm" else 1)
    inputs = 2 * hidden * (tensor.size if tensor.save == "gathered" else 1)
    # Rotated Q and K lie in memory such that what comes of them is copied for the next GEMM.
    attention = hidden + 2 * kv + hidden * (2 if shape.position == "rope" else 1)
    # Where nothing is split, the activation's result is kept as well as what it is computed from.
    mlp = inner + (shape.ffn_hidden if tensor.size == 1 else 0)
    kept = {
        "none": norms + size * (inputs + attention + mlp),
        "selective": size * (5 * hidden + 2 * kv + inner),
        "full": size * hidden,
    }
    modes = [shape.checkpointing_of_layers[layer] for layer in layers]
    again = kept["none"] if "full" in modes else 0
    return tokens / tensor.size * (again + sum(kept[mode] for mode in modes))


def put_off_bytes(config: Config, shape: TransformerConfig, layers: Sequence[int], *, tokens: int) -> float:
    """What `weight_gradients: at_end` keeps of one micro-batch besides: the gradient of each GEMM's output."""
    features = 3 * shape.hidden + 2 * shape.kv_heads * shape.head_dim + _inner_features(shape)
    return len(layers) * features * tokens * itemsize(config) / config.parallel_config.tensor_parallel.size


def logits_bytes(config: Config, shape: TransformerConfig, *, tokens: int) -> float:
    """Of one micro-batch on a rank of the last stage."""
    per_token = _LOGITS_FP32_COPIES * _FP32_BYTES + itemsize(config)
    return shape.vocab_size * tokens * per_token / config.parallel_config.tensor_parallel.size


def _inner_features(shape: TransformerConfig) -> int:
    """What an MLP's activation is computed from."""
    return shape.ffn_hidden * (2 if shape.activation == "swiglu" else 1)
