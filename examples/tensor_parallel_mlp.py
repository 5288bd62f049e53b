"""torchrun --nproc-per-node 2 examples/tensor_parallel_mlp.py"""

import torch
import torch.distributed as dist

from fusedcomm.nn import ColumnParallelLinear, RowParallelLinear, TensorParallel


class Block(torch.nn.Module):
    def __init__(self, hidden: int, inner: int, tp: TensorParallel) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(hidden, inner, tp=tp, bias=True)  # gathers rows while it multiplies
        self.down = RowParallelLinear(inner, hidden, tp=tp, bias=True)  # sends sums while it multiplies

    def forward(self, x_shard: torch.Tensor) -> torch.Tensor:  # [rows / ranks, hidden] -> the same
        return x_shard + self.down(torch.nn.functional.gelu(self.up(x_shard)))


dist.init_process_group()
torch.manual_seed(0)
model = Block(64, 256, TensorParallel(dist.group.WORLD))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(512, 64).chunk(dist.get_world_size())[dist.get_rank()]  # this rank's rows
for _ in range(50):
    loss = (model(x) - x.roll(1, dims=1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
dist.destroy_process_group()
