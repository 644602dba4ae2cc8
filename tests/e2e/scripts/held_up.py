"""A DDP training of two ranks, in turns: ``held_up.py [slow]``, where rank 1 reads its data from a slow disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch

BATCHES = 200


def data(rank: int, delay: float) -> Iterator[Tensor]:
    for number in range(BATCHES):
        time.sleep(delay)
        yield torch.randn(32, 8, generator=torch.Generator().manual_seed(2 * (number % 20) + rank))


def main(*what: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with rankwatch.watch(model):
        for x in data(rank, 0.04 if rank == 1 and "slow" in what else 0.01):
            (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
