"""What travels for the buckets of a step: sums of gradients, and parameters handed out, in the order agreed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch.distributed import ProcessGroup

from fusedcomm.comm.collective import Collective, Pending, bulk_group
from fusedcomm.comm.compress import Layout
from fusedcomm.comm.plan import Piece
from fusedcomm.comm.queue import TransferQueue
from fusedcomm.comm.record import span
from fusedcomm.parallel.buckets import Bucket, Slot
from fusedcomm.parallel.shares import Shares
from fusedcomm.parallel.timing import Planner


class Transfers:
    """The queue of one data-parallel group, and what sums or hands out each piece of a bucket.

    Either a `collective` all-reduces, or with `sharded` each row is summed for the rank that steps it. Sums are needed
    at the end of backward, or `in_forward` when their parameters are used.

    Attributes:
        shares: which rows are whose, if they are shared.
    """

    def __init__(
        self,
        group: ProcessGroup,
        slots: Sequence[Slot],
        layout: Layout,
        planner: Planner,
        *,
        collective: Callable[[ProcessGroup, Layout], Collective],
        sharded: bool,
        in_forward: bool,
    ) -> None:
        self._group, self._slots, self._planner = group, slots, planner
        self.sums_in_forward = in_forward and not sharded
        bulk = bulk_group(group, layout.device, self)
        self.shares = Shares(bulk, slots) if sharded else None
        self._collective = None if sharded else collective(bulk, layout)
        self._queue = TransferQueue("gradients", layout.device)

    def begin_sums(self, buckets: Sequence[Bucket], *, counted: bool) -> None:
        """Start a step, when all transfers before are over; `counted` says whether buckets are launched in backward."""
        order = self._planner.sums(buckets, counted=counted, in_forward=self.sums_in_forward)
        self._queue.begin(order, self._planner.pace().window_bytes)

    def sum(self, bucket: Bucket) -> None:
        """The bucket's gradients are complete: let their sums travel when it is their turn."""
        self._queue.submit(bucket.index, partial(self._start_piece, bucket))

    def gather(self, buckets: Sequence[Bucket]) -> None:
        """Begin to hand every rank's rows of the parameters to all; first layers come first."""
        assert self.shares is not None
        self._queue.begin(self._planner.gathers(buckets), self._planner.pace().window_bytes)
        for bucket in buckets:
            self._queue.submit(bucket.index, partial(self.shares.gather, bucket))

    def wait(self, bucket: Bucket, what: str) -> None:
        """Return when all that travels for the bucket is there; the wait is recorded as `what`."""
        with span("wait", what, bucket.flat.nbytes):
            self._queue.wait(bucket.index)

    def agree(self, num_steps: int) -> None:
        """Let the ranks exchange what they have seen of the last step, for the plans of those to come."""
        bytes_per_s = self._queue.bytes_per_s
        self._queue.begin([], 0)
        self._planner.agree(num_steps, self._slots, bytes_per_s, self._group)

    def _start_piece(self, bucket: Bucket, piece: Piece) -> Pending:
        if self._collective is None:
            assert self.shares is not None
            return self.shares.reduce(bucket, piece)
        start, stop = piece.start // 4, piece.stop // 4
        return self._collective.start(bucket.flat[start:stop], bucket.offset + start)
