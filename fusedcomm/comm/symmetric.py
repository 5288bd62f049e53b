"""Flags and chunks between GPUs of one machine: every rank maps the others' buffers and copies rows straight into them.

The buffers are torch's symmetric memory. A copy engine moves the rows, while all SMs but one compute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from fusedcomm.comm.buffers import Buffer, part_bytes, split_buffer
from fusedcomm.comm.channel import Channel, refuse_in_capture
from fusedcomm.comm.flights import FlightTransport
from fusedcomm.comm.hierarchical import node_of_each_rank
from fusedcomm.comm.lanes import Turn
from fusedcomm.comm.places import RankStreams
from fusedcomm.errors import PeerError
from fusedcomm.kernels.await_rows import await_rows
from fusedcomm.kernels.flags import Chunks, read_status

# For any dtype, and for TMA.
_ALIGNMENT = 256
_PROBE_BYTES = 4096


class SymmetricTransport(FlightTransport):
    """`FlagTransport` of one group over symmetric memory; every rank makes it at the same time.

    The first call of a signature is agreed upon by all ranks, for which hosts wait for each other; later ones are
    not, unless `FUSEDCOMM_CHECKED=1` is set. A call may be captured in a CUDA graph once it has run outside of one,
    which makes its buffers and loads its kernels. Every rank must then replay its graph equally often.

    Raises:
        ValueError: on every rank, if one cannot reach the memory of another.
    """

    name = "symmetric"
    # For the one program that at any time waits until a peer's buffer is free.
    communication_sms = 1

    def __init__(self, channel: Channel, op: str, device: torch.device, first_epoch: int = 0) -> None:
        super().__init__(channel.rank, channel.world, device, RankStreams(device, channel.timeout_s), first_epoch)
        self._channel = channel
        # Kept to the end: a captured graph replays its calls in the buffers that it was captured with.
        self._memory: list[object] = []
        if len(set(node_of_each_rank(channel.group))) > 1:
            raise ValueError(f"{op}: transport 'symmetric' needs all ranks on one machine")
        buffers, _ = self.make_buffer(op, "probe", _PROBE_BYTES)
        _check_all(channel, op, _attempt(lambda: self._probe(op, buffers)))

    def take_turn(self, op: str, kind: str, signature: str, num_bytes: int) -> Turn:
        """As `FlightTransport.take_turn`.

        Raises:
            PeerError: a peer calls something else, is gone or late; or an earlier call has waited in vain.
            ValueError: the call is captured but has not run before; or there is no memory for its buffers.
        """
        self.refuse_if_failed(op)
        if not (self.has_room(kind, num_bytes) and self._channel.has_agreed(signature)):
            refuse_in_capture(op, self._device, signature)
        try:
            self._channel.agree(op, signature, self._device)
        except PeerError as error:
            self.fail(error)
            raise
        return self.lane(op, kind, num_bytes).take()

    def make_buffer(self, op: str, kind: str, num_bytes: int) -> tuple[list[Buffer], Buffer]:
        size = sum(part_bytes(self.world, num_bytes, _ALIGNMENT))
        channel = self._channel

        def allocate() -> None:
            whole = symmetric_memory.empty(size, dtype=torch.uint8, device=self._device)
            buffer = split_buffer(whole, self.world, num_bytes, _ALIGNMENT)
            buffer.flags.fill_(self._first_epoch)
            buffer.done.fill_(self._first_epoch)
            torch.cuda.synchronize(self._device)
            self._memory.append(whole)

        _check_all(channel, op, _attempt(allocate))
        whole = self._memory[-1]
        assert isinstance(whole, Tensor)
        by_rank: list[Buffer] = []

        def map_all() -> None:
            # Returns when all ranks have come here, and so have set their flags.
            handle = symmetric_memory.rendezvous(whole, channel.group.group_name)
            self._memory.append(handle)
            for rank in range(self.world):
                theirs = handle.get_buffer(rank, (size,), torch.uint8)
                by_rank.append(split_buffer(theirs, self.world, num_bytes, _ALIGNMENT))

        _check_all(channel, op, _attempt(map_all))
        return by_rank, by_rank[self.rank]

    def _probe(self, op: str, buffers: list[Buffer]) -> None:
        """RuntimeError unless the rows and flags that each rank copies to all others arrive, in that order."""
        stripe = _PROBE_BYTES // self.world
        epoch = torch.tensor([self._first_epoch + 1], dtype=torch.int32, device=self._device)
        status = torch.zeros_like(self.status)
        pattern = torch.full((stripe,), self.rank + 1, dtype=torch.uint8, device=self._device)

        def push() -> None:
            for peer, buffer in enumerate(buffers):
                into = buffer.data[self.rank * stripe : (self.rank + 1) * stripe]
                self.place.copy(f"{op} probe to {peer}", pattern, into)
                self.place.raise_flag(buffer.flags, self.rank, epoch)

        self.place.wait(self.place.send(self.rank, self.place.mark(), push))
        flags = buffers[self.rank].flags[: self.world]
        chunks = Chunks(self.rank, self.world, self.starts(range(self.world + 1)), flags, epoch)
        await_rows(chunks, self.world, status=status, timeout_us=self.place.timeout_us)
        found = buffers[self.rank].data[: stripe * self.world].view(self.world, stripe)
        expected = torch.arange(1, self.world + 1, dtype=torch.uint8, device=self._device)
        if (timeout := read_status(status)) is not None:
            raise RuntimeError(f"a flag of rank {timeout.rank} did not rise in its memory")
        if not torch.equal(found, expected[:, None].expand_as(found)):
            raise RuntimeError("what peers copied into its memory is not there, though their flags are up")


def _attempt(step: Callable[[], object]) -> str:
    """What went wrong, or nothing. Torch raises RuntimeError for whatever it, the driver or the store refuses."""
    try:
        step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _check_all(channel: Channel, op: str, outcome: str) -> None:
    """ValueError on every rank if the step went wrong on one."""
    for rank, failure in enumerate(channel.share_all(op, outcome)):
        if failure:
            raise ValueError(f"{op}: transport 'symmetric' cannot run: on rank {rank}, {failure}")
