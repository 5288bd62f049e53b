"""Runs a layer on real ranks, puts the whole together again, and has plain torch to compare it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_as_accurate, run_ranks
from torch import Tensor, nn

from fusedcomm.comm.ring import chunk_sizes
from fusedcomm.nn import TensorParallel, TransformerConfig, layout_of

Params = dict[str, Tensor]


def tensor_parallel(**options: Any) -> TensorParallel:
    return TensorParallel(dist.group.WORLD, **options)


def random_like(shapes: dict[str, tuple[int, ...]], seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}


def load_full(module: nn.Module, full: Params) -> None:
    """Copy this rank's shard of every whole parameter."""
    group = dist.group.WORLD
    with torch.no_grad():
        for name, param in module.named_parameters():
            dim = layout_of(param).shard_dim
            value = full[name] if dim is None else full[name].chunk(group.size(), dim)[group.rank()]
            param.copy_(value)


def shards(module: nn.Module, what: str) -> dict[str, tuple[int | None, Tensor]]:
    """`{name: (shard_dim, parameter or its gradient)}` of this rank."""
    found = {}
    for name, param in module.named_parameters():
        tensor = param.grad if what == "grad" else param.detach()
        found[name] = (layout_of(param).shard_dim, tensor)
    return found


def assemble(by_rank: list[dict[str, tuple[int | None, Tensor]]]) -> Params:
    """Whole tensors; what every rank has must be bit-equal on all of them."""
    whole = {}
    for name, (dim, tensor) in by_rank[0].items():
        pieces = [of_rank[name][1] for of_rank in by_rank]
        if dim is None:
            assert all(torch.equal(piece, tensor) for piece in pieces), f"{name} differs between ranks"
            whole[name] = tensor
        else:
            whole[name] = torch.cat(pieces, dim)
    return whole


def local(full: Tensor, split: str, sizes: tuple[int, ...] | None, rank: int, world: int) -> Tensor:
    if split == "rows":
        return full.split(sizes or chunk_sizes(full.shape[0], world))[rank].clone()
    return full.chunk(world, -1)[rank].clone() if split == "features" else full.clone()


def rank_step(
    rank: int,
    world: int,
    build: Callable[..., nn.Module],
    full: Params,
    x_full: Tensor,
    dy_full: Tensor | list[Tensor],
    splits: tuple[str, str],
    sizes: tuple[int, ...] | None,
    takes_sizes: bool,
) -> tuple[list[Tensor], Tensor | None, dict[str, tuple[int | None, Tensor]]]:
    module = build(tensor_parallel())
    load_full(module, full)
    x = local(x_full, splits[0], sizes, rank, world)
    if x.is_floating_point():
        x.requires_grad_()
    out = module(x, sizes or chunk_sizes(x_full.shape[0], world)) if takes_sizes else module(x)
    outs = out if isinstance(out, list) else [out]
    grads = dy_full if isinstance(dy_full, list) else [dy_full]
    torch.autograd.backward(outs, [local(g, splits[1], sizes, rank, world) for g in grads])
    return [y.detach() for y in outs], x.grad, shards(module, "grad")


def join(pieces: list[Tensor], split: str) -> Tensor:
    if split == "whole":
        assert all(torch.equal(piece, pieces[0]) for piece in pieces)
        return pieces[0]
    return torch.cat(pieces, 0 if split == "rows" else -1)


def check_layer(
    world: int,
    build: Callable[..., nn.Module],
    reference: Callable[[Params, Tensor], Tensor | list[Tensor]],
    full: Params,
    x: Tensor,
    *,
    splits: tuple[str, str] = ("rows", "rows"),
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, ...] | None = None,
    takes_sizes: bool = True,
) -> None:
    """Result, input gradient and every parameter's gradient on `world` ranks, against plain torch's."""
    full = {name: value.to(dtype) for name, value in full.items()}
    x = x.to(dtype) if x.is_floating_point() else x
    probe = reference(full, x)
    several = isinstance(probe, list)
    generator = torch.Generator().manual_seed(7)
    dys = [torch.randn(y.shape, generator=generator).to(dtype) for y in (probe if several else [probe])]

    results = run_ranks(world, rank_step, build, full, x, dys, splits, sizes, takes_sizes)
    actual = {f"y{i}": join([r[0][i] for r in results], splits[1]) for i in range(len(dys))}
    if x.is_floating_point():
        actual["x.grad"] = join([r[1] for r in results], splits[0])
    actual.update(assemble([r[2] for r in results]))

    exact = plain_step(reference, full, x, dys, torch.float64)
    plain = plain_step(reference, full, x, dys, dtype)
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        assert_as_accurate(value, exact[name], plain[name], name=name)


