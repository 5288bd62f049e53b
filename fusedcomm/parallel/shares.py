"""What of a parameter a data-parallel rank steps: some of its rows, as `torch.chunk` would cut them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fusedcomm.comm.collective import Pending
from fusedcomm.comm.owners import Owners
from fusedcomm.comm.plan import Piece
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.parallel.buckets import Bucket, Slot


def share_of(tensor: Tensor, rank: int, world: int) -> Tensor:
    """The rows of `tensor` that belong to `rank`: a view; none where there are fewer rows than ranks.

    Of a DTensor, as `fully_shard` makes them, what is here.
    """
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    sizes = chunk_sizes(tensor.shape[0], world)
    return tensor.narrow(0, sum(sizes[:rank]), sizes[rank])


class Shares:
    """Sums gradients for the rank that steps them, and hands the parameters it has stepped to all others.

    A bucket's piece holds the same part of every rank's share, so that all links are equally busy whichever piece
    travels; which rows are whose depends neither on buckets nor on pieces.
    """

    def __init__(self, group: ProcessGroup, slots: Sequence[Slot]) -> None:
        self._group = group
        self._owners = Owners(group)
        for slot in slots:
            if slot.param.dim() == 0 or not slot.param.is_contiguous():
                raise ValueError(
                    f"GradientBuckets: {slot.name} of shape {list(slot.param.shape)} has no contiguous rows that could "
                    "be shared; make it contiguous, and a scalar of shape [1]"
                )
            # Elsewhere there are summands only.
            slot.param.main_grad = self.own(slot.grad)  # pyright: ignore[reportAttributeAccessIssue]

    def own(self, tensor: Tensor) -> Tensor:
        return share_of(tensor, self._group.rank(), self._group.size())

    def reduce(self, bucket: Bucket, piece: Piece) -> Pending:
        """Begin to sum a piece of the bucket's gradients, each row for its owner."""
        grads = [slot.grad.view(-1) for slot in bucket.slots]
        return self._owners.reduce(self._parts(bucket, grads, piece, bucket.flat.nbytes), bucket.flat.device)

    def gather(self, bucket: Bucket, piece: Piece) -> Pending:
        """Begin to replace a piece of the bucket's parameters, each row by its owner's."""
        # As bytes, since dtypes may differ.
        params = [slot.param.detach().view(-1).view(torch.uint8) for slot in bucket.slots]
        return self._owners.gather(self._parts(bucket, params, piece, param_bytes(bucket)), bucket.flat.device)

    def _parts(self, bucket: Bucket, tensors: Sequence[Tensor], piece: Piece, num_bytes: int) -> list[list[Tensor]]:
        """By rank, what belongs to it of a piece of a bucket of `num_bytes`; `tensors` [n] are its slots' contents."""
        world = self._group.size()
        # The largest share of each slot, one after the other; where rows do not divide, others end earlier.
        lengths = []
        for slot, tensor in zip(bucket.slots, tensors):
            rows = slot.param.shape[0]
            lengths.append(chunk_sizes(rows, world)[0] * (tensor.numel() // max(1, rows)))
        begin, end = (offset * sum(lengths) // num_bytes for offset in (piece.start, piece.stop))
        parts: list[list[Tensor]] = [[] for _ in range(world)]
        for tensor, length in zip(tensors, lengths):
            if begin < length and end > 0:
                for part, share in zip(parts, tensor.split(length)):
                    within = share[max(begin, 0) : end]
                    if within.numel():
                        part.append(within)
            begin, end = begin - length, end - length
        return parts


def param_bytes(bucket: Bucket) -> int:
    """What a gather of the bucket moves: its parameters in their own dtype."""
    return sum(slot.param.nbytes for slot in bucket.slots)
