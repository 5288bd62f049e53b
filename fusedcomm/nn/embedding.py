"""Token embedding split by vocabulary, and learned positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.nn.layout import ParamLayout, ShardedModule, TensorParallel, check_divides, fan_in_bound
from fusedcomm.ops.reshard import reduce_scatter


class VocabParallelEmbedding(ShardedModule):
    """Looks tokens up in a table whose rows are split over ranks, and splits the sequence.

    Shapes per rank, W ranks: tokens [S, ...] equal on all of them, weight [V/W, H], result [S/W, ..., H], cut
    as `torch.chunk` would or as `sizes` says. Every rank looks up the tokens that it owns and has zeros for
    the others; the sum travels as a reduce-scatter over the sequence, the gradient of the result as an
    all-gather in backward. Raises ValueError where V does not divide and (on the CPU) for tokens outside
    0..V-1, before anything is sent; on a CUDA device such tokens fail a device-side assertion. Source of the
    split: Megatron-LM.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tp: TensorParallel,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_vocab("VocabParallelEmbedding", "num_embeddings", num_embeddings, tp.size)
        super().__init__(tp)
        self.num_embeddings = num_embeddings
        layout = ParamLayout(shard_dim=0)
        self.add_sharded_parameter("weight", (num_embeddings, embedding_dim), layout, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the output layer that it may be tied to: uniform within 1/sqrt(H)."""
        bound = fan_in_bound(self.weight.shape[1])
        self.fill_from_full("weight", lambda full: full.uniform_(-bound, bound))

    def forward(self, tokens: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        check_ids("VocabParallelEmbedding", "token", tokens, self.num_embeddings)
        if sizes is None:
            sizes = chunk_sizes(tokens.shape[0], self.tp.size)
        num_local = self.weight.shape[0]
        local = tokens - self.tp.rank * num_local
        elsewhere = (local < 0) | (local >= num_local)
        x_partial = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        x_partial = x_partial.masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_scatter(x_partial, group=self.tp.group, dim=0, sizes=sizes)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.weight.shape[1]}, tp={self.tp.size}"


class LearnedPositions(ShardedModule):
    """A trained vector per position, added to this rank's rows of the sequence.

    Shapes per rank: x [sizes[rank], B, H], weight [seq_len, H] whole on every rank, result as x. Nothing
    travels but the gradient of the weight, which is summed over the ranks (`ParamLayout.partial_grad`).
    """

    weight: nn.Parameter

    def __init__(
        self,
        seq_len: int,
        features: int,
        *,
        tp: TensorParallel,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp)
        layout = ParamLayout(partial_grad=True)
        self.add_sharded_parameter("weight", (seq_len, features), layout, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the token embedding: uniform within 1/sqrt(H)."""
        bound = fan_in_bound(self.weight.shape[1])
        self.fill_from_full("weight", lambda full: full.uniform_(-bound, bound))

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        if sum(sizes) > self.weight.shape[0]:
            raise ValueError(
                f"LearnedPositions: the sequence has {sum(sizes)} positions but the table "
                f"{self.weight.shape[0]}; shorten the sequence or build the model with a larger seq_len"
            )
        start = sum(sizes[: self.tp.rank])
        return x + self.weight[start : start + sizes[self.tp.rank], None]


def check_vocab(where: str, what: str, vocab_size: int, tp_size: int) -> None:
    """Every rank holds as many rows of the table."""
    multiple = -(-vocab_size // tp_size) * tp_size
    check_divides(where, what, vocab_size, tp_size, f"pad the vocabulary to {multiple}")


def check_ids(where: str, what: str, ids: Tensor, limit: int, ignore_index: int | None = None) -> None:
    """ValueError on the CPU, an assertion on a device, for ids neither in 0..limit-1 nor `ignore_index`."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{where}: {what}s have dtype {ids.dtype}; they must be int64 or int32")
    bad = (ids < 0) | (ids >= limit)
    if ignore_index is not None:
        bad &= ids != ignore_index
    if ids.device.type != "cpu":
        message = f"{where}: a {what} is outside 0..{limit - 1}"
        torch._assert_async(~bad.any(), message)  # pyright: ignore[reportPrivateImportUsage]
    elif bad.any():
        index = [int(i) for i in bad.nonzero()[0]]
        allowed = "" if ignore_index is None else f" or ignore_index={ignore_index}"
        raise ValueError(
            f"{where}: {what} {int(ids[tuple(index)])} at {index}; it must be in 0..{limit - 1}{allowed}; "
            "check the tokenizer against the vocabulary"
        )
