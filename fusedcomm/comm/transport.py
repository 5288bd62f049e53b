"""What an op asks of the wire, and the choice of who provides it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.comm.c10d import GlooExchange, NcclExchange
from fusedcomm.comm.channel import Channel, channel_of, refuse_in_capture
from fusedcomm.comm.hierarchical import node_of_each_rank
from fusedcomm.comm.ring import Step

if TYPE_CHECKING:
    from fusedcomm.kernels.flags import Chunks


# Those that `method="fused:NAME"` asks for.
TRANSPORTS = ("symmetric", "shared", "c10d")


class Exchange(Protocol):
    """The transfers of one op call on one rank.

    Planned when it is made: `outgoing[i]` leaves and `incoming[i]` is filled at step `i` (`None`: nothing to move).
    All tensors are contiguous and must stay untouched from `send(i)`, or from `start()` for `incoming`, to `finish()`.
    """

    def start(self) -> None:
        """Agree with the peers that all make this call, and be ready to receive. Does not block."""

    def send(self, index: int) -> None:
        """`outgoing[index]` is complete (on the current stream): let it go. Steps are sent in order. Does not block."""

    def wait(self, index: int) -> None:
        """Return when `incoming[index]` may be read (on the current stream)."""

    def finish(self) -> None:
        """Return when every buffer may be used again (on the current stream)."""


def open_exchange(
    group: ProcessGroup,
    op: str,
    signature: str,
    steps: Sequence[Step],
    outgoing: Sequence[Tensor | None],
    incoming: Sequence[Tensor | None],
    device: torch.device,
    *,
    overlapped: bool,
    paced: bool,
) -> Exchange:
    """The exchange for tensors on `device`: NCCL's for CUDA, gloo's for the CPU.

    `overlapped` says whether the caller computes meanwhile; without, nothing runs beside it. With `paced` a
    distance's rows leave only when those from the distance before have come in, which keeps messages to several peers
    from sharing the link; right where everything is ready to leave at once.

    Raises:
        ValueError: the group has no backend for that device.
    """
    channel: Channel = channel_of(group)
    backend = channel.backend_of(op, device)
    kind = NcclExchange if backend == "nccl" else GlooExchange
    return kind(channel, op, signature, steps, outgoing, incoming, overlapped, paced)


class Flight(Protocol):
    """One call of a fused op on one rank: what travels while a kernel runs, and what the kernel is told of it.

    Attributes:
        status: [4] int32, (op, rank, chunk, epoch) of the first wait that was in vain; zero if there was none.
        timeout_us: how long a kernel may wait for a chunk; in the interpreter, how often it may look.
    """

    status: Tensor
    timeout_us: int

    def finish(self) -> None:
        """All kernels of the call are launched: tell the peers when they have run, and see to what went wrong.

        Where the kernels run asynchronously this does not wait for them; what went wrong is then raised by a later
        call of the transport. The buffers may be read by what was launched before, and by nothing after.

        Raises:
            PeerError: a chunk did not come in time, or a peer is gone, late or calls something else. What was computed
                is void, and so is the transport: every later call raises this again.
        """


class GatherFlight(Flight, Protocol):
    """Everybody's rows on their way into every rank's buffer.

    Attributes:
        x_full: [rows, features], in the transport's memory; own rows are there and flagged, those of peers arrive.
        chunks: its rows, and the flags that rise as they arrive.
    """

    x_full: Tensor
    chunks: Chunks


class ScatterFlight(Flight, Protocol):
    """Everybody's partial sums on their way to the owners of the rows.

    Attributes:
        y_partial: [rows, features], to be filled by the kernel that `produce` launches.
        chunks: its rows, and the flags that the kernel raises.
        counters: [number of chunks] int32 for that kernel.
        summands: [world, own rows, features], in the transport's memory: by source rank, our own among them.
        arrivals: the rows of `summands` as [world * own rows], and the flags that rise as they arrive; `chunks` of
            rank r are those that rank r sends.
    """

    y_partial: Tensor
    chunks: Chunks
    counters: Tensor
    summands: Tensor
    arrivals: Chunks

    def produce(self, launch: Callable[[], object]) -> None:
        """Call `launch`, which starts the kernel that fills `y_partial`, and send each chunk once its flag is up.

        Whether the sending is set up before or after the launch is up to the transport.
        """


class FlagTransport(Protocol):
    """What a fused op asks of the wire: chunks that travel while a kernel runs, each followed by its flag.

    The protocol is that of `tests/protocol_model.py`. Each of a call's two kinds has buffers on every rank, one more
    than calls are under way at once. A call takes the one that has been free for longest, until it is finished. A
    buffer has an *epoch*, the number of the calls that used it, on the device, a flag for each chunk, and for each peer
    a word that says up to which epoch that peer has read its own such buffer. A sender copies a chunk into the
    receiver's buffer and then raises the chunk's flag there to the epoch; before its first copy of a call it waits
    until the receiver has read what the call before left in that buffer. Epochs only grow, modulo 2^32, and every wait
    compares modulo: nothing is ever reset.

    Every rank makes and finishes the same calls in the same order. Rows are those of matrices, `sizes` those of each
    rank; every rank's are cut into `pieces` chunks (`ring.chunk_bounds`).

    Attributes:
        name: `shared`, `simulated`, ...
        reason: why it is this one, in words.
        rank, world: who we are, and how many ranks there are.
        communication_sms: how many SMs a persistent kernel must leave to the transport.
    """

    name: str
    reason: str
    rank: int
    world: int
    communication_sms: int

    def gather(self, op: str, signature: str, shard: Tensor, sizes: Sequence[int], pieces: int) -> GatherFlight:
        """Let our rows, `shard` [sizes[rank], features], travel to every peer: to the one that needs them next first.

        `shard` is read on the current stream before the call returns. `signature` says in words what every rank must
        agree on.
        """
        ...

    def scatter(
        self, op: str, signature: str, like: Tensor, features: int, sizes: Sequence[int], pieces: int
    ) -> ScatterFlight:
        """Be ready to send partial sums, of `like`'s dtype and device, to the owners of the rows."""
        ...

    def refuse_if_failed(self, op: str) -> None:
        """PeerError if an earlier call is known to have failed; what a GPU has ended is known."""
        ...


