"""AdamW on fp32 master weights, with one gradient norm and one decision to step for the whole mesh."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from fusedcomm.comm.mesh import Mesh
from fusedcomm.comm.record import span
from fusedcomm.nn.layout import layout_of
from fusedcomm.parallel.buckets import main_grad_of
from fusedcomm.parallel.disk import DiskTensors
from fusedcomm.parallel.shares import share_of


def cosine_lr(step: int, *, peak: float, warmup_steps: int, total_steps: int, minimum: float = 0.0) -> float:
    """The rate of step 0, 1, ...: a line up to `peak` in `warmup_steps`, then half a cosine to `minimum`."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return minimum + (peak - minimum) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass
class LossScale:
    """The factor on an fp16 loss: halved when a step overflows, doubled after `growth_interval` good ones.

    It is a power of two, so that scaling never rounds. All ranks see the same norm, and so hold the same
    scale.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    num_good_steps: int = 0

    def update(self, finite: bool) -> None:
        if not finite:
            self.value /= 2
            self.num_good_steps = 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.value *= 2
            self.num_good_steps = 0


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step saw: the norm before clipping (loss scale taken out), equal on all ranks."""

    grad_norm: float
    skipped: bool


class Optimizer:
    """AdamW whose weights, moments and gradients are fp32 whatever the parameters' dtype.

    Shapes per rank: each parameter's shard; a parameter that is fp32 is its own master. Gradients are
    `param.main_grad` where `GradientBuckets` made one (already summed by `finish()`), else `param.grad`.
    Weight decay applies to matrices only.

    What travels: two fp64 numbers per rank and step. Each gradient counts once in the norm: shards on every
    tensor-parallel rank, replicated parameters on the first, all of them on the first data-parallel rank
    only, and names in `counted_elsewhere` (the second copy of a tied weight) not at all. With `per_replica` each
    data-parallel replica has a norm of its own, over its own ranks. The sum is taken in
    rank order, so that every rank clips by the same number, to the last bit.

    With `sharded` a data-parallel rank keeps the masters and moments of its own rows only (`share_of`), counts their
    gradients, and steps them; `GradientBuckets(sharded=True)` or `FullySharded` brings
    them to the others.

    Non-finite gradients: with a `loss_scale` (fp16) all ranks skip the step and halve the scale; without, all
    raise FloatingPointError naming the step, ranks and parameters, before any weight has changed.

    With `disk`, moments and those masters that are not the parameters themselves lie in files: a step brings them into
    memory part by part.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        *,
        mesh: Mesh | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip_norm: float | None = 1.0,
        loss_scale: LossScale | None = None,
        counted_elsewhere: Collection[str] = (),
        disk: DiskTensors | None = None,
        per_replica: bool = False,
        sharded: bool = False,
    ) -> None:
        self._params = {name: param for name, param in named_params if param.requires_grad}
        self._mesh = mesh
        self._dp_ranks_differ = per_replica or sharded
        self._per_replica = per_replica
        # What this rank steps of each parameter.
        self._own: dict[str, Tensor] = {**self._params}
        if sharded and mesh is not None:
            self._own = {name: share_of(param.detach(), mesh.dp_rank, mesh.dp) for name, param in self._params.items()}
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._clip_norm = clip_norm
        self.loss_scale = loss_scale
        self._counted = {name for name in self._params if self._counts_here(name, counted_elsewhere)}
        self._disk = disk
        self._masters = {name: self._master(name, own) for name, own in self._own.items()}
        self._moments = {
            name: {
                "exp_avg": self._zeros(name, master),
                "exp_avg_sq": self._zeros(name, master),
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
            }
            for name, master in self._masters.items()
        }
        self._squares = 0.0

    def step(self, step: int, *, lr: float) -> StepResult:
        """Clip and apply the gradients; every rank calls it. `step` only names the step in errors."""
        grads = self._grads(self._params)
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        norm = self._global_norm(grads) / scale
        finite = math.isfinite(norm)
        if self.loss_scale is None and not finite:
            self._raise_non_finite(step, norm, grads)
        if self.loss_scale is not None:
            self._update_scale(step, finite)
        if finite:
            self._apply(grads, norm, scale, lr)
        return StepResult(norm, skipped=not finite)

    def update(self, names: Collection[str], step: int, *, lr: float) -> None:
        """Apply the gradients of these parameters alone, without clipping: part of a step, as their sums come in.

        Nothing travels. It needs `clip_norm=None` and no loss scale, and is then equal to `step`, bit for bit.
        FloatingPointError, naming the step and the parameters, on the ranks that see a non-finite gradient; parts that
        were applied before stay so.
        """
        if self._clip_norm is not None or self.loss_scale is not None:
            raise ValueError(
                "Optimizer: update() knows the gradients of some parameters only, so it cannot clip their norm, nor "
                "skip the step after an overflow; use clip_norm=None and no loss_scale"
            )
        grads = self._grads(names)
        norms = dict(zip(grads, _norms(list(grads.values()))))
        if bad := [name for name, norm in norms.items() if not math.isfinite(norm)]:
            raise FloatingPointError(
                f"Optimizer: the gradients of step {step} are not finite: {', '.join(bad)}; the step is applied in "
                "part, go on from a checkpoint"
            )
        self._squares += sum(norm.item() ** 2 for name, norm in norms.items() if name in self._counted)
        self._adamw(grads, lr)

    def take_squares(self) -> float:
        """This rank's share of the squared gradient norm over the `update`s since the last call."""
        squares, self._squares = self._squares, 0.0
        return squares

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Live tensors by parameter name: `master`, `exp_avg`, `exp_avg_sq` (fp32, of what is stepped here), `step`."""
        return {name: {"master": master.detach(), **self._moments[name]} for name, master in self._masters.items()}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Copy such a state in, and the masters, rounded, into the parameters.

        A checkpoint that was read into the tensors of `state_dict()` itself is passed here as well.
        """
        if missing := sorted(self._masters.keys() - state.keys()):
            raise ValueError(
                f"Optimizer: the state lacks {', '.join(missing)}; it must hold every parameter trained here"
            )
        with torch.no_grad():
            for name, own in self.state_dict().items():
                for key, tensor in own.items():
                    tensor.copy_(state[name][key])
        self._round_into_params(self._params)

    def round_masters(self) -> None:
        """Round the masters, which someone has changed, into the parameters."""
        self._round_into_params(self._params)

    def _counts_here(self, name: str, counted_elsewhere: Collection[str]) -> bool:
        if name in counted_elsewhere:
            return False
        if self._mesh is None:
            return True
        sharded = layout_of(self._params[name]).shard_dim is not None
        is_counted_replica = self._dp_ranks_differ or self._mesh.dp_rank == 0
        return is_counted_replica and (sharded or self._mesh.tp_rank == 0)

    def _global_norm(self, grads: dict[str, Tensor]) -> float:
        """Root of the sum of squares over the mesh, of fp64 sums; NaN or infinite if any rank holds such a one."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device())
        norms = dict(zip(grads, _norms(list(grads.values()))))
        # In the parameters' order, not that of the set, which is another one in every process.
        counted_norms = [norm for name, norm in norms.items() if name in self._counted]
        squares = torch.stack([zero, *counted_norms]).square().sum()
        # Copies that do not count must be finite too: they would ruin their own rank's weights.
        unsound = torch.stack([zero, *norms.values()]).sum() * 0
        local = torch.stack((squares, unsound))
        if self._mesh is None or self._mesh.world == 1:
            ranks = [local]
        else:
            ranks = [torch.empty_like(local) for _ in range(self._mesh.world)]
            with span("wait", "gradient_norm", local.nbytes):
                dist.all_gather(ranks, local)
        total = torch.stack(ranks).cpu()
        counted = total
        if self._mesh is not None and self._per_replica:
            counted = total[self._mesh.device_mesh.mesh[:, self._mesh.dp_rank].flatten()]
        # Whether it is finite must be the same on all ranks, which go on or stop together.
        return math.sqrt(counted[:, 0].sum().item()) + total[:, 1].sum().item()

    def _device(self) -> torch.device:
        if self._mesh is not None:
            return self._mesh.device
        return next((param.device for param in self._params.values()), torch.device("cpu"))

    def _raise_non_finite(self, step: int, norm: float, grads: dict[str, Tensor]) -> None:
        names = [name for name, grad in grads.items() if not torch.isfinite(grad).all()]
        by_rank: list[list[str]] = [names]
        if self._mesh is not None and self._mesh.world > 1:
            by_rank = [[] for _ in range(self._mesh.world)]
            dist.all_gather_object(by_rank, names)
        where = "; ".join(f"rank {rank}: {', '.join(found)}" for rank, found in enumerate(by_rank) if found)
        raise FloatingPointError(
            f"Optimizer: the gradient norm of step {step} is {norm}; no weight was changed. Non-finite: {where}"
        )

    def _update_scale(self, step: int, finite: bool) -> None:
        assert self.loss_scale is not None
        self.loss_scale.update(finite)
        if self.loss_scale.value < 2.0**-14:
            raise FloatingPointError(
                f"Optimizer: step {step} overflows even at loss scale {self.loss_scale.value}; "
                "the model diverges, or its values exceed fp16: use bf16 or a lower learning rate"
            )

    def _apply(self, grads: dict[str, Tensor], norm: float, scale: float, lr: float) -> None:
        factor = 1.0 / scale
        if self._clip_norm is not None and norm > self._clip_norm:
            factor *= self._clip_norm / norm
        if factor != 1.0 and grads:
            torch._foreach_mul_(list(grads.values()), factor)  # pyright: ignore[reportPrivateImportUsage]
        self._adamw(grads, lr)

    @torch.no_grad()
    def _adamw(self, grads: dict[str, Tensor], lr: float) -> None:
        # Element by element, so parts make no difference to the numbers.
        for part in (list(grads),) if self._disk is None else self._disk.in_turn(grads):
            for decays in (True, False):
                self._adamw_on([name for name in part if (self._params[name].dim() >= 2) == decays], grads, lr, decays)
            self._round_into_params(part)

    def _adamw_on(self, names: list[str], grads: dict[str, Tensor], lr: float, decays: bool) -> None:
        if names:
            moments = [self._moments[name] for name in names]
            adamw(
                [self._masters[name] for name in names],
                [grads[name] for name in names],
                [own["exp_avg"] for own in moments],
                [own["exp_avg_sq"] for own in moments],
                [],
                [own["step"] for own in moments],
                fused=True,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=lr,
                weight_decay=self._weight_decay if decays else 0.0,
                eps=self._eps,
                maximize=False,
            )

    def _zeros(self, name: str, like: Tensor) -> Tensor:
        return torch.zeros_like(like) if self._disk is None else self._disk.zeros(name, like)

    def _master(self, name: str, own: Tensor) -> Tensor:
        if own.dtype == torch.float32:
            return own
        values = own.detach().float()
        return values if self._disk is None else self._disk.zeros(name, values).copy_(values)

    def _grads(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The fp32 gradients of those that have one."""
        found = {name: _fp32_grad(self._params[name]) for name in names}
        return {name: grad for name, grad in found.items() if grad is not None}

    @torch.no_grad()
    def _round_into_params(self, names: Iterable[str]) -> None:
        for name in names:
            if self._own[name] is not self._masters[name]:
                self._own[name].copy_(self._masters[name])


def _norms(grads: list[Tensor]) -> list[Tensor]:
    if not grads:
        return []
    # One fused pass; `get_total_norm` would sum in fp32.
    return list(torch._foreach_norm(grads, 2, dtype=torch.float64))  # pyright: ignore[reportPrivateImportUsage]


def _fp32_grad(param: nn.Parameter) -> Tensor | None:
    grad = main_grad_of(param)
    if grad is None and param.grad is not None:
        grad = param.grad.float()
    return grad
