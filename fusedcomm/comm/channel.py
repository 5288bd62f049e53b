"""A process group as our exchanges see it: numbered calls, and a header that says what each rank calls.

gloo aborts the process when shapes differ and sums the wrong tensors when calls are swapped; NCCL hangs. So each call
begins with a header of fixed size, sent to every peer: the call's number and its signature as text. All ranks see all
headers, hence all of them report a disagreement. Over gloo the payload travels at the same time, but under a tag that
is a hash of number and signature: it can only meet the receive of the very same call.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import weakref
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from fusedcomm.errors import PeerError

HEADER_BYTES = 512
# The call's number, a hash of its signature, and as much of that as there is room for.
_TEXT_BYTES = HEADER_BYTES - 12
_HEADER = struct.Struct(f"<qI{_TEXT_BYTES}s")
_CUT = b" ... "
# Headers have a tag of their own, so that payload of any size cannot be taken for one.
HEADER_TAG = 1
_REFUSED = "refused: "


class Headers:
    """The headers of one call over gloo, on their way. Checked by whichever thread needs to know first."""

    def __init__(
        self,
        channel: Channel,
        op: str,
        call: int,
        own: bytearray,
        theirs: dict[int, bytearray],
        receives: dict[int, Work],
        sends: dict[int, Work],
    ) -> None:
        self._channel = channel
        self._op, self._call = op, call
        self._own, self._theirs, self._receives, self._sends = own, theirs, receives, sends
        self._lock = threading.Lock()
        self._checked = False
        self._error: PeerError | None = None

    def check(self) -> None:
        """Return when all peers are known to make this very call.

        Raises:
            PeerError: a peer is late beyond the group's time-out, gone, or calls something else. Names both calls.
        """
        with self._lock:
            if not self._checked:
                self._checked = True
                try:
                    _compare(self._op, self._channel.rank, self._own, self.receive())
                    self.finish_sends()
                except PeerError as error:
                    self._error = error
                    self._channel.keep(self, *self._receives.values(), *self._sends.values())
        if self._error is not None:
            raise self._error

    def receive(self) -> dict[int, bytearray]:
        """Every peer's header, whatever it says.

        Raises:
            PeerError: a peer is late beyond the group's time-out, or gone.
        """
        absent = "did not call the operation"
        for peer, header in self._theirs.items():
            self._channel.wait_for(self._receives[peer], self._op, peer, -1, absent)
            # A call that this rank and the peer both refused earlier left its header behind.
            while header != self._own and _decode(header)[0] < self._call:
                again = self._channel.begin(self._channel.group.recv, _as_tensor(header), self._op, peer, HEADER_TAG)
                self._channel.wait_for(again, self._op, peer, -1, absent)
        return self._theirs

    def finish_sends(self) -> None:
        """Return when the peers have taken this rank's header."""
        for peer, work in self._sends.items():
            self._channel.wait_for(work, self._op, peer, -1, "did not take the header")


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
        self._backends: dict[str, str] = {}
        self._unclaimed: list[object] = []
        self._under_way: set[object] = set()
        self._has_gloo = has_gloo(group)
        if sys.platform == "linux" and self._has_gloo:
            calm_gloo()

    @property
    def group(self) -> ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("fusedcomm: the process group was destroyed")
        return group

    def backend_of(self, op: str, device: torch.device) -> str:
        """`gloo` or `nccl`, whichever the group uses for tensors on `device`."""
        if device.type in self._backends:
            return self._backends[device.type]
        backend = self.group._get_backend(device).name()
        needed = {"cpu": "gloo", "cuda": "nccl"}.get(device.type)
        if backend != needed:
            raise ValueError(
                f"{op}: the process group uses {backend} for {device.type} tensors; "
                "CPU tensors need gloo and CUDA tensors nccl: create the group with that backend or move the tensors"
            )
        self._backends[device.type] = backend
        return backend

    def next_call(self) -> int:
        self._calls += 1
        return self._calls

    def announce(self, op: str, call: int, signature: str) -> Headers:
        """Send this call's header to every peer over gloo and post the receives of theirs; does not block."""
        peers = self._peers()
        own = _encode(call, signature)
        theirs = {peer: bytearray(HEADER_BYTES) for peer in peers}
        receives, sends = {}, {}
        for peer in peers:
            receives[peer] = self.begin(self.group.recv, _as_tensor(theirs[peer]), op, peer, HEADER_TAG)
            sends[peer] = self.begin(self.group.send, _as_tensor(own), op, peer, HEADER_TAG)
        return Headers(self, op, call, own, theirs, receives, sends)

    def check_same(self, op: str, signature: str, device: torch.device) -> None:
        """PeerError unless every rank is at this very point; a call of its own, without payload."""
        call = self.next_call()
        if self._has_gloo:
            self.announce(op, call, signature).check()
        else:
            self.agree_on_device(op, call, signature, device)

    def share(self, op: str, text: str) -> dict[int, str]:
        """Every peer's `text`, cut to less than `HEADER_BYTES`, over gloo; a call of its own, which all ranks make."""
        headers = self.announce(op, self.next_call(), text)
        theirs = {peer: _decode(header)[1] for peer, header in headers.receive().items()}
        headers.finish_sends()
        return theirs

    def share_all(self, op: str, text: str) -> list[str]:
        """Every rank's `text`, of any length, by rank, over whichever backend the group has; all ranks call it."""
        texts = [""] * self.world
        try:
            dist.all_gather_object(texts, text, group=self.group)
        except RuntimeError as error:
            raise PeerError(op, -1, -1, f"a rank of the group is gone or late: {error}") from error
        return texts

    @property
    def timeout(self) -> timedelta:
        """How long a wait for a peer may take: the time-out of the group's gloo backend, or else of its NCCL one."""
        return self._options._timeout

    @cached_property
    def _options(self) -> Any:
        # Those of the backend, which every wait looks at: to find them takes longer than to read them.
        return self.group._get_backend(torch.device("cpu" if self._has_gloo else "cuda")).options

    @property
    def timeout_s(self) -> float:
        """The same in seconds."""
        return self.timeout.total_seconds()

    def begin(
        self,
        transfer: Callable[[list[Tensor], int, int], Work],
        tensor: Tensor,
        op: str,
        peer: int,
        tag: int,
        chunk: int = -1,
    ) -> Work:
        """The group's `send` or `recv` over gloo, which does not block; PeerError if the peer is known to be gone."""
        try:
            return transfer([tensor], peer, tag)
        except RuntimeError as error:
            raise PeerError(op, peer, chunk, f"rank {peer} of the group is gone: {error}") from error

    def wait_for(self, work: Work, op: str, peer: int, chunk: int, what: str) -> None:
        """Wait within the group's time-out; a failure becomes a `PeerError` that names the peer."""
        # By themselves gloo's messages wait for as long as the group was made with, whatever was set since.
        limit = self.timeout
        try:
            work.wait(limit)
        except RuntimeError as error:
            raise PeerError(op, peer, chunk, f"rank {peer} of the group {what}: {error}") from error

    def has_agreed(self, signature: str) -> bool:
        """Whether the ranks have agreed on such a call before."""
        return signature in self._agreed

    def agree(self, op: str, signature: str, device: torch.device) -> None:
        """For a call whose payload needs no host: PeerError unless every rank makes it.

        Looked at for signatures not seen before, since hosts wait for each other; `FUSEDCOMM_CHECKED=1` looks always.

        Raises:
            ValueError: the call is captured in a graph, and has not run before.
        """
        call = self.next_call()
        if not self._has_gloo:
            self.agree_on_device(op, call, signature, device)
            return
        if signature not in self._agreed:
            refuse_in_capture(op, device, signature)
        elif not self._check_all:
            return
        self.announce(op, call, signature).check()
        self._agreed.add(signature)

    def agree_on_device(self, op: str, call: int, signature: str, device: torch.device) -> None:
        """The same over NCCL, where a look at the headers stalls the host: only for signatures not seen before.

        `FUSEDCOMM_CHECKED=1` looks at every call that is not captured in a graph.

        Raises:
            ValueError: it is captured, and has not run before.
        """
        if signature in self._agreed and (not self._check_all or _is_captured(device)):
            return
        refuse_in_capture(op, device, signature)
        own = _encode(call, signature)
        theirs = torch.empty(self.world * HEADER_BYTES, dtype=torch.uint8, device=device)
        dist.all_gather_into_tensor(theirs, _as_tensor(own).to(device), group=self.group)
        headers = theirs.cpu().view(self.world, HEADER_BYTES)
        _compare(op, self.rank, own, {peer: bytearray(headers[peer].numpy()) for peer in self._peers()})
        self._agreed.add(signature)

    def refuse(self, op: str, reason: str) -> None:
        """Tell the peers that this rank rejects its own call, so that they need not wait for the time-out."""
        header = _as_tensor(_encode(self.next_call(), f"{_REFUSED}{op}: {reason}"))
        for peer in self._peers():
            try:
                # A peer that refuses the same call does not receive this.
                self.keep(self.begin(self.group.send, header, op, peer, HEADER_TAG), header)
            except PeerError:
                # Who is gone need not know.
                continue

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.world) if peer != self.rank]

    def hold(self, exchange: object) -> None:
        """Hold on to what is under way until it is released, even if whoever began it does not come back to it.

        gloo reads nothing more from a peer whose message finds the receive gone.
        """
        self._under_way.add(exchange)

    def release(self, exchange: object) -> None:
        self._under_way.discard(exchange)

    def keep(self, *works: object) -> None:
        """Hold on to transfers that may never complete, and to their buffers, until the group ends."""
        self._unclaimed.extend(works)


