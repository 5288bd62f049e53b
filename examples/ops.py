"""torchrun --nproc-per-node 2 examples/ops.py"""

import torch
import torch.distributed as dist

import fusedcomm

dist.init_process_group()
group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
x_shard = torch.randn(512 // world, 64, requires_grad=True)  # this rank's rows
w_up, w_down = torch.randn(256, 64) / 8, torch.randn(64, 256) / 16  # this rank's output and input features
y = fusedcomm.all_gather_matmul(x_shard, w_up, group=group)  # all rows: [512, 256]
z = fusedcomm.matmul_reduce_scatter(y, w_down, group=group)  # this rank's rows, summed: [256, 64]
z.square().mean().backward()  # the backward overlaps too
print(f"{tuple(y.shape)} {tuple(z.shape)} {fusedcomm.last_path()}", flush=True)
dist.destroy_process_group()
