"""What a peer did wrong. What the caller did wrong is a `ValueError` where it was seen."""

from __future__ import annotations


class PeerError(RuntimeError):
    """A peer vanished, was late, or called something else.

    Attributes:
        op: the operation that was waiting.
        rank: the peer's rank in the operation's group.
        chunk: number of the transfer that was awaited; -1 before the first.
    """

    def __init__(self, op: str, rank: int, chunk: int, detail: str) -> None:
        super().__init__(f"{op}: {detail}")
        self.op = op
        self.rank = rank
        self.chunk = chunk
        self._detail = detail

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, int, int, str]]:
        # An exception is pickled by its message alone, which is not how this one is made.
        return PeerError, (self.op, self.rank, self.chunk, self._detail)
