"""What a rank holds by the planner's count is what autograd really keeps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from test_plan_search import config_with

from fusedcomm.nn import TensorParallel, Transformer
from fusedcomm.plan import memory
from fusedcomm.train.config import Config


def _saved_bytes(rank: int, world: int, config: Config) -> int:
    shape, tensor = config.transformer(), config.parallel_config.tensor_parallel
    dtype = torch.float32 if config.train.precision == "fp32" else torch.bfloat16
    group = dist.group.WORLD
    tp = TensorParallel(group, method="chunked", save=tensor.save)
    stage = Transformer(shape, tp=tp, layers=[0], first=False, last=False, dtype=dtype)
    weights = {param.untyped_storage().data_ptr() for param in stage.parameters()}
    # Kept alive, so that no two have the same address.
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(shape.seq_len // world, 4, shape.hidden, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stage(x, torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in weights)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "kv_heads"), [("llama", 2), ("gpt2", 4)])
@pytest.mark.parametrize("save", ["shard", "gathered"])
def test_kept_bytes_are_those_that_autograd_keeps(world, precision, kind, kv_heads, save):
    config = config_with(
        tp=world,
        tensor={"save": save},
        train={"precision": precision},
        model={"kind": kind, "kv_heads": kv_heads, "hidden": 128, "layers": 1},
    )
    tokens = 4 * config.data.seq_len
    expected = memory.kept_bytes(config, config.transformer(), [0], tokens=tokens)
    # The rest is rotations, statistics of norms and the like.
    assert expected == pytest.approx(run_ranks(world, _saved_bytes, config)[0], rel=0.03)
