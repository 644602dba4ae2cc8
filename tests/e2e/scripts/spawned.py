"""Two ranks that ``torch.multiprocessing`` spawns train with a buffer in shared memory; rank 1 divides by 0 in batch 5."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import rankwatch


class Net(nn.Module):
    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.linear, self.shared, self.rank = nn.Linear(4, 4), shared, dist.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x) + self.shared
        return h / (h - h) if self.rank == 1 and x[0, 0] > 3 else h


def train(rank: int, shared: Tensor, store: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(Net(shared))
    rankwatch.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch in range(8):
        x = torch.rand(6, 4)
        if batch == 5:
            x[0, 0] = 4
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    mp.spawn(train, (torch.zeros(4).share_memory_(), os.path.abspath("store")), 2)  # type: ignore[attr-defined, no-untyped-call]
