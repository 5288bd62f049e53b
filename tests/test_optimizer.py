"""AdamW on fp32 masters: one norm, one decision and one update on every rank of the mesh."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from helpers import run_ranks
from torch import Tensor, nn

from fusedcomm.comm.mesh import build_mesh
from fusedcomm.nn.layout import ParamLayout, set_layout
from fusedcomm.parallel import GradientBuckets, LossScale, Optimizer, StepResult, TiedWeights, cosine_lr, tied_group


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def add_gradients(model: nn.Module, step: int) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    model(x.to(next(model.parameters()).dtype)).square().sum().backward()


def test_step_matches_adamw_and_clip_grad_norm():
    ours, plain = small_model(), small_model()
    optimizer = Optimizer(ours.named_parameters(), weight_decay=0.1, clip_norm=1.0)
    matrices = [p for p in plain.parameters() if p.dim() == 2]
    vectors = [p for p in plain.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95), weight_decay=0.1
    )
    for step in range(4):
        lr = 0.01 * (step + 1)
        for group in adamw.param_groups:
            group["lr"] = lr
        ours.zero_grad()
        plain.zero_grad()
        add_gradients(ours, step)
        add_gradients(plain, step)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
        adamw.step()
        result = optimizer.step(step, lr=lr)
        assert norm > 1
        assert result.grad_norm == pytest.approx(norm, rel=1e-6)
        assert not result.skipped
    for a, b in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_step_keeps_updates_that_bf16_would_lose():
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    buckets = GradientBuckets([("weight", weight)], dp_group=None)
    optimizer = Optimizer([("weight", weight)], weight_decay=0.0, clip_norm=None)
    for step in range(100):
        weight.sum().backward()
        buckets.finish(set_grad=False)
        # One update is 1e-4, below half an ulp of bf16 at 1.
        optimizer.step(step, lr=1e-4)
        buckets.zero()
        assert torch.equal(weight, optimizer.state_dict()["weight"]["master"].bfloat16())
    torch.testing.assert_close(optimizer.state_dict()["weight"]["master"], torch.full((4, 4), 0.99))
    assert weight[0, 0].item() < 1


def test_state_dict_continues_bit_for_bit():
    model, resumed = small_model(torch.bfloat16), small_model(torch.bfloat16)
    optimizer = Optimizer(model.named_parameters())
    again = Optimizer(resumed.named_parameters())
    for step in range(6):
        if step == 3:
            state = optimizer.state_dict()
            again.load_state_dict({name: {k: v.clone() for k, v in own.items()} for name, own in state.items()})
        for each, its in ((model, optimizer), (resumed, again)):
            each.zero_grad()
            add_gradients(each, step if step >= 3 or each is model else step + 50)
            its.step(step, lr=0.01)
    for a, b in zip(model.parameters(), resumed.parameters()):
        assert torch.equal(a, b)
    state.pop("0.weight")
    with pytest.raises(ValueError, match=r"the state lacks 0\.weight"):
        again.load_state_dict(state)


def _mesh_step(rank: int, world: int, pp: int, dp: int, tp: int) -> tuple[StepResult, Tensor]:
    """Every rank holds a column shard [2, 3], a replicated vector [3] and a tied copy [2, 2], all gradients 1."""
    mesh = build_mesh(pp=pp, dp=dp, tp=tp, timeout_s=30)
    shard, vector, tied = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (3,), (2, 2)))
    set_layout(shard, ParamLayout(shard_dim=0), mesh.tp_group)
    set_layout(tied, ParamLayout(shard_dim=0), mesh.tp_group)
    # One name per stage; the tied weight has a second copy on the last stage, which does not count.
    named = [(f"{mesh.pp_rank}.shard", shard), (f"{mesh.pp_rank}.vector", vector)]
    copy = None
    if mesh.is_first_stage or mesh.is_last_stage:
        copy = "output.weight" if mesh.pp_rank > 0 else "embedding.weight"
        named.append((copy, tied))
    elsewhere = ["output.weight"] if pp > 1 else []
    optimizer = Optimizer(named, mesh=mesh, clip_norm=1.0, weight_decay=0.0, counted_elsewhere=elsewhere)
    for _, param in named:
        param.grad = torch.ones_like(param)
    result = optimizer.step(0, lr=0.1)
    return result, shard.grad


@pytest.mark.parametrize(("pp", "dp", "tp"), [(1, 4, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_norm_counts_every_gradient_once(pp, dp, tp):
    results = run_ranks(4, _mesh_step, pp, dp, tp)
    squares = pp * (6 * tp + 3) + 4 * tp
    for result, grad in results:
        assert result == results[0][0]
        assert result.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-15)
        torch.testing.assert_close(grad, torch.full((2, 3), 1 / math.sqrt(squares)))


def _overflow(rank: int, world: int) -> list[tuple[StepResult, float, Tensor]]:
    mesh = build_mesh(pp=1, dp=1, tp=world, timeout_s=30)
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = Optimizer([("weight", weight)], mesh=mesh, loss_scale=LossScale(value=2.0**10))
    log = []
    for step in range(3):
        factor = math.inf if (step, rank) == (1, 1) else 1.0
        weight.grad = torch.full_like(weight, 2.0**10) * factor
        log.append((optimizer.step(step, lr=0.1), optimizer.loss_scale.value, weight.detach().clone()))
    return log


def test_norm_does_not_depend_on_names():
    # Python hashes names anew in every process, so a sum in the order of a set would be another one in a resumed run.
    values = torch.randn(64, generator=torch.Generator().manual_seed(0)).exp()
    norms = set()
    for prefix in "abcdefgh":
        params = {f"{prefix}{index}": nn.Parameter(torch.ones(1)) for index in range(64)}
        for param, value in zip(params.values(), values):
            param.grad = value.view(1).clone()
        norms.add(Optimizer(params.items()).step(0, lr=0.0).grad_norm)
    assert len(norms) == 1


def test_fp16_overflow_on_one_rank_skips_the_step_on_all():
    ranks = run_ranks(2, _overflow)
    for log in ranks:
        assert [result.skipped for result, _, _ in log] == [False, True, False]
        assert [scale for _, scale, _ in log] == [2.0**10, 2.0**9, 2.0**9]
        assert torch.equal(log[0][2], log[1][2])
        assert not torch.equal(log[1][2], log[2][2])
        assert not math.isfinite(log[1][0].grad_norm)
        # The weight is replicated: the first rank's copy is the one that counts, with the scale taken out.
        assert log[0][0].grad_norm == pytest.approx(math.sqrt(3))
    assert torch.equal(ranks[0][-1][2], ranks[1][-1][2])


def _non_finite(rank: int, world: int) -> tuple[str, Tensor]:
    mesh = build_mesh(pp=1, dp=1, tp=world, timeout_s=30)
    weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Optimizer([("weight", weight), ("bias", bias)], mesh=mesh)
    weight.grad, bias.grad = torch.ones(3), torch.ones(3)
    if rank == 1:
        bias.grad[2] = math.nan
    try:
        optimizer.step(7, lr=0.1)
    except FloatingPointError as error:
        return str(error), weight.detach()
    return "", weight.detach()


def test_non_finite_gradient_stops_all_ranks_before_the_step():
    for message, weight in run_ranks(2, _non_finite):
        assert "norm of step 7 is nan" in message
        assert "rank 1: bias" in message
        assert torch.equal(weight, torch.ones(3))


def test_loss_scale_grows_and_gives_up():
    scale = LossScale(value=4.0, growth_interval=2)
    for finite, value in ((True, 4.0), (True, 8.0), (False, 4.0), (True, 4.0), (True, 8.0)):
        scale.update(finite)
        assert scale.value == value
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = Optimizer([("weight", weight)], loss_scale=LossScale(value=2.0**-14))
    weight.grad = torch.full_like(weight, math.inf)
    with pytest.raises(FloatingPointError, match="step 5 overflows even at loss scale"):
        optimizer.step(5, lr=0.1)


def test_cosine_lr_warms_up_and_decays():
    rates = [cosine_lr(step, peak=2.0, warmup_steps=4, total_steps=12, minimum=0.5) for step in range(14)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[8] == pytest.approx(1.25)
    assert rates[12:] == [0.5, 0.5]
    assert all(a > b for a, b in pairwise(rates[4:13]))


def _tied_steps(rank: int, world: int, pp: int, last_stage_rank: int) -> list[Tensor]:
    mesh = build_mesh(pp=pp, dp=world // pp, tp=1, timeout_s=30)
    weight = torch.randn(33, 7, generator=torch.Generator().manual_seed(0))
    first = nn.Parameter(weight.clone()) if mesh.pp_rank == 0 else None
    last = nn.Parameter(weight.clone()) if mesh.pp_rank == last_stage_rank else None
    group = tied_group(mesh, last_stage_rank=last_stage_rank, timeout_s=30)
    tied = TiedWeights(first=first, last=last, group=group)
    pairs = (("embedding.weight", first), ("output.weight", last))
    named = [(name, param) for name, param in pairs if param is not None]
    buckets = GradientBuckets(named, dp_group=mesh.dp_group)
    optimizer = Optimizer(named, mesh=mesh, counted_elsewhere=["output.weight"])
    for step in range(3):
        for name, param in named:
            (param * (step + (2.0 if name == "output.weight" else 1.0) + mesh.dp_rank)).sum().backward()
        buckets.finish()
        tied.sum_gradients()
        # Both copies, both dp ranks.
        assert all(torch.equal(p.main_grad, torch.full((33, 7), 4.0 * step + 8)) for _, p in named)
        optimizer.step(step, lr=0.1)
        buckets.zero()
    return [param.detach() for _, param in named]


@pytest.mark.parametrize("last_stage_rank", [0, 1])
def test_tied_copies_stay_equal(last_stage_rank):
    by_rank = run_ranks(4, _tied_steps, 2, last_stage_rank)
    copies = [copy for rank in by_rank for copy in rank]
    assert len(copies) == 4
    assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_tied_weights_reject_a_lone_copy():
    with pytest.raises(ValueError, match="1 copies without a group"):
        TiedWeights(first=nn.Parameter(torch.ones(1)), last=None, group=None)
