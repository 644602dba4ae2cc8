"""A DDP training of two ranks, of which rank 1 has fewer batches than rank 0 and ends."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch

BATCHES = 30, 20


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 1))
    with rankwatch.watch(model):
        for _ in range(BATCHES[dist.get_rank()]):
            model(torch.randn(4, 8)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