class _Carriers:
    """The flag transports of one group: those that were asked for, and the one of `method="fused"` by itself."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._by_name: dict[tuple[str, str], FlagTransport] = {}
        self._automatic: dict[str, FlagTransport] = {}

    def get(self, op: str, device: torch.device, name: str) -> FlagTransport:
        """The one of that name, or with an empty name the one that suits the device."""
        known = self._by_name.get((device.type, name)) if name else self._automatic.get(device.type)
        if known is not None:
            return known
        _check_kernels(op, device)
        refuse_in_capture(op, device, "the group's first")
        # What follows are collectives: a peer that calls something else must be found before.
        self._channel.check_same(op, f"{op}: method='fused', transport {name or 'automatic'}", device)
        _check_gpus(self._channel, op, device)
        if name:
            return self._open(op, device, name, "asked for")
        self._automatic[device.type] = transport = self._choose(op, device)
        return transport

    def refuse_if_failed(self, op: str) -> None:
        """PeerError if a call by one of them is known to have failed."""
        for transport in self._by_name.values():
            transport.refuse_if_failed(op)

    def _choose(self, op: str, device: torch.device) -> FlagTransport:
        """Ranks agree, since each of them sees every rank's machine, and learns of every rank's failure."""
        if device.type == "cpu":
            if len(set(node_of_each_rank(self._channel.group))) == 1:
                return self._open(op, device, "shared", "all ranks are on one machine")
            return self._open(op, device, "c10d", "the ranks are on several machines")
        try:
            return self._open(op, device, "symmetric", "every GPU reaches the memory of every other one")
        except ValueError as error:
            reason = str(error).removeprefix(f"{op}: ")
        try:
            return self._open(op, device, "c10d", reason)
        except ValueError as error:
            raise ValueError(f"{error}; nor can another transport: {reason}") from error

    def _open(self, op: str, device: torch.device, name: str, reason: str) -> FlagTransport:
        needed = {"shared": "cpu", "symmetric": "cuda"}.get(name, device.type)
        if device.type != needed:
            raise ValueError(
                f"{op}: transport '{name}' carries {needed} tensors, but these are on {device.type}; use 'fused:c10d', "
                "or 'fused', which chooses itself"
            )
        key = (device.type, name)
        if key not in self._by_name:
            # It outlives a call in inference mode, whose tensors could not be written to elsewhere.
            with torch.inference_mode(False):
                transport = self._by_name[key] = _made(self._channel, op, device, name)
            transport.reason = reason
        return self._by_name[key]


def _made(channel: Channel, op: str, device: torch.device, name: str) -> FlagTransport:
    # These import Triton, which the other methods do without.
    if name == "symmetric":
        from fusedcomm.comm.symmetric import SymmetricTransport

        return SymmetricTransport(channel, op, device)
    if name == "shared":
        from fusedcomm.comm.shared import SharedTransport

        channel.backend_of(op, device)
        return SharedTransport(channel)
    from fusedcomm.comm.exchanged import ExchangedTransport

    return ExchangedTransport(channel, op, device)


def _check_kernels(op: str, device: torch.device) -> None:
    """ValueError unless this process's Triton runs kernels on the device."""
    remedy = "use method='chunked'"
    try:
        from fusedcomm.kernels._triton import INTERPRETED
    except ModuleNotFoundError as error:
        raise ValueError(f"{op}: method='fused' cannot run: {error}; {remedy}") from error
    if device.type == "cuda" and INTERPRETED:
        raise ValueError(
            f"{op}: method='fused' on CUDA tensors needs compiled kernels, but this process interprets them; "
            f"unset TRITON_INTERPRET, or {remedy}"
        )
    if device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            f"{op}: method='fused' on CPU tensors needs Triton's interpreter, but this process's compiles for a "
            f"GPU; set TRITON_INTERPRET=1 before Triton is first imported, or {remedy}"
        )


