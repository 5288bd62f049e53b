"""A process group as our exchanges see it: numbered calls, and a header that says what each rank calls.

gloo aborts the process when shapes differ and sums the wrong tensors when calls are swapped; NCCL hangs. So each call
begins with a header of fixed size, sent to every peer: the call's number and its signature as text. Payload is
posted only when all headers agree. All ranks see all headers, hence all of them report a disagreement.
"""

from __future__ import annotations

import os
import struct
import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from fusedcomm.errors import PeerError

HEADER_BYTES = 512
# Headers have a tag of their own, so that payload of any size cannot be taken for one.
HEADER_TAG = 1
_REFUSED = "refused: "


class Channel:
    """The calls of one group, in order. One per group and process."""

    def __init__(self, group: ProcessGroup) -> None:
        # A strong reference would keep the group, and this entry of the registry, alive for ever.
        self._group = weakref.ref(group)
        self.rank = group.rank()
        self.world = group.size()
        self._calls = 0
        self._agreed: set[str] = set()
        self._check_all = os.environ.get("FUSEDCOMM_CHECKED", "0") == "1"
        # Refusals that no peer may ever receive: kept until the group ends, as gloo needs their buffers.
        self._unclaimed: list[tuple[Work, Tensor]] = []

    @property
    def group(self) -> ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("fusedcomm: the process group was destroyed")
        return group

    def backend_of(self, op: str, device: torch.device) -> str:
        """`gloo` or `nccl`, whichever the group uses for tensors on `device`."""
        backend = self.group._get_backend(device).name()
        needed = {"cpu": "gloo", "cuda": "nccl"}.get(device.type)
        if backend != needed:
            raise ValueError(
                f"{op}: the process group uses {backend} for {device.type} tensors; "
                "CPU tensors need gloo and CUDA tensors nccl: create the group with that backend or move the tensors"
            )
        return backend

    def next_call(self) -> int:
        self._calls += 1
        return self._calls

    def agree(self, op: str, call: int, signature: str) -> None:
        """Exchange headers with every peer over gloo; returns when all of them make this very call.

        Raises:
            PeerError: a peer is late beyond the group's time-out, gone, or calls something else. Names both calls.
        """
        own = _encode(call, signature)
        sends = [(self.group.send([own], peer, HEADER_TAG), peer) for peer in self._peers()]
        theirs = {peer: torch.empty(HEADER_BYTES, dtype=torch.uint8) for peer in self._peers()}
        receives = {peer: self.group.recv([theirs[peer]], peer, HEADER_TAG) for peer in self._peers()}
        for peer, work in receives.items():
            wait_for(work, op, peer, -1, "did not call the operation")
            # A call that this rank and the peer both refused earlier left its header behind.
            while _decode(theirs[peer])[0] < call:
                work = self.group.recv([theirs[peer]], peer, HEADER_TAG)
                wait_for(work, op, peer, -1, "did not call the operation")
        for work, peer in sends:
            wait_for(work, op, peer, -1, "did not call the operation")
        self._compare(op, call, signature, {peer: _decode(theirs[peer]) for peer in theirs})

    def agree_on_device(self, op: str, call: int, signature: str, device: torch.device) -> None:
        """The same over NCCL, where a look at the headers stalls the host: only for signatures not seen before.

        `FUSEDCOMM_CHECKED=1` looks at every call.
        """
        if signature in self._agreed and not self._check_all:
            return
        own = _encode(call, signature).to(device)
        theirs = torch.empty(self.world * HEADER_BYTES, dtype=torch.uint8, device=device)
        dist.all_gather_into_tensor(theirs, own, group=self.group)
        headers = theirs.cpu().view(self.world, HEADER_BYTES)
        self._compare(op, call, signature, {peer: _decode(headers[peer]) for peer in self._peers()})
        self._agreed.add(signature)

    def refuse(self, op: str, reason: str) -> None:
        """Tell the peers that this rank rejects its own call, so that they need not wait for the time-out."""
        header = _encode(self.next_call(), f"{_REFUSED}{op}: {reason}")
        for peer in self._peers():
            self._unclaimed.append((self.group.send([header], peer, HEADER_TAG), header))

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.world) if peer != self.rank]

    def _compare(self, op: str, call: int, signature: str, theirs: dict[int, tuple[int, str]]) -> None:
        for peer, (their_call, their_signature) in theirs.items():
            if their_signature.startswith(_REFUSED):
                raise PeerError(op, peer, -1, f"rank {peer} {their_signature}")
            if (their_call, their_signature) != (call, _fit(signature)):
                raise PeerError(
                    op,
                    peer,
                    -1,
                    f"the ranks of the group call different things: rank {self.rank} call {call}: "
                    f"{signature}; rank {peer} call {their_call}: {their_signature}; "
                    "all must make the same calls in the same order",
                )


def wait_for(work: Work, op: str, peer: int, chunk: int, what: str) -> None:
    """Wait within the group's time-out; a failure becomes a `PeerError` that names the peer."""
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerError(op, peer, chunk, f"rank {peer} of the group {what}: {error}") from error


def _fit(signature: str) -> str:
    return signature.encode()[: HEADER_BYTES - 8].decode(errors="ignore")


def _encode(call: int, signature: str) -> Tensor:
    text = _fit(signature).encode()
    return torch.frombuffer(bytearray(struct.pack(f"<q{HEADER_BYTES - 8}s", call, text)), dtype=torch.uint8)


def _decode(header: Tensor) -> tuple[int, str]:
    call, text = struct.unpack(f"<q{HEADER_BYTES - 8}s", header.numpy().tobytes())
    return call, text.rstrip(b"\0").decode(errors="replace")


def group_named(name: str) -> ProcessGroup:
    """The group of that `group_name`; custom ops carry groups by name."""
    return _resolve_process_group(GroupName(name))


_channels: weakref.WeakKeyDictionary[ProcessGroup, Channel] = weakref.WeakKeyDictionary()


def channel_of(group: ProcessGroup) -> Channel:
    """The group's one channel."""
    channel = _channels.get(group)
    if channel is None:
        channel = _channels[group] = Channel(group)
    return channel
