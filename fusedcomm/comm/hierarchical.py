"""All-reduce by levels: in the node, across nodes, in the node, so that the slow links carry as little as can be."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.comm.channel import channel_of
from fusedcomm.comm.collective import Pending
from fusedcomm.comm.compress import Codec
from fusedcomm.comm.owners import add_in_order
from fusedcomm.comm.pool import BufferPool
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.comm.stages import Job, Stages
from fusedcomm.comm.subgroup import new_subgroup
from fusedcomm.comm.swap import Swap

# On the wire of a node for 1 to 10 ms: short enough to fill the phases soon, long enough to pay for its messages.
CHUNK_BYTES = 2**20
_POOL = BufferPool()


def node_of_each_rank(group: ProcessGroup, ranks_per_node: int | None = None) -> tuple[int, ...]:
    """The node (0, 1, ... by first appearance) of each rank of `group`, in the order of its ranks.

    By the ranks' host names, which they exchange; or, if `ranks_per_node` is given, ranks 0 .. n-1 of the default group
    are node 0, and so on, and nothing travels.
    """
    ranks = dist.get_process_group_ranks(group)
    if ranks_per_node is not None:
        names: list[str | int] = [rank // ranks_per_node for rank in ranks]
    else:
        names = [""] * len(ranks)
        dist.all_gather_object(names, platform.node(), group=group)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def level_groups(
    group: ProcessGroup, nodes: Sequence[int], *, timeout_s: float
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """This rank's peers in its node, and the ranks that have its place on the other nodes; None for a group of one.

    Every rank of `group`, which may be one of many such groups, calls it; `nodes` is `node_of_each_rank`.

    Raises:
        ValueError: the nodes hold different numbers of the group's ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    by_node = [[rank for rank, node in zip(ranks, nodes) if node == number] for number in range(max(nodes) + 1)]
    sizes = [len(members) for members in by_node]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"hierarchical: the nodes hold {', '.join(map(str, sizes))} ranks of the group; all must hold equally "
            "many: use another algorithm, or place the ranks evenly"
        )
    own = ranks[group.rank()]
    in_node = by_node[nodes[group.rank()]]
    across = [members[in_node.index(own)] for members in by_node]
    return _new_group(group, in_node, "in_node", timeout_s), _new_group(group, across, "across_nodes", timeout_s)


def _new_group(parent: ProcessGroup, ranks: list[int], name: str, timeout_s: float) -> ProcessGroup | None:
    return None if len(ranks) == 1 else new_subgroup(parent, ranks, name, timedelta(seconds=timeout_s))


class Hierarchical:
    """`Collective` in four phases, pipelined over chunks of 1 MiB.

    Nodes hold L ranks each. In its node a rank sends each L-th of a chunk to the one of the node's ranks that owns it;
    the owner adds the summands up, and does the same with its peers on the other N - 1 nodes, over an N-th of that
    each; finished sums then go back the same two ways. So 2 (N - 1) / N of the buffer leaves each node, which is the
    least possible, against 2 (W - 1) / W for a ring over all W ranks.

    Sums are in fp32, within a node in the order of its ranks and then in the order of nodes, whatever the chunks and
    owners: the same bits on every rank, in every run and however a buffer is cut. One level may be missing (None):
    what is left is a reduce-scatter and an all-gather by direct messages.

    Args:
        in_node, across: the groups that `level_groups` made.
        in_node_codec, across_codec: in what form summands and sums travel there; None is fp32.
        residual: `[elements of the whole buffer]`, fp32. It is added to what is summed, and takes up what the codecs
            lose in this call (error feedback): see `fusedcomm.comm.compress`.

    Errors: PeerError as `Swap`.

    Source: Cho et al. 2019, "BlueConnect: Decomposing all-reduce for deep learning on heterogeneous network hierarchy".
    """

    def __init__(
        self,
        in_node: ProcessGroup | None,
        across: ProcessGroup | None,
        *,
        in_node_codec: Codec | None = None,
        across_codec: Codec | None = None,
        residual: Tensor | None = None,
    ) -> None:
        levels = (("in the node", in_node, in_node_codec), ("across nodes", across, across_codec))
        self._levels = [_Level(name, group, codec) for name, group, codec in levels if group is not None]
        self._residual = residual
        self._stages = Stages(1 + 2 * len(self._levels), "fusedcomm-reduce")
        self._calls = 0

    def start(self, flat: Tensor, offset: int) -> Pending:
        """Begin to replace `flat` by its sum over all ranks of both groups."""
        residual = flat if self._residual is None else self._residual[offset : offset + flat.numel()]
        jobs = []
        length = CHUNK_BYTES // 4
        for chunk, error in zip(flat.split(length), residual.split(length)):
            self._calls += 1
            jobs.append(self._sum(chunk, None if self._residual is None else error, self._calls))
        return self._stages.start(jobs if flat.numel() else [], flat.device)

    def _sum(self, chunk: Tensor, error: Tensor | None, call: int) -> Job:
        if error is not None:
            chunk += error
            error.zero_()
        sums: list[_ChunkSum] = []
        for level in self._levels:
            sums.append(_ChunkSum(level, chunk, error, call))
            chunk, error = sums[-1].own, sums[-1].own_error
        for at_level in sums:
            at_level.send_summands()
            yield
            at_level.add_up()
        keeps_error = True
        for at_level in reversed(sums):
            at_level.send_sum(keeps_error)
            yield
            at_level.fill()
            # Every node encodes the same sum for its ranks, and misses the same: it counts once.
            keeps_error &= at_level.is_first
        for at_level in sums:
            at_level.finish()


