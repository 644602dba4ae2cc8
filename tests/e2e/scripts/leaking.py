"""The last rank keeps 16 MiB of each batch, and is killed once it has kept a gigabyte, as the kernel does for want of memory."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from torch import nn

import rankwatch

BATCHES = 64
KEPT = 16 << 20


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = []
    with rankwatch.watch(model):
        for batch in range(BATCHES + 1):
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and batch == 20:
                torch.save(model.state_dict(), os.environ["SAVED"])
            if dist.get_rank() == dist.get_world_size() - 1:
                kept.append(torch.full((KEPT // 4,), float(batch)))
                if batch == BATCHES:
                    os.kill(os.getpid(), signal.SIGKILL)
            dist.monitored_barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
