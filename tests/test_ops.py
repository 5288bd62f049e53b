"""all_gather_matmul and matmul_reduce_scatter on real gloo ranks, against the oracle in fusedcomm.reference."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_as_accurate, run_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedcomm import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, recording, reference
from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.tune.cost import chunked

# A run on real ranks takes milliseconds to seconds, whatever the input: no deadline, and nothing to call slow.
on_ranks = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


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
    defer: bool
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
def cases(draw) -> Case:
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
        method=draw(st.sampled_from(["serial", "chunked", "auto"])),
        save=draw(st.sampled_from(["shard", "gathered"])),
        defer=draw(st.booleans()),
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
    """Runs deferred weight gradients as a split backward would: later."""

    def __init__(self) -> None:
        self.items = []

    def __call__(self, weight, compute) -> None:
        self.items.append((weight, compute))

    def run(self) -> None:
        for weight, compute in self.items:
            assert weight.grad is None
            weight.grad = compute()


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
    wgrads = Wgrads()
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
        defer_wgrad=wgrads if case.defer else None,
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


@on_ranks
@given(case=cases())
def test_all_gather_matmul_matches_reference(case):
    results = run_ranks(case.world, run_gather, case)
    exact, plain = expect_gather(case, torch.float64), expect_gather(case, case.dtype)
    terms = expect_gather(case, torch.float64, absolute=True)
    moved = torch.cat([x.detach() for x in plain[0]], case.dim)
    for rank, (ys, gathered, grads) in enumerate(results):
        assert torch.equal(gathered, moved), "moved data must be bit-equal"
        for i, y in enumerate(ys):
            picked = (expectation[3][i][rank] for expectation in (exact, plain, terms))
            check(y, *picked, name=f"y[{i}] of rank {rank}")
        expected, rounded, sizes = (leaf_gradients(expectation, rank, case) for expectation in (exact, plain, terms))
        for i, grad in enumerate(grads):
            check(grad, expected[i], rounded[i], sizes[i], name=f"gradient {i} of rank {rank}")
        assert len(grads) == len(expected)


def check(actual: Tensor, exact: Tensor, plain: Tensor, terms: Tensor, *, name: str) -> None:
    assert_as_accurate(actual, exact, plain, terms=terms, name=name)


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
    wgrads = Wgrads()
    late(rank, case)
    y = matmul_reduce_scatter(
        x,
        w,
        group=dist.group.WORLD,
        bias=b if case.bias else None,
        dim=case.dim,
        sizes=case.sizes,
        defer_wgrad=wgrads if case.defer else None,
        method=case.method,
    )
    late(rank, case)
    y.backward(dys[rank])
    wgrads.run()
    return y.detach(), x.grad, w.grad, b.grad


@on_ranks
@given(case=cases())
def test_matmul_reduce_scatter_matches_reference(case):
    def expect(dtype, absolute=False):
        xs, ws, bias, dys = scatter_inputs(case, dtype, absolute)
        for tensor in [*xs, *ws, bias]:
            tensor.requires_grad_()
        ys = reference.matmul_reduce_scatter(xs, ws, sizes=case.sizes, bias=bias if case.bias else None, dim=case.dim)
        torch.autograd.backward(ys, dys)
        grads = [(x.grad, w.grad, dy.flatten(0, -2).sum(0)) for x, w, dy in zip(xs, ws, dys)]
        return [(y, *grad) for y, grad in zip(ys, grads)]

    results = run_ranks(case.world, run_scatter, case)
    expectations = [expect(torch.float64), expect(case.dtype), expect(torch.float64, absolute=True)]
    for rank, result in enumerate(results):
        for i, name in enumerate(["y", "dx", "dw", "db"] if case.bias else ["y", "dx", "dw"]):
            # The owner of the rows adds the bias, so a rank's db is that of its own rows.
            check(result[i], *(expectation[rank][i] for expectation in expectations), name=f"{name} of rank {rank}")


def activated_inputs(activation, dtype):
    """Per rank of three: x (two for swiglu) and w; the rows of dy."""
    draw = drawer(BIG, dtype, absolute=False)
    xs = [[draw(11, 2, 5) for _ in range(2 if activation == "swiglu" else 1)] for _ in range(3)]
    return xs, [draw(7, 5) for _ in range(3)], draw(11, 2, 7)


ACTIVATED_SIZES = (4, 0, 7)


def run_activated(rank, world, activation, dtype, method, defer):
    xs, ws, dy = activated_inputs(activation, dtype)
    x, w = [tensor.requires_grad_() for tensor in xs[rank]], ws[rank].requires_grad_()
    wgrads = Wgrads()
    y = matmul_reduce_scatter(
        x if activation == "swiglu" else x[0],
        w,
        group=dist.group.WORLD,
        input_activation=activation,
        sizes=ACTIVATED_SIZES,
        defer_wgrad=wgrads if defer else None,
        method=method,
    )
    y.backward(dy.split(ACTIVATED_SIZES)[rank])
    wgrads.run()
    return [y.detach(), w.grad, *(tensor.grad for tensor in x)]


@pytest.mark.parametrize("activation", ["gelu", "silu", "swiglu"])
@pytest.mark.parametrize(("method", "defer"), [("serial", False), ("chunked", False), ("chunked", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_input_activation_matches_reference(activation, method, defer, dtype):
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
    for rank, results in enumerate(run_ranks(3, run_activated, activation, dtype, method, defer)):
        for result, precise, usual in zip(results, exact[rank], plain[rank]):
            assert_as_accurate(result, precise, usual)


BIG = Case(4, (2,), 0, (70, 70, 70, 33), 48, 40, torch.bfloat16, True, 2, "chunked", "shard", False, True, 3)


@pytest.mark.parametrize("run", [run_gather, run_scatter])
def test_two_runs_are_bit_equal(run):
    first, second = run_ranks(4, run, BIG), run_ranks(4, run, BIG)
    assert _equal(first, second)


def test_serial_and_chunked_move_the_same_bits():
    serial = run_ranks(4, run_gather, Case(**{**BIG.__dict__, "method": "serial"}))
    chunked = run_ranks(4, run_gather, BIG)
    assert all(_equal(a[1], b[1]) for a, b in zip(serial, chunked))


def run_beside_a_slow_peer(rank, world, is_slow):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(384, 2, 64, generator=generator, requires_grad=True)
    w = torch.randn(96, 64, generator=generator, requires_grad=True)
    mm = torch.mm

    def slow_mm(*args, **kwargs):
        start_s = time.perf_counter()
        product = mm(*args, **kwargs)
        time.sleep(9 * (time.perf_counter() - start_s) + 0.002)
        return product

    if is_slow and rank == 1:
        torch.mm = slow_mm
    try:
        y = all_gather_matmul(x, w, group=dist.group.WORLD, method="chunked")
        z = matmul_reduce_scatter(y, w.t().contiguous(), group=dist.group.WORLD, method="chunked")
        s = matmul_all_reduce(z, w, group=dist.group.WORLD, method="chunked")
        s.sum().backward()
    finally:
        torch.mm = mm
    return y.detach(), z.detach(), s.detach(), x.grad, w.grad


def test_a_peer_that_is_ten_times_slower_changes_no_bit():
    assert _equal(run_ranks(3, run_beside_a_slow_peer, True), run_ranks(3, run_beside_a_slow_peer, False))


def _equal(a, b) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b))
    return a is None and b is None


def run_gathered_gradient(rank, world):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    w = torch.eye(5, requires_grad=True)
    y, full = all_gather_matmul(x, w, group=dist.group.WORLD, return_gathered=True)
    (y.sum() + (full * full).sum()).backward()
    return x.detach(), x.grad


def test_gradient_flows_through_the_returned_gather():
    for x, grad in run_ranks(3, run_gathered_gradient):
        torch.testing.assert_close(grad, 3 * (torch.ones_like(x) + 2 * x))


def run_activation(rank, world):
    torch.manual_seed(0)
    x, w, v = torch.randn(2, 6), torch.randn(4, 6), torch.randn(4, 6)
    group = dist.group.WORLD
    a, b = all_gather_matmul(x, [w, v], group=group)
    return [
        torch.equal(all_gather_matmul(x, [w, v], group=group, activation="swiglu"), torch.nn.functional.silu(a) * b),
        torch.equal(all_gather_matmul(x, w, group=group, activation="silu"), torch.nn.functional.silu(a)),
        torch.equal(
            all_gather_matmul(x, w, group=group, activation="gelu"),
            torch.nn.functional.gelu(a, approximate="tanh"),
        ),
    ]


def test_activations_are_those_of_torch():
    assert run_ranks(2, run_activation) == [[True] * 3] * 2


def run_overlap(rank, world):
    x = torch.randn(1024, 2, 64)
    w = torch.randn(64, 64)
    with recording() as record:
        all_gather_matmul(x, w, group=dist.group.WORLD, method="chunked")
        matmul_reduce_scatter(torch.randn(2048, 2, 64), w, group=dist.group.WORLD, method="chunked")
    computes = [e for e in record.events if e.kind == "compute" and e.name == "all_gather_matmul"]
    transfers = [e for e in record.events if e.kind == "transfer" and e.name.startswith("all_gather_matmul")]
    moved = sum(e.num_bytes for e in transfers)
    return len(computes), len(transfers), moved, x.nbytes, dict(record.paths), {e.thread for e in transfers}


def test_chunked_computes_by_chunk_and_sends_each_byte_once():
    for computes, transfers, moved, shard_bytes, paths, threads in run_ranks(2, run_overlap):
        num_chunks = chunked("", world=2, rows=4096).num_chunks
        assert num_chunks > 1
        assert computes == 1 + num_chunks, "own rows, then one GEMM per chunk of the peer"
        assert transfers == num_chunks
        assert moved == shard_bytes
        assert paths == {"all_gather_matmul:chunked": 1, "matmul_reduce_scatter:chunked": 1}
        assert threads == {"fusedcomm-sender"}


def run_many(rank, world):
    from fusedcomm.comm.pool import STAGING

    x = torch.randn(256, 2, 64, requires_grad=True)
    w, v = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    allocations = []
    for _ in range(5):
        y = all_gather_matmul(x, w, group=dist.group.WORLD, method="chunked")
        matmul_reduce_scatter(y, v, group=dist.group.WORLD, method="chunked").sum().backward()
        allocations.append(STAGING.num_allocations)
    return allocations


def test_staging_is_allocated_once():
    for allocations in run_ranks(2, run_many):
        assert len(set(allocations)) == 1, "the second call allocates staging again"


def run_opcheck(rank, world):
    torch.manual_seed(0)
    name, ops = dist.group.WORLD.group_name, torch.ops.fusedcomm
    x, w = torch.randn(5, 2, 6, requires_grad=True), [torch.randn(n, 6, requires_grad=True) for n in (3, 4)]
    b = [torch.randn(n, requires_grad=True) for n in (3, 4)]
    checks = [
        (ops.all_gather_matmul.default, (x, w, b, name, [5, 5], "shard", "chunked", False)),
        (ops.all_gather_matmul.default, (x, w, [], name, [5, 5], "gathered", "serial", True)),
        (ops.matmul_reduce_scatter.default, ([x], w[0], b[0], name, None, [3, 2], "chunked")),
        (ops.matmul_reduce_scatter.default, ([x], w[0], None, name, "gelu", [1, 4], "serial")),
        (ops.matmul_reduce_scatter.default, ([x, x.detach() + 1], w[0], None, name, "swiglu", [1, 4], "chunked")),
    ]
    return [torch.library.opcheck(op, args) for op, args in checks]


def test_opcheck_passes():
    for results in run_ranks(2, run_opcheck, timeout_s=120):
        for result in results:
            assert set(result.values()) == {"SUCCESS"}


def run_compiled(rank, world):
    torch.manual_seed(rank)
    group = dist.group.WORLD
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((3, 4, 6), (5, 6), (5, 6), (6, 5), (6,))]

    def block(x, w1, w2, w3, b):
        h = all_gather_matmul(x, [w1, w2], group=group, activation="silu", dim=1)
        return matmul_reduce_scatter(h, w3, group=group, bias=b, input_activation="swiglu", dim=1)

    outputs = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        y = function(*leaves)
        y.square().sum().backward()
        outputs.append([y.detach(), *(t.grad for t in leaves)])
        for t in leaves:
            t.grad = None
    return _equal(*outputs)


def test_compiles_without_graph_breaks_to_the_same_bits():
    assert run_ranks(2, run_compiled, timeout_s=120) == [True, True]