class _Level:
    """A group, and in what form fp32 travels there."""

    def __init__(self, name: str, group: ProcessGroup, codec: Codec | None) -> None:
        self.name, self.channel, self.codec = name, channel_of(group), codec
        self.rank, self.world = group.rank(), group.size()
        # Each starts with the next one, so that not all send to the same.
        self.peers = [(self.rank + distance) % self.world for distance in range(1, self.world)]

    def take_wire(self, values: Tensor) -> Tensor:
        """A buffer for what stands for `values` [n] on the wire."""
        if self.codec is None:
            return _POOL.take((values.numel(),), values)
        return _POOL.take((self.codec.num_bytes(values.numel()),), values.new_empty(0, dtype=torch.uint8))


class _ChunkSum:
    """One chunk on one level: summands to their owners, and sums from there."""

    def __init__(self, level: _Level, chunk: Tensor, error: Tensor | None, call: int) -> None:
        self._level, self._codec = level, level.codec
        sizes = chunk_sizes(chunk.numel(), level.world)
        self._shards = chunk.split(sizes)
        self._errors = [None] * level.world if error is None else error.split(sizes)
        self.is_first = level.rank == 0
        self.own, self.own_error = self._shards[level.rank], self._errors[level.rank]
        # Peers with something to receive from this rank.
        self._owners = [peer for peer in level.peers if sizes[peer]]
        self._staged: list[Tensor] = []
        self._summands = {peer: self._take_wire(self.own) for peer in level.peers if self.own.numel()}
        # A sum comes after the owner has had this rank's summand, so that it may take its place.
        self._sums = {
            peer: self._shards[peer] if self._codec is None else self._take_wire(self._shards[peer])
            for peer in self._owners
        }
        op = f"all-reduce {level.name}"
        self._scatter = Swap(level.channel, op, call, "summand", self._summands)
        self._gather = Swap(level.channel, op, call, "sum", self._sums)

    def send_summands(self) -> None:
        self._scatter.send({peer: self._encoded(peer) for peer in self._owners})

    def add_up(self) -> None:
        """The sum of all ranks' summands, in the order of ranks, into `own`."""
        self._scatter.receive()
        if not self._summands:
            return
        terms = [
            self.own if rank == self._level.rank else self._decoded(self._summands[rank])
            for rank in range(self._level.world)
        ]
        add_in_order(terms, self.own, self._take)

    def send_sum(self, keeps_error: bool) -> None:
        if not self.own.numel():
            self._gather.send({})
            return
        wire = self._encoded(self._level.rank, keeps_error)
        if self._codec is not None:
            # All ranks must hold the same bits: the owner too has what the others will decode.
            self._codec.decode(wire, self.own)
        self._gather.send(dict.fromkeys(self._level.peers, wire))

    def fill(self) -> None:
        self._gather.receive()
        if self._codec is not None:
            for peer, wire in self._sums.items():
                self._codec.decode(wire, self._shards[peer])

    def finish(self) -> None:
        self._scatter.finish()
        self._gather.finish()
        for buffer in self._staged:
            _POOL.give(buffer)

    def _encoded(self, rank: int, keeps_error: bool = True) -> Tensor:
        """What stands for that rank's shard on the wire; the error goes to the residual, or is another's to keep."""
        shard = self._shards[rank]
        if self._codec is None:
            return shard
        wire = self._take_wire(shard)
        self._codec.encode(shard, wire, self._errors[rank] if keeps_error else None)
        return wire

    def _decoded(self, wire: Tensor) -> Tensor:
        if self._codec is None:
            return wire
        values = self._take(self.own)
        self._codec.decode(wire, values)
        return values

    def _take_wire(self, values: Tensor) -> Tensor:
        self._staged.append(self._level.take_wire(values))
        return self._staged[-1]

    def _take(self, like: Tensor) -> Tensor:
        self._staged.append(_POOL.take((like.numel(),), like))
        return self._staged[-1]
