"""Calls of the two ops on real ranks, drawn at random, and what the oracle says of them; by whatever method."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_as_accurate
from hypothesis import strategies as st
from torch import Tensor

from fusedcomm import all_gather_matmul, matmul_reduce_scatter, reference
from fusedcomm.comm.pool import STAGING
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.ops.wgrad import WeightGradient

# Who computes weight gradients: autograd, or who is handed them, then or later.
Wgrad = Literal["autograd", "at_once", "later"]
WGRADS: tuple[Wgrad, ...] = ("autograd", "at_once", "later")


@dataclass(frozen=True)
class Case:
    world: int
    lead: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]
    k: int
    n: int
    dtype: torch.dtype
    bias: bool
    num_weights: int
    method: str
    save: str
    wgrad: Wgrad
    contiguous: bool
    seed: int

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    def shape(self, rows: int, features: int) -> list[int]:
        shape = [*self.lead, features]
        shape.insert(self.dim, rows)
        return shape


@st.composite
def cases(draw, methods: tuple[str, ...]) -> Case:
    world = draw(st.integers(1, 4))
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    rows = draw(st.integers(0, 13))
    explicit = draw(st.lists(st.integers(0, 6), min_size=world, max_size=world))
    return Case(
        world=world,
        lead=lead,
        dim=draw(st.integers(0, len(lead))),
        sizes=draw(st.sampled_from([chunk_sizes(rows, world), tuple(explicit)])),
        k=draw(st.integers(1, 9)),
        n=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        bias=draw(st.booleans()),
        num_weights=draw(st.integers(1, 3)),
        method=draw(st.sampled_from(methods)),
        save=draw(st.sampled_from(["shard", "gathered"])),
        wgrad=draw(st.sampled_from(WGRADS)),
        contiguous=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def leaf(tensor: Tensor, case: Case) -> Tensor:
    """A leaf with the tensor's values; non-contiguous if the case says so."""
    if not case.contiguous and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def late(rank: int, case: Case) -> None:
    """One rank, chosen by the seed, comes late: it must change nothing."""
    if case.seed % (2 * case.world) == rank:
        time.sleep(random.Random(case.seed).uniform(0.0, 0.05))


class Wgrads:
    """Computes weight gradients as a split backward would, later, or at once in fp32 as gradient buckets do."""

    def __init__(self, when: Wgrad, *, overwrite: bool = True) -> None:
        self.defer = None if when == "autograd" else self._take
        self._when, self._overwrite = when, overwrite
        self._kept: list[tuple[Tensor, WeightGradient]] = []

    def _take(self, weight: Tensor, gradient: WeightGradient) -> None:
        assert weight.grad is None
        if self._when == "later":
            self._kept.append((weight, gradient.kept()))
            return
        out = torch.full(weight.shape, torch.nan if self._overwrite else 0.0, dtype=torch.float32)
        gradient.add_to(out, overwrite=self._overwrite)
        weight.grad = out.to(weight.dtype)

    def run(self) -> None:
        """Backward is over."""
        if self._kept:
            poison_staging()
        for weight, gradient in self._kept:
            weight.grad = gradient.compute()


def poison_staging() -> None:
    """What no call uses now is NaN, in every dtype."""
    for buffers in STAGING._free.values():
        for buffer in buffers:
            buffer.fill_(0xFF)


