"""What travels between pipeline stages in one pass over a schedule: every send and receive of it goes through here."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from fusedcomm.comm.channel import Headers, channel_of, payload_tag
from fusedcomm.comm.pool import STAGING
from fusedcomm.comm.queue import URGENT
from fusedcomm.comm.record import span, wait_span
from fusedcomm.comm.worker import Worker
from fusedcomm.errors import PeerError
from fusedcomm.parallel.table import Action, received_by

_OP = "pipeline"
# Receives that are posted before the schedule has come to them, so that what a peer sends early travels at once.
_RECEIVES_AHEAD = 2
# Sends that are not waited for; each holds its tensor.
_SENDS_AHEAD = 2


class Courier:
    """The transfers of one pass on one rank, in the order of its list.

    Over gloo each has a tag of its own, made from the pass and from what it is, so that it can only meet its
    counterpart; receives are posted early, a bounded number ahead, into buffers from the pool. The pass begins with a
    header to all ranks of the group (see `Channel`), which is looked at before anything that came is used. Sends are
    urgent: bulk transfers are held back meanwhile (see `comm.queue`). NCCL knows no tags: there sends and receives keep
    the order of the table, which all ranks share.

    Errors: PeerError naming peer, stage and micro-batch for a peer that is late beyond the group's time-out or gone, or
    makes another pass.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        signature: str,
        actions: Iterable[Action],
        rank_of_stage: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        like: Tensor,
    ) -> None:
        self._channel = channel_of(group)
        self._is_gloo = self._channel.backend_of(_OP, like.device) == "gloo"
        self._signature, self._rank_of_stage = signature, rank_of_stage
        self._shapes, self._like = shapes, like
        self._call = self._channel.next_call()
        self._headers: Headers | None = None
        if self._is_gloo:
            self._headers = self._channel.announce(_OP, self._call, signature)
        else:
            self._channel.agree_on_device(_OP, self._call, signature, like.device)
        self._to_post = deque(action for action in actions if action.kind in ("RECV_F", "RECV_B"))
        self._posted: dict[Action, tuple[Tensor, Work | RuntimeError]] = {}
        # What is waited for until a send is over: of the sender's thread, or of NCCL's stream.
        self._sends: deque[threading.Event | Work] = deque()
        # What went wrong on the sender's thread.
        self._error: Exception | None = None
        self._post_ahead()

    def post_receive(self, action: Action) -> None:
        """The schedule has come to this receive: let it be under way, and over gloo some later ones too."""
        while self._to_post and action not in self._posted:
            self._post(self._to_post.popleft())
        self._post_ahead()

    def receive(self, action: Action) -> Tensor:
        """What was received: a buffer of the pool, to be given back to it."""
        buffer, work = self._posted.pop(action)
        peer = self._peer_of(action)
        with wait_span(f"{_OP} {_describe(action)} from {peer}", self._like.device):
            self._check()
            self._wait(work, action, peer, "did not deliver")
        self._post_ahead()
        return buffer

    def send(self, action: Action, tensor: Tensor) -> None:
        """Let `tensor` go; it is kept, and must stay untouched, until it has gone."""
        while len(self._sends) >= _SENDS_AHEAD:
            self._finish_send()
        peer = self._peer_of(action)
        if self._is_gloo:
            self._sends.append(_sender().submit(partial(self._deliver, action, tensor, peer)))
        else:
            self._sends.append(_nccl(dist.isend, tensor, self._channel.group, peer))

    def finish(self) -> None:
        """Return when everything has gone."""
        self._check()
        while self._sends:
            self._finish_send()

    def abandon(self) -> None:
        """After an error: gloo may still write to and read from these buffers, so nobody else may have them."""
        self._channel.keep(self)

    def _post_ahead(self) -> None:
        while self._is_gloo and self._to_post and len(self._posted) < _RECEIVES_AHEAD:
            self._post(self._to_post.popleft())

    def _post(self, action: Action) -> None:
        buffer = STAGING.take(self._shapes[action.micro_batch], self._like)
        peer = self._peer_of(action)
        if self._is_gloo:
            work = _begin(self._channel.group.recv, buffer, peer, self._tag(action))
        else:
            work = _nccl(dist.irecv, buffer, self._channel.group, peer)
        self._posted[action] = (buffer, work)

    def _deliver(self, action: Action, tensor: Tensor, peer: int) -> None:
        """On the sender's thread."""
        if self._error is not None:
            return
        try:
            # What no peer would ever receive must not keep this thread from its other work.
            self._check()
            with URGENT.passing(), span("transfer", f"{_OP} to {peer}", tensor.nbytes):
                work = _begin(self._channel.group.send, tensor, peer, self._tag(received_by(action)))
                self._wait(work, action, peer, "did not take")
        except Exception as error:
            self._error = error

    def _finish_send(self) -> None:
        with wait_span(f"{_OP} sent", self._like.device):
            self._sends.popleft().wait()
        if self._error is not None:
            raise self._error

    def _check(self) -> None:
        if self._headers is not None:
            self._headers.check()

    def _wait(self, work: Work | RuntimeError, action: Action, peer: int, failed: str) -> None:
        what = f"{failed} the {_describe(action)}"
        if isinstance(work, RuntimeError):
            raise PeerError(_OP, peer, action.micro_batch, f"rank {peer} of the group {what}: {work}") from work
        self._channel.wait_for(work, _OP, peer, action.micro_batch, what)

    def _peer_of(self, action: Action) -> int:
        towards_end = action.kind in ("SEND_F", "RECV_B")
        return self._rank_of_stage[action.stage + (1 if towards_end else -1)]

    def _tag(self, receive: Action) -> int:
        return payload_tag(self._call, f"{self._signature} {receive.kind} {receive.stage} {receive.micro_batch}")


@cache
def _sender() -> Worker:
    """The thread that posts what leaves over gloo, so that the computing one never copies bytes.

    It waits for each send before the next, which the table's order allows: each then has the whole link. It is not that
    of the tensor-parallel ops, whose sends must not wait for a stage to be ready.
    """
    return Worker("fusedcomm-pipeline")


def _begin(
    transfer: Callable[[list[Tensor], int, int], Work], tensor: Tensor, peer: int, tag: int
) -> Work | RuntimeError:
    """gloo's send or receive; what it says of a peer that is gone already is kept for whoever waits for this one."""
    try:
        return transfer([tensor], peer, tag)
    except RuntimeError as error:
        return error


def _describe(action: Action) -> str:
    what = "hidden states" if action.kind.endswith("F") else "gradient"
    return f"{what} of micro-batch {action.micro_batch} at stage {action.stage}"


def _nccl(op: Callable[..., Work | None], tensor: Tensor, group: ProcessGroup, peer: int) -> Work:
    # As a batch of one: sent alone, each pair of ranks would get a communicator of its own.
    (work,) = dist.batch_isend_irecv([P2POp(op, tensor, group=group, group_peer=peer)])
    return work
