"""Trains with ``norms.py ddp|fsdp1|fsdp2 whole|clipped`` on two ranks; rank 0 prints the norm of all gradients in each step."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import rankwatch

CLIPPED = 0.01


def wrapped(model: nn.Sequential, how: str) -> Any:
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "fsdp1":
        return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True)
    from torch.distributed.fsdp import fully_shard  # torch 2.6

    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole_norm(model: nn.Module, how: str) -> float:
    """Without what torch computes it with."""
    square = torch.zeros((), dtype=torch.float64)
    for value in model.parameters():
        if value.grad is not None:
            shard: Tensor = value.grad.to_local() if how == "fsdp2" else value.grad  # type: ignore[attr-defined]
            square += shard.double().square().sum()
    if how != "ddp":
        dist.all_reduce(square)
    return square.sqrt().item()


def main() -> None:
    how, clips = sys.argv[1], sys.argv[2] == "clipped"
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rankwatch.watch(model)
    norms = []
    for batch in range(4):
        torch.manual_seed(10 * batch + dist.get_rank())
        model(torch.randn(4, 8)).square().mean().backward()
        norms.append(whole_norm(model, how))
        if clips and how == "fsdp1":
            model.clip_grad_norm_(CLIPPED)
        elif clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("norms", json.dumps(norms), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