def drawer(case: Case, dtype: torch.dtype, absolute: bool):
    """Random tensors, rounded to the case's dtype and held in `dtype`; their absolute values if asked for."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator).to(case.dtype).to(dtype)
        return values.abs() if absolute else values

    return draw


def gather_inputs(case: Case, dtype: torch.dtype, absolute: bool = False):
    draw = drawer(case, dtype, absolute)

    x = [draw(*case.shape(size, case.k)) for size in case.sizes]
    w = [[draw(case.n + i, case.k) for _ in range(case.world)] for i in range(case.num_weights)]
    b = [[draw(case.n + i) for _ in range(case.world)] for i in range(case.num_weights)]
    dy = [[draw(*case.shape(case.rows, case.n + i)) for _ in range(case.world)] for i in range(case.num_weights)]
    return x, w, b, dy


def run_gather(rank: int, world: int, case: Case):
    xs, ws, bs, dys = gather_inputs(case, case.dtype)
    x, w, b = leaf(xs[rank], case), [leaf(v[rank], case) for v in ws], [leaf(v[rank], case) for v in bs]
    wgrads = Wgrads(case.wgrad, overwrite=case.seed % 2 == 0)
    late(rank, case)
    ys, gathered = all_gather_matmul(
        x,
        w,
        group=dist.group.WORLD,
        bias=b if case.bias else None,
        dim=case.dim,
        sizes=case.sizes,
        save=case.save,
        return_gathered=True,
        defer_wgrad=wgrads.defer,
        method=case.method,
    )
    late(rank, case)
    torch.autograd.backward(ys, [dy[rank] for dy in dys])
    wgrads.run()
    return (
        [y.detach() for y in ys],
        gathered.detach(),
        [x.grad, *(v.grad for v in w), *((v.grad for v in b) if case.bias else ())],
    )


def expect_gather(case: Case, dtype: torch.dtype, absolute: bool = False):
    xs, ws, bs, dys = gather_inputs(case, dtype, absolute)
    for tensor in [*xs, *(t for v in ws for t in v), *(t for v in bs for t in v)]:
        tensor.requires_grad_()
    ys = [reference.all_gather_matmul(xs, w, bias=b if case.bias else None, dim=case.dim) for w, b in zip(ws, bs)]
    torch.autograd.backward([y for v in ys for y in v], [dy for v in dys for dy in v])
    return xs, ws, bs, ys


def check(actual: Tensor, exact: Tensor, plain: Tensor, terms: Tensor, *, times: float, name: str) -> None:
    assert_as_accurate(actual, exact, plain, times=times, terms=terms, name=name)


def leaf_gradients(expectation, rank: int, case: Case) -> list[Tensor]:
    """The oracle's gradients of one rank's leaves, in the order in which `run_gather` returns them."""
    xs, ws, bs, _ = expectation
    return [xs[rank].grad, *(w[rank].grad for w in ws), *((b[rank].grad for b in bs) if case.bias else ())]


def scatter_inputs(case: Case, dtype: torch.dtype, absolute: bool = False):
    draw = drawer(case, dtype, absolute)
    # Ranks may hold different shares of K.
    ks = [case.k + rank % 2 for rank in range(case.world)]
    x = [draw(*case.shape(case.rows, k)) for k in ks]
    w = [draw(case.n, k) for k in ks]
    return x, w, draw(case.n), [draw(*case.shape(size, case.n)) for size in case.sizes]


def run_scatter(rank: int, world: int, case: Case):
    xs, ws, bias, dys = scatter_inputs(case, case.dtype)
    x, w, b = leaf(xs[rank], case), leaf(ws[rank], case), leaf(bias, case)
    wgrads = Wgrads(case.wgrad, overwrite=case.seed % 2 == 0)
    late(rank, case)
    y = matmul_reduce_scatter(
        x,
        w,
        group=dist.group.WORLD,
        bias=b if case.bias else None,
        dim=case.dim,
        sizes=case.sizes,
        defer_wgrad=wgrads.defer,
        method=case.method,
    )
    late(rank, case)
    y.backward(dys[rank])
    wgrads.run()
    return y.detach(), x.grad, w.grad, b.grad


def expect_scatter(case: Case, dtype: torch.dtype, absolute: bool = False):
    xs, ws, bias, dys = scatter_inputs(case, dtype, absolute)
    for tensor in [*xs, *ws, bias]:
        tensor.requires_grad_()
    ys = reference.matmul_reduce_scatter(xs, ws, sizes=case.sizes, bias=bias if case.bias else None, dim=case.dim)
    torch.autograd.backward(ys, dys)
    grads = [(x.grad, w.grad, dy.flatten(0, -2).sum(0)) for x, w, dy in zip(xs, ws, dys)]
    return [(y, *grad) for y, grad in zip(ys, grads)]


def check_scatter(case: Case, results: list[Any], times: float = 2.0) -> None:
    """Every rank's results of `run_scatter` are those of the oracle."""
    exact, plain = expect_scatter(case, torch.float64), expect_scatter(case, case.dtype)
    terms = expect_scatter(case, torch.float64, absolute=True)
    for rank, result in enumerate(results):
        for i, name in enumerate(["y", "dx", "dw", "db"] if case.bias else ["y", "dx", "dw"]):
            # The owner of the rows adds the bias, so a rank's db is that of its own rows.
            picked = (expectation[rank][i] for expectation in (exact, plain, terms))
            check(result[i], *picked, times=times, name=f"{name} of rank {rank}")


