"""Data parallelism: backward of 8 linear layers ([N, K] and [K, N] in turn) whose gradients are summed over the ranks.

Forward is not timed. Each rank has M rows of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.bench.case import Case, Method, Results, Spec, normal
from fusedcomm.parallel import GradientBuckets

# `chunked` is ours with buckets of 4 MB, `auto` with the default of 25; `ddp` has torch's defaults.
METHODS = ("torch", "ddp", "ddp_best", "serial", "chunked", "auto")
EXTRA_METHODS: tuple[str, ...] = ()
_NUM_LAYERS = 8
_BUCKET_MB = {"serial": 25.0, "chunked": 4.0, "auto": 25.0}
# `ddp_best` takes the best of these.
_DDP_CAPS_MB = (1, 2, 4, 8, 16)


def default_shape(world: int) -> tuple[int, int, int]:
    return 2048, 1024, 1024


def check_spec(spec: Spec) -> None:
    """Any shape will do."""


def make_case(spec: Spec, rank: int) -> Case:
    return _Gradients(spec, rank)


class _Gradients:
    def __init__(self, spec: Spec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        total = sum(param.nbytes for param in self._model(spec.dtype).parameters())
        self.min_bytes = 2 * (spec.world - 1) * total // spec.world

    def open(self, name: str) -> Method:
        model = self._model(self._spec.dtype)
        if name == "compute":
            return _backward_then(self._spec, self._rank, model, None)
        if name in ("transfer", "torch"):
            return self._open_torch(model, transfers_only=name == "transfer")
        if name == "ddp":
            return self._open_ddp(None)
        if name == "ddp_best":
            return self._open_best_ddp()
        return self._open_ours(model, name)

    def reference(self, dtype: torch.dtype) -> Results:
        model = self._model(self._spec.dtype).to(dtype)
        for rank in range(self._spec.world):
            x, dy = (tensor.to(dtype) for tensor in _inputs(self._spec, rank))
            model(x).backward(dy)
        return _grads(model)

    def _model(self, dtype: torch.dtype) -> nn.Module:
        spec = self._spec
        shapes = [(spec.n, spec.k), (spec.k, spec.n)] * (_NUM_LAYERS // 2)
        weights = (normal(shape, 2, index, scale=shape[1] ** -0.5) for index, shape in enumerate(shapes))
        return _Layers([weight.to(dtype) for weight in weights])

    def _open_torch(self, model: nn.Module, *, transfers_only: bool) -> Method:
        flat = torch.cat([param.detach().flatten() for param in model.parameters()])

        def reduce() -> None:
            torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None], out=flat)
            dist.all_reduce(flat)
            parts = flat.split([param.numel() for param in model.parameters()])
            for param, part in zip(model.parameters(), parts):
                param.grad = part.view(param.shape)

        if transfers_only:
            # Zeros, which stay so however often they are added up.
            flat.zero_()
            return Method(lambda: {"flat": _reduced(flat)})
        return _backward_then(self._spec, self._rank, model, reduce)

    def _open_ours(self, model: nn.Module, name: str) -> Method:
        buckets = GradientBuckets(model.named_parameters(), dp_group=dist.group.WORLD, bucket_mb=_BUCKET_MB[name])
        x, dy = _inputs(self._spec, self._rank)
        output: list[Tensor] = []

        def prepare() -> None:
            buckets.zero()
            if name == "serial":
                # A step that counts sends nothing before finish().
                buckets.count_again()
            output[:] = [model(x)]

        def run() -> Results:
            output[0].backward(dy)
            buckets.finish()
            return _grads(model)

        # The first step counts contributions; later ones overlap.
        prepare()
        run()
        return Method(run, prepare, note=f"buckets of {_BUCKET_MB[name]:g} MB")

    def _open_ddp(self, cap_mb: float | None) -> Method:
        model = DistributedDataParallel(self._model(self._spec.dtype), bucket_cap_mb=cap_mb)
        # Averages over the ranks, where the others add.
        method = _backward_then(self._spec, self._rank, model, None, scale=self._spec.world)
        note = "bucket_cap_mb by default" if cap_mb is None else f"bucket_cap_mb={cap_mb:g}, the best of {_DDP_CAPS_MB}"
        return Method(method.run, method.prepare, note)

    def _open_best_ddp(self) -> Method:
        found: list[tuple[float, int]] = []
        for cap_mb in _DDP_CAPS_MB:
            method = self._open_ddp(cap_mb)
            # DDP cuts its buckets anew after the first step.
            times_s = [_time_s(method) for _ in range(3)][1:]
            slowest = torch.tensor(min(times_s), dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found.append((slowest.item(), cap_mb))
        return self._open_ddp(min(found)[1])


class _Layers(nn.Module):
    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(weight) for weight in weights])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.relu(F.linear(x, weight))
        return x


def _inputs(spec: Spec, rank: int) -> tuple[Tensor, Tensor]:
    x, dy = (normal((spec.m, spec.k), key, rank).to(spec.dtype) for key in (0, 1))
    return x, dy


def _backward_then(
    spec: Spec, rank: int, model: nn.Module, finish: Callable[[], None] | None, scale: float = 1.0
) -> Method:
    x, dy = _inputs(spec, rank)
    dy = dy * scale
    output: list[Tensor] = []

    def prepare() -> None:
        model.zero_grad()
        output[:] = [model(x)]

    def run() -> Results:
        output[0].backward(dy)
        if finish is not None:
            finish()
        return _grads(model)

    return Method(run, prepare)


def _time_s(method: Method) -> float:
    if method.prepare is not None:
        method.prepare()
    dist.barrier()
    begin_s = time.perf_counter()
    method.run()
    return time.perf_counter() - begin_s


def _reduced(flat: Tensor) -> Tensor:
    dist.all_reduce(flat)
    return flat


def _grads(model: nn.Module) -> Results:
    # DDP puts "module." before every name.
    return {
        name.removeprefix("module."): param.grad for name, param in model.named_parameters() if param.grad is not None
    }
