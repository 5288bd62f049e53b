"""Weight gradients that are computed where they are kept: what for, when, and without a copy."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_as_accurate, run_ranks
from test_overlap_forward import TINY, changed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedcomm import all_gather_matmul, matmul_reduce_scatter, recording
from fusedcomm.comm.collective import AllReduce, Pending
from fusedcomm.ops.activation import Activation
from fusedcomm.ops.wgrad import DeferWgrad, WeightGradient, local_linear
from fusedcomm.parallel import GradientBuckets, main_grad_of
from fusedcomm.train.config import parse_config
from fusedcomm.train.data import open_data
from fusedcomm.train.loop import mesh_of
from fusedcomm.train.trainer import Trainer

ROWS, LEAD, N, K = 5, 3, 7, 4
FUNCTIONS = {
    None: lambda x: x,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu": lambda a, b: F.silu(a) * b,
}


def operands(activation: Activation | None, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    shapes = [(ROWS, LEAD, N)] + [(ROWS, LEAD, K)] * (2 if activation == "swiglu" else 1)
    dy, *xs = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return dy, xs


def expected(activation: Activation | None, dtype: torch.dtype, compute_in: torch.dtype):
    dy, xs = operands(activation, dtype)
    x = FUNCTIONS[activation](*(x.to(compute_in) for x in xs))
    return torch.einsum("rln,rlk->nk", dy.to(compute_in), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", list(FUNCTIONS))
def test_weight_gradient_matches_reference(activation, dtype):
    gradient = WeightGradient(*operands(activation, dtype), activation)
    exact, plain = expected(activation, dtype, torch.float64), expected(activation, dtype, dtype)
    grad = gradient.compute()
    assert grad.dtype == dtype
    assert_as_accurate(grad, exact, plain)
    # What the buffer held before must not matter.
    buffer = torch.full((N, K), float("nan"))
    gradient.add_to(buffer, overwrite=True)
    assert torch.equal(buffer, grad.float())
    gradient.add_to(buffer)
    assert_as_accurate(buffer, 2 * exact, 2 * plain.float())


@pytest.mark.parametrize("overwrite", [False, True])
def test_weight_gradient_of_no_rows_is_zero(overwrite):
    gradient = WeightGradient(torch.zeros(0, LEAD, N), [torch.zeros(0, LEAD, K)])
    buffer = torch.ones(N, K)
    gradient.add_to(buffer, overwrite=overwrite)
    assert torch.equal(buffer, torch.zeros(N, K) if overwrite else torch.ones(N, K))
    assert torch.equal(gradient.compute(), torch.zeros(N, K))


class CountProducts(TorchDispatchMode):
    """Counts the matrix products that run while it is on, those that add to what is there by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.counts["in place"] += func == aten.addmm_.default
        self.counts["new"] += func in (aten.mm.default, aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_local_linear_defers_before_it_computes_dx():
    x, weight = torch.randn(ROWS, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
    handed = []
    y = local_linear(x, weight, None, lambda *pair: handed.append((*pair, products.counts.total())))
    with CountProducts() as products:
        y.sum().backward()
    ((param, gradient, count_before),) = handed
    assert param is weight
    assert weight.grad is None
    assert (count_before, products.counts.total()) == (0, 1)
    assert torch.equal(gradient.compute(), torch.ones(ROWS, N).t() @ x)
    assert torch.equal(x.grad, torch.ones(ROWS, N) @ weight)


class Net(nn.Module):
    """`middle` is used twice; biases come by autograd."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 10)
        self.middle = nn.Linear(10, 10)
        self.last = nn.Linear(10, 4, bias=False)
        self.to(dtype)
        self.defer_wgrad: DeferWgrad | None = None

    def forward(self, x: Tensor) -> Tensor:
        for name in ("first", "middle", "middle", "last"):
            layer = self.get_submodule(name)
            x = torch.tanh(local_linear(x, layer.weight, layer.bias, self.defer_wgrad))
        return x


PARTS = 2
NET_ROWS = 8


def net_batch(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(NET_ROWS, 6, generator=torch.Generator().manual_seed(step)).to(dtype)


def net_backward(net: Net, x: Tensor, parts: int) -> None:
    for piece in x.chunk(parts):
        net(piece).square().sum().backward()


def train_net(
    rank: int, world: int, dtype: torch.dtype, parts: int, defer: bool, sharded: bool
) -> list[dict[str, Tensor]]:
    """By step, the gradients, or with `sharded` this rank's rows of them."""
    net = Net(dtype)
    buckets = GradientBuckets(net.named_parameters(), dp_group=dist.group.WORLD, bucket_mb=1e-5, sharded=sharded)
    net.defer_wgrad = buckets.accumulate if defer else None
    grads = []
    for step in range(3):
        net_backward(net, net_batch(step, dtype).chunk(world)[rank], parts)
        buckets.finish(set_grad=False)
        grads.append({name: main_grad_of(param).clone() for name, param in net.named_parameters()})
        buckets.zero()
    return grads


def net_gradients(step: int, dtype: torch.dtype, compute_in: torch.dtype) -> dict[str, Tensor]:
    net = Net(dtype).to(compute_in)
    net_backward(net, net_batch(step, dtype).to(compute_in), 1)
    return {name: param.grad for name, param in net.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, PARTS])
def test_gradients_computed_in_their_buckets_match_one_process(dtype, parts):
    ranks = run_ranks(2, train_net, dtype, parts, True, False)
    for step in range(3):
        exact, plain = net_gradients(step, dtype, torch.float64), net_gradients(step, dtype, dtype)
        for name, reference in exact.items():
            first, second = (rank[step][name] for rank in ranks)
            assert torch.equal(first, second)
            assert_as_accurate(first.to(dtype), reference, plain[name], name=name)


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_computed_in_their_buckets_are_those_of_autograd_to_the_bit(sharded):
    ours = run_ranks(2, train_net, torch.float32, 1, True, sharded)
    autograd = run_ranks(2, train_net, torch.float32, 1, False, sharded)
    for own, other in zip(ours, autograd):
        for step in range(3):
            for name, grad in own[step].items():
                if name == "middle.weight":
                    # A second product is added to the first while it is summed up, or after that.
                    torch.testing.assert_close(grad, other[step][name])
                else:
                    assert torch.equal(grad, other[step][name]), name


class NoteProducts(TorchDispatchMode):
    """Notes each matrix product: "dw" if it has the shape of a weight, else "dx"."""

    def __init__(self, events: list[str], weights: list[Tensor]) -> None:
        super().__init__()
        self.events, self.shapes = events, {weight.shape for weight in weights}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.events.append("dw" if result.shape in self.shapes else "dx")
        return result


class NoteSums(AllReduce):
    def __init__(self, group: dist.ProcessGroup, events: list[str]) -> None:
        super().__init__(group)
        self.events = events

    def start(self, flat: Tensor, offset: int) -> Pending:
        self.events.append("sum")
        return super().start(flat, offset)


def events_of_a_step(rank: int, world: int, defer: bool) -> list[str]:
    """What a backward over three layers does, in its order."""
    events: list[str] = []
    weights = [nn.Parameter(torch.randn(shape)) for shape in [(10, 6), (12, 10), (4, 12)]]
    buckets = GradientBuckets(
        [(str(index), weight) for index, weight in enumerate(weights)],
        dp_group=dist.group.WORLD,
        # One gradient each, in one piece.
        bucket_mb=5e-4,
        window_mb=1,
        collective=lambda group, layout: NoteSums(group, events),
    )
    for _ in range(3):
        buckets.zero()
        x = torch.randn(5, 6)
        for weight in weights:
            x = local_linear(x, weight, None, buckets.accumulate if defer else None)
            # Long enough that each sum leaves by itself.
            x.register_hook(lambda _: time.sleep(2e-3))
        events.clear()
        with NoteProducts(events, weights):
            x.sum().backward()
        buckets.finish()
    return events


def test_sums_leave_before_the_gradient_of_the_layers_input_is_computed():
    for events in run_ranks(2, events_of_a_step, True):
        assert events == ["dw", "sum", "dx", "dw", "sum", "dx", "dw", "sum"]
    for events in run_ranks(2, events_of_a_step, False):
        # Autograd has both products done before anybody hears of one.
        assert events.index("sum") == 2


class CountGradients(TorchDispatchMode):
    """Counts the tensors of `numel` elements that are made while it is on, in none of the memory `known`."""

    def __init__(self, numel: int, known: list[Tensor]) -> None:
        super().__init__()
        self.numel, self.count = numel, 0
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel() == self.numel:
                self.count += tensor.untyped_storage().data_ptr() not in self.known
        return result


@pytest.mark.parametrize("defer", [False, True])
def test_no_gradient_is_allocated_in_fp32(defer):
    weight = nn.Parameter(torch.randn(7, 11))
    buckets = GradientBuckets([("weight", weight)], dp_group=None)
    x = torch.randn(5, 11, requires_grad=True)
    for _ in range(2):
        buckets.zero()
        with CountGradients(weight.numel(), [weight, buckets.flat]) as made:
            for _ in range(PARTS):
                local_linear(x, weight, None, buckets.accumulate if defer else None).sum().backward()
            buckets.finish()
        assert weight.grad.data_ptr() == buckets.flat.data_ptr()
        assert made.count == 0 if defer else made.count >= PARTS


def tensor_parallel_step(rank: int, world: int, method: str, defer: bool) -> tuple[int, bool]:
    """How many gradients were made, and whether the column-parallel weight's came before the wait for dx."""
    group = dist.group.WORLD
    torch.manual_seed(rank)
    x = torch.randn(9, 5, requires_grad=True)
    weights = {"up": nn.Parameter(torch.randn(7, 5)), "down": nn.Parameter(torch.randn(5, 7))}
    buckets = GradientBuckets(weights.items(), dp_group=None)
    options = {"group": group, "defer_wgrad": buckets.accumulate if defer else None, "method": method}
    y = matmul_reduce_scatter(all_gather_matmul(x, weights["up"], **options), weights["down"], **options)
    with CountGradients(35, [*weights.values(), buckets.flat]) as made, recording() as record:
        y.sum().backward()
        buckets.finish()
    names = [event.name for event in sorted(record.events, key=lambda event: event.start_s)]
    wait = next(i for i, name in enumerate(names) if name.startswith("all_gather_matmul backward from"))
    return made.count, "dw" in names[:wait]


@pytest.mark.parametrize("defer", [False, True])
def test_tensor_parallel_ops_compute_weight_gradients_where_they_are_kept(defer):
    for count, hides_dx in run_ranks(2, tensor_parallel_step, "chunked", defer):
        assert count == 0 if defer else count >= 2
        assert hides_dx


def products_of_a_step(rank: int, world: int, raw: dict) -> Counter[str]:
    config = parse_config(raw)
    trainer = Trainer(config, mesh_of(config, torch.device("cpu")))
    batch = open_data(config).train.batch(0, trainer.mesh.dp_rank)
    with CountProducts() as products:
        trainer.gradients(0, batch.pieces(config.train.accumulation))
    return products.counts


def test_the_trainer_computes_weight_gradients_in_their_buckets():
    raw = changed("train.accumulation", 2)
    # q, k, v, out, gate, up, down of each layer, and the head.
    num_weights = 7 * TINY["model"]["layers"] + 1
    for counts in run_ranks(2, products_of_a_step, raw):
        assert counts["in place"] == 2 * num_weights
        # Forward and dx.
        assert counts["new"] == 2 * 2 * num_weights
