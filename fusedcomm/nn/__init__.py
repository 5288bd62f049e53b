"""Tensor-parallel layers and Transformers, as plain `torch.nn.Module`s."""

from fusedcomm.nn.attention import Attention, rope_table, rotate
from fusedcomm.nn.config import (
    FlopsPerToken,
    TransformerConfig,
    check_tensor_parallel,
    flops_per_token,
    layer_flops,
    num_parameters,
)
from fusedcomm.nn.dropout import DropoutSite, dropout_keys, stateless_dropout
from fusedcomm.nn.embedding import LearnedPositions, VocabParallelEmbedding
from fusedcomm.nn.layout import (
    ParamLayout,
    ShardedModule,
    TensorParallel,
    claim_partial_grad,
    layout_of,
    set_layout,
)
from fusedcomm.nn.linear import ColumnParallelLinear, RowParallelLinear
from fusedcomm.nn.loss import vocab_parallel_cross_entropy, vocab_parallel_hits
from fusedcomm.nn.mlp import MLP
from fusedcomm.nn.norm import LayerNorm, RMSNorm
from fusedcomm.nn.transformer import Transformer, TransformerLayer

__all__ = [
    "MLP",
    "Attention",
    "ColumnParallelLinear",
    "DropoutSite",
    "FlopsPerToken",
    "LayerNorm",
    "LearnedPositions",
    "ParamLayout",
    "RMSNorm",
    "RowParallelLinear",
    "ShardedModule",
    "TensorParallel",
    "Transformer",
    "TransformerConfig",
    "TransformerLayer",
    "VocabParallelEmbedding",
    "check_tensor_parallel",
    "claim_partial_grad",
    "dropout_keys",
    "flops_per_token",
    "layer_flops",
    "layout_of",
    "num_parameters",
    "rope_table",
    "rotate",
    "set_layout",
    "stateless_dropout",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_hits",
]
