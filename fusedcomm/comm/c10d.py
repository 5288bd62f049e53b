"""Chunked peer-to-peer over the process group's own backend: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, Work

from fusedcomm.comm.channel import Channel, payload_tag
from fusedcomm.comm.queue import URGENT
from fusedcomm.comm.record import note, span, wait_span
from fusedcomm.comm.ring import Step
from fusedcomm.comm.worker import Worker
from fusedcomm.errors import PeerError

# Less than this is sent before another thread would have woken up to send it.
_MIN_THREADED_BYTES = 256 * 1024


@cache
def _sender() -> Worker:
    """gloo copies a message's bytes in the thread that posts it, so posting from here leaves the computing thread free;
    and sending one message after the other lets each have the whole link.
    """
    return Worker("fusedcomm-sender")


class GlooExchange:
    """`Exchange` for CPU tensors. Large messages are sent by the sender thread, if the caller computes meanwhile."""

    def __init__(
        self,
        channel: Channel,
        op: str,
        signature: str,
        steps: Sequence[Step],
        outgoing: Sequence[Tensor | None],
        incoming: Sequence[Tensor | None],
        overlapped: bool,
        paced: bool,
    ) -> None:
        self._channel = channel
        self._op = op
        self._signature = signature
        self._steps = steps
        self._outgoing = outgoing
        self._incoming = incoming
        self._paced = paced
        # Per step: whether its rows are in, settled by whichever thread needs to know first.
        self._locks = [threading.Lock() for _ in steps]
        self._arrived = [False for _ in steps]
        num_bytes = sum(tensor.nbytes for tensor in outgoing if tensor is not None)
        self._threaded = overlapped and num_bytes >= _MIN_THREADED_BYTES
        self._receives: list[Work | None] = []
        # Posted from the caller's thread: (index, when, work).
        self._sends: list[tuple[int, float, Work]] = []
        # Set when the latest job of the sender thread is over, and what went wrong there.
        self._sent: threading.Event | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        self._channel.hold(self)
        call = self._channel.next_call()
        group = self._channel.group
        self._headers = self._channel.announce(self._op, call, self._signature)
        self._tag = payload_tag(call, self._signature)
        for index, (step, tensor) in enumerate(zip(self._steps, self._incoming)):
            self._receives.append(None if tensor is None else self._begin(group.recv, tensor, step.src, index))

    def send(self, index: int) -> None:
        tensor, dst = self._outgoing[index], self._steps[index].dst
        if tensor is None:
            return
        if self._threaded:
            self._sent = _sender().submit(partial(self._send_and_wait, index, tensor, dst))
        else:
            if self._paced and self._hands_on(index):
                with span("wait", f"{self._op} to hand on"):
                    self._headers.check()
                    self._await_distance(self._steps[index].distance - 1)
            start_s = time.perf_counter()
            self._sends.append((index, start_s, self._begin(self._channel.group.send, tensor, dst, index)))

    def _send_and_wait(self, index: int, tensor: Tensor, dst: int) -> None:
        if self._error is not None:
            return
        try:
            # What no peer would ever receive must not keep this thread from its other work.
            self._headers.check()
            if self._paced:
                self._await_distance(self._steps[index].distance - 1)
            with URGENT.passing(), span("transfer", f"{self._op} to {dst}", tensor.nbytes):
                work = self._begin(self._channel.group.send, tensor, dst, index)
                self._channel.wait_for(work, self._op, dst, index, f"did not take chunk {index}")
        except Exception as error:
            self._error = error

    def _begin(self, transfer: Callable[[list[Tensor], int, int], Work], tensor: Tensor, peer: int, index: int) -> Work:
        try:
            return self._channel.begin(transfer, tensor, self._op, peer, self._tag, index)
        except PeerError:
            # Whoever calls something else, and has ended with the error of that, is named for it.
            self._headers.check()
            raise

    def _hands_on(self, index: int) -> bool:
        """Whether the step sends what another one receives."""
        send = self._steps[index].send
        return send is not None and send.owner != self._channel.rank

    def _await_distance(self, distance: int) -> None:
        """Return when all rows from that distance are in: then the peers' links are free of what was sent there.

        A send is over when the kernel has taken the bytes, which may be long before they have left. Sent right after
        one another, messages to several peers would share the link and all arrive at the end.
        """
        for index, step in enumerate(self._steps):
            if step.distance == distance:
                self._arrive(index)

    def _arrive(self, index: int) -> None:
        work, src = self._receives[index], self._steps[index].src
        with self._locks[index]:
            if work is not None and not self._arrived[index]:
                self._channel.wait_for(work, self._op, src, index, f"did not deliver chunk {index}")
                self._arrived[index] = True

    def wait(self, index: int) -> None:
        if self._receives[index] is None:
            return
        with span("wait", f"{self._op} from {self._steps[index].src}"):
            self._headers.check()
            self._arrive(index)

    def finish(self) -> None:
        with span("wait", f"{self._op} sent"):
            self._headers.check()
            if self._sent is not None:
                self._sent.wait()
            for index, start_s, work in self._sends:
                dst, tensor = self._steps[index].dst, self._outgoing[index]
                self._channel.wait_for(work, self._op, dst, index, f"did not take chunk {index}")
                # Over at the latest now.
                note("transfer", f"{self._op} to {dst}", start_s, 0 if tensor is None else tensor.nbytes)
        if self._error is not None:
            raise self._error
        self._channel.release(self)


@cache
def _side_stream(device_index: int) -> torch.cuda.Stream:
    # High priority: the few blocks of a copy must not queue behind the GEMM that they feed.
    return torch.cuda.Stream(device_index, priority=-1)


class NcclExchange:
    """`Exchange` for CUDA tensors: each step's send and receive as one NCCL group on a side stream."""

    def __init__(
        self,
        channel: Channel,
        op: str,
        signature: str,
        steps: Sequence[Step],
        outgoing: Sequence[Tensor | None],
        incoming: Sequence[Tensor | None],
        overlapped: bool,
        paced: bool,
    ) -> None:
        self._channel = channel
        self._op = op
        self._signature = signature
        self._steps = steps
        self._outgoing = outgoing
        self._incoming = incoming
        # Always paced: each step's send and receive are one group, and the groups follow one another on the stream.
        self._overlapped = overlapped
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = _side_stream(torch.cuda.current_device())
        self._done: dict[int, torch.cuda.Event] = {}

    def start(self) -> None:
        self._channel.agree(self._op, self._signature, self._device)
        # The buffers were allocated on the computing stream; the caching allocator must know their second user.
        for tensor in (*self._outgoing, *self._incoming):
            if tensor is not None:
                tensor.record_stream(self._stream)

    def send(self, index: int) -> None:
        step, out, into = self._steps[index], self._outgoing[index], self._incoming[index]
        group = self._channel.group
        transfers = []
        if out is not None:
            transfers.append(P2POp(dist.isend, out, group=group, group_peer=step.dst))
        if into is not None:
            transfers.append(P2POp(dist.irecv, into, group=group, group_peer=step.src))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if transfers:
                for work in dist.batch_isend_irecv(transfers):
                    work.wait()
            self._done[index] = torch.cuda.Event()
            self._done[index].record(self._stream)
        if not self._overlapped:
            torch.cuda.current_stream().wait_stream(self._stream)

    def wait(self, index: int) -> None:
        if self._incoming[index] is not None:
            with wait_span(f"{self._op} from {self._steps[index].src}", self._device):
                torch.cuda.current_stream().wait_event(self._done[index])

    def finish(self) -> None:
        if self._done:
            # Its own last step, and not what other exchanges have put on the stream since.
            torch.cuda.current_stream().wait_event(self._done[max(self._done)])
