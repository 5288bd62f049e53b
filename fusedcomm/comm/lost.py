"""Names for ranks that are gone: torch's collectives over gloo know none, and a time-out may name another one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fusedcomm.comm.channel import channel_of
from fusedcomm.errors import PeerError

# One process's connections are all closed at once, but their ends are not noticed at the same moment.
_NOTICED_S = 1.0


@contextmanager
def naming_lost_ranks(op: str) -> Iterator[None]:
    """Within the block, what gloo raises where a rank of the default group is gone is a PeerError that names it.

    So is a time-out's PeerError: who did not deliver may have waited for the one that is gone. It asks each of the
    group's connections, and sends nothing. Other errors stay as they are; so does that of a collective that waited for
    a rank that is late, since its time-out closes all connections.
    """
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error) or (isinstance(error, PeerError) and "Timed out" not in str(error)):
            raise
        lost = _lost_ranks()
        if not lost:
            raise
        first, *others = lost
        also = f" (and so are {', '.join(map(str, others))})" if others else ""
        raise PeerError(op, first, -1, f"rank {first} of the group is gone{also}: {error}") from error


def _lost_ranks() -> list[int]:
    """Ranks of the default group whose connection has failed otherwise than by this rank's own time-out."""
    group = dist.group.WORLD
    assert group is not None, "a collective of it, or of a part of it, has failed"
    channel = channel_of(group)
    # On a connection that has failed no receive can be posted; on others nothing ever arrives for it.
    tag = 2**31 - 1
    unasked = {peer for peer in range(channel.world) if peer != channel.rank}
    lost: list[int] = []
    deadline_s = time.monotonic() + _NOTICED_S
    while not lost and time.monotonic() < deadline_s:
        for peer in sorted(unasked):
            buffer = torch.empty(1, dtype=torch.uint8)
            try:
                channel.keep(group.recv([buffer], peer, tag), buffer)
            except RuntimeError as error:
                unasked.discard(peer)
                if "timeout" not in str(error):
                    lost.append(peer)
        time.sleep(0.01)
    return lost
