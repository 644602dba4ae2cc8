"""From its fourth batch on, the last rank loads data only when the file STALL_FILE is there, and the others wait in all_reduce:
with the argument ``async``, for one that they have begun before."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rankwatch

FAULT_AT = 3


def load(batch: int) -> Tensor:
    while batch >= FAULT_AT and dist.get_rank() == dist.get_world_size() - 1 and not Path(os.environ["STALL_FILE"]).exists():
        time.sleep(0.2)
    return torch.ones(4, 8)


def main() -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with rankwatch.watch(model):
        for batch in range(6):
            loss = model(load(batch)).square().mean()
            loss.backward()
            if "async" in sys.argv:
                work = dist.all_reduce(loss.detach(), async_op=True)
                work.wait()
            dist.all_reduce(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
