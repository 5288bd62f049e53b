"""What a user asks of `fusedcomm bench`, and whether it makes sense."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from fusedcomm.bench.case import DTYPES, Op, Spec
from fusedcomm.bench.errors import BenchError
from fusedcomm.bench.ranks import check_world
from fusedcomm.bench.shaped_network import check_rate

OPS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_reduce",
    "mlp",
    "attention",
    "gradients",
    "train_step",
)
# The link's rate over the one at which the wire takes as long as the GEMM.
_DERIVED_LINKS = {"balanced": 1.0, "half": 0.5, "double": 2.0}


@dataclass(frozen=True)
class Request:
    """The command's options as the user wrote them; `shape` and `methods` may be left to the op."""

    op: str
    world: int
    link: str
    dtype_name: str
    shape: str | None = None
    methods: str | None = None
    rounds: int = 9
    json_path: Path | None = None
    plot_path: Path | None = None
    # None: every rank is a node of its own.
    nodes: int | None = None
    layout: str | None = None


@dataclass(frozen=True)
class Link:
    """A rate, or a factor on the rate at which the wire takes as long as the GEMM; neither for loopback."""

    gbps: float | None
    factor: float | None

    @property
    def is_shaped(self) -> bool:
        return self.gbps is not None or self.factor is not None


@dataclass(frozen=True)
class Plan:
    """What to time."""

    spec: Spec
    methods: tuple[str, ...]
    link: Link
    rounds: int


def plan_of(request: Request) -> Plan:
    """BenchError where the request makes no sense, or asks too much of this machine; starts nothing."""
    if request.op not in OPS:
        raise BenchError(f"bench: OP {request.op!r} is unknown; choose one of {', '.join(OPS)}")
    if request.dtype_name not in DTYPES:
        raise BenchError(f"--dtype {request.dtype_name!r} is unknown; choose one of {', '.join(DTYPES)}")
    if request.rounds < 3:
        raise BenchError(f"--rounds {request.rounds}: quartiles need at least 3")
    check_world(request.world)
    nodes = request.world if request.nodes is None else request.nodes
    if nodes < 2 or request.world % nodes:
        raise BenchError(
            f"--nodes {nodes}: must be at least 2 and divide --world {request.world}, so that all hold equally many"
        )
    op = op_module(request.op)
    m, n, k = op.default_shape(request.world) if request.shape is None else _parse_shape(request.shape)
    methods = op.METHODS if request.methods is None else tuple(request.methods.split(","))
    for name in methods:
        if name not in (*op.METHODS, *op.EXTRA_METHODS):
            known = ", ".join((*op.METHODS, *op.EXTRA_METHODS))
            raise BenchError(f"--methods {name!r} is unknown for {request.op}; choose from {known}")
    layout = None if request.layout is None else _parse_layout(request)
    spec = Spec(request.op, request.world, request.dtype_name, m, n, k, nodes, layout)
    op.check_spec(spec)
    return Plan(spec, tuple(dict.fromkeys(methods)), _parse_link(request.link), request.rounds)


def op_module(name: str) -> Op:
    """`bench_<op>`."""
    return cast(Op, importlib.import_module(f"fusedcomm.bench.bench_{name}"))


def _parse_shape(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise BenchError(f"--shape {text!r}: give three numbers above 0, M,N,K, such as 4096,4096,1024")
    m, n, k = map(int, parts)
    return m, n, k


def _parse_layout(request: Request) -> tuple[int, int, int]:
    if request.op != "train_step":
        raise BenchError(
            f"--layout goes with train_step, which has pipeline and data parallelism, not with {request.op}"
        )
    parts = (request.layout or "").split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise BenchError(f"--layout {request.layout!r}: give pipeline x data x tensor, such as 2x2x1")
    pp, dp, tp = map(int, parts)
    if pp * dp * tp != request.world:
        raise BenchError(f"--layout {request.layout!r}: makes {pp * dp * tp} ranks, --world is {request.world}")
    return pp, dp, tp


def _parse_link(link: str) -> Link:
    if link in _DERIVED_LINKS:
        return Link(None, _DERIVED_LINKS[link])
    if link == "loopback":
        return Link(None, None)
    try:
        gbps = float(link)
    except ValueError:
        known = ", ".join([*_DERIVED_LINKS, "loopback"])
        raise BenchError(f"--link {link!r} is unknown; give a rate in Gbit/s, or one of {known}") from None
    check_rate(gbps)
    return Link(gbps, None)
