"""How an op runs, and how work is shared: judged by a cost rule, measured on the group itself, agreed by all ranks."""

from fusedcomm.tune.speed import propose_sizes

__all__ = ["propose_sizes"]
