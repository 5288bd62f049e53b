"""What a benchmark's caller did wrong, or what this machine lacks for it."""

from __future__ import annotations


class BenchError(Exception):
    """One line for the user: what is wrong, and the remedy."""
