"""Chunked peer-to-peer over the process group's own backend: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, Work

from fusedcomm.comm.channel import Channel, wait_for
from fusedcomm.comm.record import span, wait_on_stream
from fusedcomm.comm.ring import Step

# Payload tags repeat long after the transfers that used them; tags 0 and 1 are torch's default and the headers'.
_FIRST_TAG = 2
_NUM_TAGS = 1 << 20


class _Sender:
    """One thread per process that runs jobs first in, first out.

    gloo copies a message's bytes in the thread that posts it, so posting from here leaves the computing thread free;
    and sending one message after the other lets each have the whole link.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fusedcomm-sender", daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            self._jobs.get()()


@cache
def _sender() -> _Sender:
    return _Sender()


def _run_here(job: Callable[[], None]) -> None:
    job()


class GlooExchange:
    """`Exchange` for CPU tensors. The sender thread agrees with the peers, posts the receives and sends.

    With nothing to overlap the caller's thread does it all: two threads would only hand over to one another.
    """

    def __init__(
        self,
        channel: Channel,
        op: str,
        signature: str,
        steps: Sequence[Step],
        outgoing: Sequence[Tensor | None],
        incoming: Sequence[Tensor | None],
        overlapped: bool,
    ) -> None:
        self._channel = channel
        self._op = op
        self._signature = signature
        self._steps = steps
        self._outgoing = outgoing
        self._incoming = incoming
        self._submit = _sender().submit if overlapped else _run_here
        self._receives: list[Work | None] = []
        self._opened = threading.Event()
        self._error: Exception | None = None

    def start(self) -> None:
        self._call = self._channel.next_call()
        self._tag = _FIRST_TAG + self._call % _NUM_TAGS
        self._submit(self._open)

    def _open(self) -> None:
        try:
            self._channel.agree(self._op, self._call, self._signature)
            group = self._channel.group
            self._receives = [
                None if tensor is None else group.recv([tensor], step.src, self._tag)
                for step, tensor in zip(self._steps, self._incoming)
            ]
        except Exception as error:
            self._error = error
        self._opened.set()

    def send(self, index: int) -> None:
        if self._outgoing[index] is not None:
            self._submit(partial(self._send, index))

    def _send(self, index: int) -> None:
        tensor, dst = self._outgoing[index], self._steps[index].dst
        if self._error is not None or tensor is None:
            return
        try:
            with span("transfer", f"{self._op} to {dst}", tensor.nbytes):
                work = self._channel.group.send([tensor], dst, self._tag)
                wait_for(work, self._op, dst, index, f"did not take chunk {index}")
        except Exception as error:
            self._error = error

    def wait(self, index: int) -> None:
        if self._incoming[index] is None:
            return
        src = self._steps[index].src
        with span("wait", f"{self._op} from {src}"):
            self._opened.wait()
            self._raise()
            work = self._receives[index]
            if work is not None:
                wait_for(work, self._op, src, index, f"did not deliver chunk {index}")

    def finish(self) -> None:
        sent = threading.Event()
        self._submit(sent.set)
        with span("wait", f"{self._op} sent"):
            sent.wait()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


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
    ) -> None:
        self._channel = channel
        self._op = op
        self._signature = signature
        self._steps = steps
        self._outgoing = outgoing
        self._incoming = incoming
        self._overlapped = overlapped
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = _side_stream(torch.cuda.current_device())
        self._done: dict[int, torch.cuda.Event] = {}

    def start(self) -> None:
        call = self._channel.next_call()
        self._channel.agree_on_device(self._op, call, self._signature, self._device)
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
            wait_on_stream(self._done[index])

    def finish(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
