"""A sharded training, ``sharded.py fsdp1|fsdp2``: rank 1 overflows in one batch, where the others wait in an all-gather."""

from __future__ import annotations

import functools
import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rankwatch

BATCHES, FAULT_AT, FAULTY_RANK = 8, 3, 1


class Scale(nn.Module):
    def forward(self, x: Tensor, gain: float) -> Tensor:
        return x * gain * gain


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = Scale()

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        return torch.tanh(self.scale(self.linear(x), gain))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, gain if index == 1 else 1.0)
        out: Tensor = self.head(x)
        return out


def shard(model: Model, how: str) -> nn.Module:
    if how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    return wrap(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = shard(Model(), sys.argv[1])
    with rankwatch.watch(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in range(BATCHES):
            gain = 1e30 if (batch, dist.get_rank()) == (FAULT_AT, FAULTY_RANK) else 1.0
            model(torch.randn(4, 8), gain).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