def _compare(op: str, rank: int, own: bytearray, theirs: dict[int, bytearray]) -> None:
    """PeerError unless the headers of all peers are the same as this rank's `own`."""
    for peer, header in theirs.items():
        if header == own:
            continue
        call, signature = _decode(own)
        their_call, their_signature = _decode(header)
        if their_signature.startswith(_REFUSED):
            raise PeerError(op, peer, -1, f"rank {peer} {their_signature}")
        raise PeerError(
            op,
            peer,
            -1,
            f"the ranks of the group call different things: rank {rank} call {call}: {signature}; "
            f"rank {peer} call {their_call}: {their_signature}; all must make the same calls in the same order",
        )


def has_gloo(group: ProcessGroup) -> bool:
    """Whether the group's CPU tensors travel over gloo. `get_backend` says "undefined" where the choice was torch's."""
    cpu = torch.device("cpu")
    return cpu in group._device_types and group._get_backend(cpu).name() == "gloo"


def calm_gloo() -> None:
    """Let gloo's own threads not preempt the thread that wakes them.

    On a core shared with the rank's other threads such a thread wakes up while its waker still holds the connection's
    lock, and spins on it to the end of the scheduler's tick: 4 ms in which the rank neither computes nor sends. As
    batch threads they run a moment later. It needs no privileges, as a rule.
    """
    for thread in Path("/proc/self/task").iterdir():
        try:
            if (thread / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            # It ended meanwhile, or may not be changed: a sandbox forbids it, or an idle process that is nice as well.
            continue


def refuse_in_capture(op: str, device: torch.device, call: str) -> None:
    """ValueError if a CUDA graph is captured now: `call` has not run before."""
    if _is_captured(device):
        raise ValueError(
            f"{op}: a CUDA graph is captured, but this call has not run before, when ranks agree on it, make its "
            f"buffers and load its kernels: run it once before ({call})"
        )


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def payload_tag(call: int, signature: str) -> int:
    """A tag for this call's payload, which another call's cannot have but by a chance of one in 2^31."""
    return max(HEADER_TAG + 1, zlib.crc32(f"{call} {signature}".encode()) >> 1)


def _encode(call: int, signature: str) -> bytearray:
    text = signature.encode()
    digest = zlib.crc32(text)
    if len(text) > _TEXT_BYTES:
        # A list of many ranks' sizes is what is long, in the middle.
        half = (_TEXT_BYTES - len(_CUT)) // 2
        text = text[:half] + _CUT + text[-half:]
    return bytearray(_HEADER.pack(call, digest, text))


def _decode(header: bytearray) -> tuple[int, str]:
    call, _, text = _HEADER.unpack(header)
    return call, text.rstrip(b"\0").decode(errors="replace")


def _as_tensor(header: bytearray) -> Tensor:
    """The same memory, as a transfer takes it."""
    return torch.frombuffer(header, dtype=torch.uint8)


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