def _check_gpus(channel: Channel, op: str, device: torch.device) -> None:
    """ValueError on every rank if there are no kernels for the GPU of one."""
    if device.type != "cuda":
        return
    for rank, reason in enumerate(channel.share_all(op, _unknown_gpu(device))):
        if reason:
            raise ValueError(f"{op}: method='fused' cannot run: on rank {rank}, {reason}; use method='chunked'")


def _unknown_gpu(device: torch.device) -> str:
    """Why kernels have no configuration for a GPU, or nothing."""
    from fusedcomm.kernels.config import ARCHITECTURES
    from fusedcomm.kernels.grid import architecture_of

    properties = torch.cuda.get_device_properties(device)
    try:
        architecture_of(properties)
    except ValueError:
        return f"{properties.name} is none of {', '.join(ARCHITECTURES)}"
    return ""


_carriers: weakref.WeakKeyDictionary[ProcessGroup, _Carriers] = weakref.WeakKeyDictionary()


def flag_transport_of(group: ProcessGroup, op: str, device: torch.device, name: str = "") -> FlagTransport:
    """The group's transport of that name for fused ops on tensors on `device`; every rank asks for the same.

    Without a name: for CUDA tensors `symmetric` where every rank can reach every other's memory, which is tried, else
    `c10d` over NCCL; for CPU tensors `shared` where all ranks are on one machine, else `c10d` over gloo.

    Raises:
        ValueError: it cannot run, or none can, and why.
        PeerError: a peer asks for something else.
    """
    carriers = _carriers.get(group)
    if carriers is None:
        carriers = _carriers[group] = _Carriers(channel_of(group))
    return carriers.get(op, device, name)


def refuse_if_failed(group: ProcessGroup, op: str) -> None:
    """PeerError if a fused call of the group is known to have failed; nobody waits for a GPU that is still at it.

    For who has waited for the GPU himself, and is about to use what was computed there.
    """
    carriers = _carriers.get(group)
    if carriers is not None:
        carriers.refuse_if_failed(op)