def check_gather(case: Case, results: list[Any], times: float = 2.0) -> None:
    """Every rank's results of `run_gather` are those of the oracle."""
    exact, plain = expect_gather(case, torch.float64), expect_gather(case, case.dtype)
    terms = expect_gather(case, torch.float64, absolute=True)
    moved = torch.cat([x.detach() for x in plain[0]], case.dim)
    for rank, (ys, gathered, grads) in enumerate(results):
        assert torch.equal(gathered, moved), "moved data must be bit-equal"
        for i, y in enumerate(ys):
            picked = (expectation[3][i][rank] for expectation in (exact, plain, terms))
            check(y, *picked, times=times, name=f"y[{i}] of rank {rank}")
        expected, rounded, sizes = (leaf_gradients(expectation, rank, case) for expectation in (exact, plain, terms))
        for i, grad in enumerate(grads):
            check(grad, expected[i], rounded[i], sizes[i], times=times, name=f"gradient {i} of rank {rank}")
        assert len(grads) == len(expected)


def equal(a, b) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return a is None and b is None


BIG = Case(4, (2,), 0, (70, 70, 70, 33), 48, 40, torch.bfloat16, True, 2, "chunked", "shard", "autograd", True, 3)


def activated_inputs(activation, dtype):
    """Per rank of three: x (two for swiglu) and w; the rows of dy."""
    draw = drawer(BIG, dtype, absolute=False)
    xs = [[draw(11, 2, 5) for _ in range(2 if activation == "swiglu" else 1)] for _ in range(3)]
    return xs, [draw(7, 5) for _ in range(3)], draw(11, 2, 7)


ACTIVATED_SIZES = (4, 0, 7)


def run_activated(rank, world, activation, dtype, method, wgrad):
    xs, ws, dy = activated_inputs(activation, dtype)
    x, w = [tensor.requires_grad_() for tensor in xs[rank]], ws[rank].requires_grad_()
    wgrads = Wgrads(wgrad)
    y = matmul_reduce_scatter(
        x if activation == "swiglu" else x[0],
        w,
        group=dist.group.WORLD,
        input_activation=activation,
        sizes=ACTIVATED_SIZES,
        defer_wgrad=wgrads.defer,
        method=method,
    )
    y.backward(dy.split(ACTIVATED_SIZES)[rank])
    wgrads.run()
    return [y.detach(), w.grad, *(tensor.grad for tensor in x)]


def check_activated(activation: str, dtype: torch.dtype, results: list[Any], times: float = 2.0) -> None:
    """Every rank's results of `run_activated` are those of the oracle."""

    def expect(dtype):
        xs, ws, dy = activated_inputs(activation, dtype)
        leaves = [tensor.requires_grad_() for tensor in [*ws, *(x for pair in xs for x in pair)]]
        functions = {
            "gelu": lambda x: F.gelu(x, approximate="tanh"),
            "silu": F.silu,
            "swiglu": lambda a, b: F.silu(a) * b,
        }
        inner = [functions[activation](*x) for x in xs]
        ys = reference.matmul_reduce_scatter(inner, ws, sizes=ACTIVATED_SIZES)
        torch.autograd.backward(ys, dy.split(ACTIVATED_SIZES))
        assert all(leaf.grad is not None for leaf in leaves)
        return [[y.detach(), w.grad, *(tensor.grad for tensor in x)] for y, w, x in zip(ys, ws, xs)]

    exact, plain = expect(torch.float64), expect(dtype)
    for rank, actual in enumerate(results):
        for result, precise, usual in zip(actual, exact[rank], plain[rank]):
            assert_as_accurate(result, precise, usual, times=times)
