"""The fused ops whole, forward and backward, between virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import assert_as_accurate
from place import DEVICE, INTERPRETED, TIMES, poisoned, randn
from torch import Tensor
from torch.nn.functional import gelu

from fusedcomm.comm.simulated import SimulatedTransport, Simulation
from fusedcomm.ops.fused import FusedCall, gather_matmul, gather_matmul_backward, matmul_scatter
from fusedcomm.ops.wgrad import Sink

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
SIZES = [(9, 12)] if INTERPRETED else [(300, 411), (200, 0, 317, 130), (129,) * 8]
LEAD, HIDDEN, INNER = (2, 24, 20) if INTERPRETED else (2, 256, 336)


class Mlp:
    """Column-parallel with GELU, then row-parallel: one virtual rank's share of the weights, and all inputs."""

    def __init__(self, sizes: tuple[int, ...], pieces: int) -> None:
        self.sizes, self.pieces = sizes, pieces
        self.x = randn(0, sum(sizes), LEAD, HIDDEN, dtype=DTYPE)
        world = range(len(sizes))
        self.up = [randn(10 + rank, INNER, HIDDEN, dtype=DTYPE, scale=HIDDEN**-0.5) for rank in world]
        self.bias = [randn(20 + rank, INNER, dtype=DTYPE) for rank in world]
        self.down = [randn(30 + rank, HIDDEN, INNER, dtype=DTYPE, scale=INNER**-0.5) for rank in world]
        self.dy = [randn(40 + rank, sum(sizes), LEAD, INNER, dtype=DTYPE) for rank in world]

    def own(self, rank: int) -> slice:
        return slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))

    def forward(self, transport: SimulatedTransport) -> Tensor:
        rank, call = transport.rank, partial(FusedCall, transport=transport, sizes=self.sizes, pieces=self.pieces)
        up, bias, x = [self.up[rank]], [self.bias[rank]], self.x[self.own(rank)]
        _, hidden = gather_matmul(call("all_gather_matmul"), x, up, bias, "gelu", keep=False)
        return matmul_scatter(call("matmul_reduce_scatter"), hidden, self.down[rank], None)

    def backward(self, transport: SimulatedTransport) -> tuple[Tensor, Tensor]:
        """Of the first product: x is gathered again for dw, in fp32, while the partial sums of dx travel."""
        rank = transport.rank
        call = FusedCall("all_gather_matmul backward", transport, self.sizes, self.pieces)
        saved, up, dw = self.x[self.own(rank)], [self.up[rank]], poisoned(INNER, HIDDEN, dtype=torch.float32)
        sink = Sink(up, [True], lambda weight, gradient: gradient.add_to(dw, overwrite=True))
        scatter = gather_matmul_backward(call, [self.dy[rank]], None, saved, up, regather=True, need_x=True, sink=sink)
        assert scatter is not None
        return scatter.finish(), dw

    def output(self, dtype: torch.dtype) -> Tensor:
        """Of all rows, in plain torch."""
        parts = []
        for up, bias, down in zip(self.up, self.bias, self.down):
            hidden = gelu(self.x.to(dtype) @ up.to(dtype).t() + bias.to(dtype), approximate="tanh")
            parts.append(hidden @ down.to(dtype).t())
        return added(parts, dtype)

    def input_gradient(self, dtype: torch.dtype) -> Tensor:
        return added([dy.to(dtype) @ up.to(dtype) for dy, up in zip(self.dy, self.up)], dtype)


def added(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return torch.stack(parts).to(wide).sum(0).to(dtype)


def simulate(mlp: Mlp, function: Callable[[SimulatedTransport], Tensor]) -> list:
    num_bytes = len(mlp.sizes) * max(mlp.sizes) * LEAD * max(HIDDEN, INNER) * DTYPE.itemsize
    simulation = Simulation(len(mlp.sizes), DEVICE, buffer_bytes=num_bytes)
    simulation.warm_up(function)
    # Once more, so that both buffers are used, and each again.
    for _ in range(2):
        simulation.run(function)
    return simulation.run(function)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ops_agree_with_torch(sizes, pieces):
    mlp = Mlp(sizes, pieces)
    exact, plain = mlp.output(torch.float64), mlp.output(DTYPE)
    for rank, y in enumerate(simulate(mlp, mlp.forward)):
        if sizes[rank]:
            own = mlp.own(rank)
            assert_as_accurate(y, exact[own], plain[own], times=TIMES[DTYPE])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_agree_with_torch(sizes):
    mlp = Mlp(sizes, 2)
    exact, plain = mlp.input_gradient(torch.float64), mlp.input_gradient(DTYPE)
    x = mlp.x.flatten(0, 1)
    for rank, (dx, dw) in enumerate(simulate(mlp, mlp.backward)):
        dy = mlp.dy[rank].flatten(0, 1)
        assert_as_accurate(dw, dy.double().t() @ x.double(), (dy.t() @ x).float(), times=TIMES[DTYPE])
        if sizes[rank]:
            own = mlp.own(rank)
            assert_as_accurate(dx, exact[own], plain[own], times=TIMES[DTYPE])