def plain_step(
    reference: Callable[[Params, Tensor], Tensor | list[Tensor]],
    full: Params,
    x: Tensor,
    dys: list[Tensor],
    dtype: torch.dtype,
) -> Params:
    params = {name: value.to(dtype).requires_grad_() for name, value in full.items()}
    if x.is_floating_point():
        x = x.detach().to(dtype).requires_grad_()
    out = reference(params, x)
    outs = out if isinstance(out, list) else [out]
    torch.autograd.backward(outs, [dy.to(dtype) for dy in dys])
    found = {f"y{i}": y.detach() for i, y in enumerate(outs)}
    if x.is_floating_point():
        found["x.grad"] = x.grad
    return found | {name: param.grad for name, param in params.items()}


def linear(params: Params, prefix: str, x: Tensor) -> Tensor:
    return F.linear(x, params[f"{prefix}.weight"], params.get(f"{prefix}.bias"))


def plain_norm(params: Params, prefix: str, x: Tensor, kind: str, eps: float) -> Tensor:
    weight = params[f"{prefix}.weight"]
    if kind == "rmsnorm":
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    return F.layer_norm(x, weight.shape, weight, params[f"{prefix}.bias"], eps)


def plain_mlp(params: Params, prefix: str, x: Tensor, activation: str) -> Tensor:
    if activation == "swiglu":
        inner = F.silu(linear(params, f"{prefix}gate_up.gate", x)) * linear(params, f"{prefix}gate_up.up", x)
    else:
        inner = F.gelu(linear(params, f"{prefix}up", x), approximate="tanh")
    return linear(params, f"{prefix}down", inner)


def plain_rotate(x: Tensor, theta: float) -> Tensor:
    """x [S, B, heads, d]; feature i and i + d/2 are the real and imaginary part of a number that turns."""
    seq_len, head_dim = x.shape[0], x.shape[-1]
    speeds = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), speeds)[:, None, None]
    real, imaginary = x.tensor_split(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), -1)


def written_out_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax over the past, for q, k, v [S, B, heads, d]."""
    seq_len, head_dim = q.shape[0], q.shape[-1]
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / head_dim**0.5
    future = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
    return torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def plain_attention(
    params: Params, prefix: str, x: Tensor, *, heads: int, kv_heads: int, theta: float | None
) -> Tensor:
    """Every key and value head is repeated for its queries; the fp64 reference needs no kernel of torch's."""
    seq_len, batch, hidden = x.shape
    head_dim = hidden // heads
    q, k, v = (linear(params, f"{prefix}qkv.{name}", x).view(seq_len, batch, -1, head_dim) for name in ("q", "k", "v"))
    if theta is not None:
        q, k = plain_rotate(q, theta), plain_rotate(k, theta)
    k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    if x.dtype == torch.float64:
        y = written_out_attention(q, k, v)
    else:
        y = F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True)
        y = y.permute(2, 0, 1, 3)
    return linear(params, f"{prefix}out", y.reshape(seq_len, batch, hidden))


def plain_transformer(params: Params, config: TransformerConfig, tokens: Tensor) -> Tensor:
    """Logits [S, B, V] without dropout."""
    x = F.embedding(tokens.t(), params["embedding.weight"])
    if config.position == "learned":
        x = x + params["position.weight"][: tokens.shape[1], None]
    theta = config.rope_theta if config.position == "rope" else None
    outputs: list[Tensor] = []
    for index in range(config.layers):
        for name in ("attention", "mlp"):
            prefix = f"layers.{index}.{name}"
            # The ladder's blocks do not see the output of the block before.
            seen = outputs[:-1] if config.tp_sync == "ladder" else outputs
            h = plain_norm(params, f"{prefix}_norm", sum(seen, x), config.norm, config.norm_eps)
            if name == "attention":
                heads = {"heads": config.heads, "kv_heads": config.kv_heads}
                outputs.append(plain_attention(params, f"{prefix}.", h, **heads, theta=theta))
            else:
                outputs.append(plain_mlp(params, f"{prefix}.", h, config.activation))
    x = sum(outputs, x)
    x = plain_norm(params, "norm", x, config.norm, config.norm_eps)
    return F.linear(x, params["embedding.weight" if config.tied_embeddings else "output.weight"])
