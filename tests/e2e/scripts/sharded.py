"""A sharded training, ``sharded.py fsdp1|fsdp2|tp|fsdp2+tp``.

Rank 2 overflows in one batch, while the others wait for it. Before that, rank 0 saves the whole weights; the test compares
the report with them.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import rankwatch

BATCHES, FAULT_AT, FAULTY_RANK = 8, 3, 2


class Scale(nn.Module):
    def forward(self, x: Tensor, gain: float) -> Tensor:
        return x * gain * gain


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.scale = Scale()
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.scale(self.up(x), gain)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x, gain if index == 1 else 1.0)
        out: Tensor = self.head(x)
        return out


def shard(model: Model, how: str) -> nn.Module:
    if how == "fsdp1":
        units = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=units, device_id=torch.device("cpu"), use_orig_params=True)
    if how == "fsdp2+tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        return shard_fully(shard_tensors(model, mesh["tensor"]), mesh["data"])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return shard_tensors(model, mesh) if how == "tp" else shard_fully(model, mesh)


def shard_tensors(model: Model, mesh: DeviceMesh) -> Model:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def shard_fully(model: Model, mesh: DeviceMesh) -> Model:
    from torch.distributed.fsdp import fully_shard

    for module in (model.first, *model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def save_weights(model: nn.Module) -> None:
    """Saves the current whole weights under the user's names: a collective of all ranks."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            whole = {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}
    else:
        whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(whole, os.environ["WEIGHTS_FILE"])


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = shard(Model(), sys.argv[1])
    with rankwatch.watch(model, weights_every=0):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in range(BATCHES):
            if batch == FAULT_AT:
                save_weights(model)
            is_now = (batch, dist.get_rank()) == (FAULT_AT, FAULTY_RANK)
            model(torch.randn(4, 8), 1e30 if is_now else 1.0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
