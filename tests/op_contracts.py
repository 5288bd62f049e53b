"""What torch asks of the two ops, by whatever method: autograd through all outputs, `opcheck`, and `torch.compile`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers import run_ranks
from op_cases import equal

from fusedcomm import all_gather_matmul, matmul_reduce_scatter


def _gathered_gradient(rank, world, method):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    w = [torch.eye(5, requires_grad=True), 2 * torch.eye(5)]
    (y, twice), full = all_gather_matmul(x, w, group=dist.group.WORLD, return_gathered=True, method=method)
    (y.sum() + twice.sum() + (full * full).sum()).backward()
    return x.detach(), x.grad


def check_gathered_gradient(method: str) -> None:
    """Gradients flow through the returned gather as well."""
    for x, grad in run_ranks(3, _gathered_gradient, method):
        torch.testing.assert_close(grad, 3 * (3 * torch.ones_like(x) + 2 * x))


def _opcheck(rank, world, method):
    torch.manual_seed(0)
    name, ops = dist.group.WORLD.group_name, torch.ops.fusedcomm
    x, w = torch.randn(5, 2, 6, requires_grad=True), [torch.randn(n, 6, requires_grad=True) for n in (3, 4)]
    b = [torch.randn(n, requires_grad=True) for n in (3, 4)]
    pair = [torch.randn(3, 6), torch.randn(3, 6)]
    checks = [
        (ops.all_gather_matmul.default, (x, w, b, name, [5, 5], "shard", method, False, None)),
        (ops.all_gather_matmul.default, (x, w, [], name, [5, 5], "gathered", method, True, None)),
        (ops.all_gather_matmul.default, (x.detach(), pair, [], name, [5, 5], "shard", method, False, "swiglu")),
        (ops.matmul_reduce_scatter.default, ([x], w[0], b[0], name, None, [3, 2], method)),
        (ops.matmul_reduce_scatter.default, ([x], w[0], None, name, "gelu", [1, 4], method)),
        (ops.matmul_reduce_scatter.default, ([x, x.detach() + 1], w[0], None, name, "swiglu", [1, 4], method)),
    ]
    # Their results are contiguous, whatever the inputs are.
    x, transposed = torch.randn(2, 5, 6).transpose(0, 1), torch.randn(6, 3).t()
    dy, own = torch.randn(10, 2, 3), torch.randn((3, 2)[rank], 2, 3)
    for needs in ((True, True), (False, True), (True, False)):
        checks += [
            (
                ops.all_gather_matmul_backward.default,
                ([dy], None, x, [transposed], name, [5, 5], "shard", method, *needs),
            ),
            (ops.matmul_reduce_scatter_backward.default, (own, [x], transposed, name, None, [3, 2], method, *needs)),
        ]
    return [torch.library.opcheck(op, args) for op, args in checks]


def check_opcheck(method: str) -> None:
    for results in run_ranks(2, _opcheck, method, timeout_s=120):
        for result in results:
            assert set(result.values()) == {"SUCCESS"}


def _compiled(rank, world, method, activation, input_activation):
    torch.manual_seed(rank)
    group = dist.group.WORLD
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((3, 4, 6), (5, 6), (5, 6), (6, 5), (6,))]

    def block(x, w1, w2, w3, b):
        h = all_gather_matmul(x, [w1, w2], group=group, activation=activation, dim=1, method=method)
        return matmul_reduce_scatter(
            h, w3, group=group, bias=b, input_activation=input_activation, dim=1, method=method
        )

    outputs = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        y = function(*leaves)
        y.square().sum().backward()
        outputs.append([y.detach(), *(t.grad for t in leaves)])
        for t in leaves:
            t.grad = None
    return equal(*outputs)


def check_compiled(method: str, activation: str, input_activation: str) -> None:
    """Without graph breaks, to the same bits."""
    assert run_ranks(2, _compiled, method, activation, input_activation, timeout_s=120) == [True, True]


def _with_a_sink_that_raises(rank, world, method):
    group = dist.group.WORLD
    torch.manual_seed(rank)
    x, w, v = (torch.randn(*shape, requires_grad=True) for shape in ((300, 24), (20, 24), (16, 20)))

    def raising(weight, gradient):
        raise ArithmeticError("no room for it")

    messages = []
    for first, second in ((raising, None), (None, raising), (None, None)):
        h = all_gather_matmul(x, w, group=group, defer_wgrad=first, method=method)
        y = matmul_reduce_scatter(h, v, group=group, defer_wgrad=second, method=method)
        x.grad = None
        try:
            y.sum().backward()
        except ArithmeticError as error:
            messages.append(str(error))
    return messages, x.grad


def check_sink_that_raises(method: str) -> None:
    """The error comes to the caller, on every rank, and the group goes on."""
    for messages, dx in run_ranks(2, _with_a_sink_that_raises, method):
        assert messages == ["no room for it"] * 2
        assert dx.isfinite().all()
