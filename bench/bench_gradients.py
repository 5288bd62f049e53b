"""Data parallelism: training steps of 8 linear layers ([N, K] and [K, N] in turn), gradients summed over the ranks.

Each rank has M rows of its own. A run is two steps of forward and backward, one after the other, in the steady state:
with `backward+forward` what one step leaves to travel does so in the next one's forward, and a step before the first
one timed leaves as much as the last one does. No weight changes, so every step has the same gradients.
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
from fusedcomm.ops.wgrad import DeferWgrad, local_linear
from fusedcomm.parallel import GradientBuckets, main_grad_of

# `ddp` has torch's defaults; `serial` sums when backward is over.
METHODS = ("ddp", "ddp_best", "serial", "backward", "backward+forward")
EXTRA_METHODS: tuple[str, ...] = ()
TORCH_METHOD = "ddp_best"
_NUM_LAYERS = 8
_NUM_STEPS = 2
# `ddp_best` takes the best of these.
_DDP_CAPS_MB = (1, 2, 4, 8)


def default_shape(world: int) -> tuple[int, int, int]:
    return 2048, 1024, 1024


def check_spec(spec: Spec) -> None:
    """Any shape will do."""


def make_case(spec: Spec, rank: int) -> Case:
    return _Gradients(spec, rank)


class _Gradients:
    def __init__(self, spec: Spec, rank: int) -> None:
        self._spec = spec
        self._x, self._dy = _inputs(spec, rank)
        # fp32 sums, whatever the dtype.
        self._num_params = sum(param.numel() for param in self._model().parameters())
        self.min_bytes = _NUM_STEPS * 2 * (spec.world - 1) * self._num_params * 4 // spec.world

    def open(self, name: str) -> Method:
        if name == "compute":
            model = self._model()
            return Method(lambda: self._steps(model, model.zero_grad) or {})
        if name == "transfer":
            # Zeros, which stay so however often they are added up.
            flat = torch.zeros(self._num_params)
            return Method(lambda: _sums(flat))
        if name == "ddp":
            return self._open_ddp(None)
        return self._open_best_ddp() if name == "ddp_best" else self._open_ours(name)

    def reference(self, dtype: torch.dtype) -> Results:
        model = self._model().to(dtype)
        for rank in range(self._spec.world):
            x, dy = (tensor.to(dtype) for tensor in _inputs(self._spec, rank))
            model(x).backward(dy)
        return _grads(model)

    def _model(self) -> nn.Sequential:
        spec = self._spec
        shapes = [(spec.n, spec.k), (spec.k, spec.n)] * (_NUM_LAYERS // 2)
        weights = (normal(shape, 2, index, scale=shape[1] ** -0.5) for index, shape in enumerate(shapes))
        return nn.Sequential(*(_Layer(weight.to(spec.dtype)) for weight in weights))

    def _steps(
        self,
        model: nn.Module,
        before: Callable[[], None],
        after: Callable[[], None] | None = None,
        *,
        count: int = _NUM_STEPS,
        scale: float = 1.0,
    ) -> None:
        for _ in range(count):
            before()
            model(self._x).backward(self._dy * scale)
            if after is not None:
                after()

    def _open_ours(self, name: str) -> Method:
        model = self._model()
        in_forward = name == "backward+forward"
        buckets = GradientBuckets(
            model.named_parameters(), dp_group=dist.group.WORLD, layers=model if in_forward else ()
        )
        for layer in model:
            assert isinstance(layer, _Layer)
            layer.defer_wgrad = buckets.accumulate

        def before() -> None:
            buckets.zero()
            if name == "serial":
                # A step that counts sends nothing before its end.
                buckets.count_again()

        def after() -> None:
            if in_forward:
                buckets.finish_later(lambda names: None)
            else:
                buckets.finish()

        def run() -> Results:
            self._steps(model, before, after)
            grads = {name: main_grad_of(param) for name, param in model.named_parameters()}
            return {name: grad for name, grad in grads.items() if grad is not None}

        # The first step counts and measures; later ones overlap.
        self._steps(model, before, after, count=2)
        buckets.settle()
        if not in_forward:
            return Method(run)
        return Method(run, lambda: self._steps(model, before, after, count=1), finish=buckets.settle)

    def _open_ddp(self, cap_mb: float | None) -> Method:
        model = DistributedDataParallel(self._model(), bucket_cap_mb=cap_mb)
        # Averages over the ranks, where the others add.
        scale = float(self._spec.world)
        note = "bucket_cap_mb by default" if cap_mb is None else f"bucket_cap_mb={cap_mb:g}, the best of {_DDP_CAPS_MB}"

        def run() -> Results:
            self._steps(model, model.zero_grad, scale=scale)
            return _grads(model)

        return Method(run, note=note)

    def _open_best_ddp(self) -> Method:
        found: list[tuple[float, int]] = []
        for cap_mb in _DDP_CAPS_MB:
            method = self._open_ddp(cap_mb)
            # DDP cuts its buckets anew after the first step.
            method.run()
            slowest = torch.tensor(_time_s(method), dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found.append((slowest.item(), cap_mb))
        return self._open_ddp(min(found)[1])


class _Layer(nn.Module):
    """torch's linear layer, or with a `defer_wgrad` ours on a tensor-parallel group of one."""

    defer_wgrad: DeferWgrad | None = None

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(local_linear(x, self.weight, None, self.defer_wgrad))


def _inputs(spec: Spec, rank: int) -> tuple[Tensor, Tensor]:
    x, dy = (normal((spec.m, spec.k), key, rank).to(spec.dtype) for key in (0, 1))
    return x, dy


def _time_s(method: Method) -> float:
    dist.barrier()
    begin_s = time.perf_counter()
    method.run()
    return time.perf_counter() - begin_s


def _sums(flat: Tensor) -> Results:
    for _ in range(_NUM_STEPS):
        dist.all_reduce(flat)
    return {}


def _grads(model: nn.Module) -> Results:
    # DDP puts "module." before every name.
    return {
        name.removeprefix("module."): param.grad for name, param in model.named_parameters() if param.grad is not None
    }
