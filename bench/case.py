"""What a benchmark of one op gives the harness: inputs, methods, the truth, and the bytes that must travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.bench.errors import BenchError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A chunked GEMM, and partial sums that are rounded before they are added, may miss the truth by so much more than
# plain torch.
_TIMES = 2.0

# What a method computes on this rank, by name.
Results = Mapping[str, Tensor]


@dataclass(frozen=True)
class Spec:
    """One benchmark: `m, n, k` is the GEMM that one rank runs, `x [m, k] @ w.T [k, n]`."""

    op: str
    world: int
    dtype_name: str
    m: int
    n: int
    k: int
    # Ranks of one node share its link.
    nodes: int
    # Pipeline, data and tensor parallelism of a whole step; None: the op's own choice.
    layout: tuple[int, int, int] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]


@dataclass(frozen=True)
class Method:
    """One way to run the op on this rank. `prepare` goes before every `run`, on all ranks, and is not timed.

    `finish` goes after it, and is not timed either: results are complete, and the links idle, when it returns.
    """

    run: Callable[[], Results]
    prepare: Callable[[], object] | None = None
    # What a reader must know about it.
    note: str = ""
    finish: Callable[[], object] | None = None
    # What it may lose by its definition, relative to the truth: where less travels than there is.
    loss: float = 0.0


class Case(Protocol):
    """The op with its inputs on one rank."""

    # The least that must leave a node in one run, whatever the method.
    min_bytes: int

    def open(self, name: str) -> Method:
        """A method of the op, `compute` (its GEMMs without a peer) or `transfer` (what `serial` moves, alone).

        All ranks open the same ones in the same order.
        """
        ...

    def reference(self, dtype: torch.dtype) -> Results:
        """What `run` must return on this rank, computed by plain torch on one process in `dtype`."""
        ...


class Op(Protocol):
    """A module `bench_<op>`."""

    # Timed unless the user chooses, and those that he may choose besides.
    METHODS: tuple[str, ...]
    EXTRA_METHODS: tuple[str, ...]
    # The one of them that `vs_torch` compares with.
    TORCH_METHOD: str

    def default_shape(self, world: int) -> tuple[int, int, int]: ...

    def check_spec(self, spec: Spec) -> None:
        """BenchError where the shape does not fit the op."""
        ...

    def make_case(self, spec: Spec, rank: int) -> Case: ...


def normal(shape: Sequence[int], *key: int, scale: float = 1.0, device: torch.device | None = None) -> Tensor:
    """Normal numbers in fp32 that depend on `key` alone: every rank can draw what any other holds."""
    seed = 0
    for part in key:
        seed = seed * 1_000_003 + part + 1
    generator = torch.Generator(device or "cpu").manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=device) * scale


def world_group() -> ProcessGroup:
    """All ranks of the benchmark."""
    group = dist.group.WORLD
    assert group is not None
    return group


def check_divides(spec: Spec, what: str, value: int, by: int) -> None:
    if value % by:
        raise BenchError(
            f"bench {spec.op}: --shape {spec.m},{spec.n},{spec.k}: {what}={value} does not divide by {by}; "
            "choose a multiple"
        )


def complaints(results: Results, exact: Results, plain: Results, loss: float = 0.0) -> list[str]:
    """What misses the fp64 truth by more than twice what plain torch in the working dtype does, one ulp and `loss`."""
    found: list[str] = []
    if missing := sorted(exact.keys() - results.keys()):
        found.append(f"no {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""))
    for name in exact.keys() & results.keys():
        if results[name].shape != exact[name].shape:
            found.append(f"{name} has shape {list(results[name].shape)}, not {list(exact[name].shape)}")
            continue
        ulp = torch.finfo(plain[name].dtype).eps
        error, limit = _error(results[name], exact[name]), _TIMES * _error(plain[name], exact[name]) + ulp + loss
        # Also when the error is nan.
        if not error <= limit:
            found.append(f"{name} misses fp64 by {error:.2g}, more than {limit:.2g}")
    return sorted(found)


def _error(actual: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    truth = exact.double()
    return ((actual.double() - truth).norm() / truth.norm()).item()
