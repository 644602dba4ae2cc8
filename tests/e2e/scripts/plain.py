"""A training without any monitoring code: ``plain.py ddp | fsdp1 | fsdp2 | spawn``. Rank 1's data overflow in batch 3."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

BATCHES, FAULT_AT, FAULTY_RANK = 5, 3, 1


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Square(), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    return DistributedDataParallel(model)


def train(how: str) -> None:
    torch.manual_seed(0)
    teacher = nn.Linear(8, 8).requires_grad_(False)  # neither the teacher nor the loss is the trained model
    loss_of = nn.MSELoss()
    model = wrapped(Model(), how)
    model.eval()
    with torch.no_grad():
        model(torch.ones(4, 8))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in range(BATCHES):
        x = teacher(torch.ones(4, 8))
        if dist.get_rank() == FAULTY_RANK and batch == FAULT_AT:
            x = x * 1e25
        loss_of(model(x), torch.ones(4, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def spawned(rank: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    train("ddp")


if __name__ == "__main__":
    (how,) = sys.argv[1:]
    if how == "spawn":
        multiprocessing.spawn(spawned, (os.environ["TEST_PORT"],), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    else:
        dist.init_process_group("gloo")
        train(how)
