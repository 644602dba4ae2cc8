"""A DDP training of two ranks whose weights run away after 80 batches, and stay so until the file FOLDER/back is there; then they
are as before, until FOLDER/end is: ``comes_back.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch

WELL = 80
PATIENCE = 50_000
"""Batches after which it ends in any case."""


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    number = 0

    def batch() -> None:
        nonlocal number
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(2 * (number % 20) + dist.get_rank()))
        (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1

    def seen(name: str) -> bool:
        """On all ranks at once."""
        found = torch.tensor(float((Path(folder) / name).exists()))
        dist.all_reduce(found)
        return bool(found == dist.get_world_size()) or number > PATIENCE

    with rankwatch.watch(model):
        for _ in range(WELL):
            batch()
        known = {name: one.clone() for name, one in net.state_dict().items()}
        optimizer.param_groups[0]["lr"] = 1e-9
        with torch.no_grad():
            for one in net.parameters():
                one.mul_(30.0)
        while not seen("back"):
            batch()
        net.load_state_dict(known)
        optimizer.param_groups[0]["lr"] = 0.01
        while not seen("end"):
            batch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
