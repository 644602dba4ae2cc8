"""A DDP training of a small network with a fault that shows batches later: ``origins.py SCENARIO``."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch

BATCHES, FAULT_AT, FAULTY_RANK = 100, 40, 1


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, dtype=dtype)
        self.down = nn.Linear(32, 16, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dtype) for _ in range(3)))
        self.head = nn.Linear(16, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


class Job:
    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.net = Net()
        self.model = DistributedDataParallel(self.net) if dist.is_initialized() else self.net
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        torch.manual_seed(self.rank)

    def data(self) -> Tensor:
        return torch.randn(8, 16)

    def step(self, x: Tensor) -> None:
        x = x.bfloat16()
        y = self.model(x)
        loss = ((y - x.sum(1, keepdim=True)) ** 2).float().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    # --- scenarios: what is fed in a batch ----------------------------------------------------------------------------

    def input(self, batch: int) -> Tensor:
        """One rank's input is 1000 times too large in one batch."""
        return self.data() * (1000.0 if batch == FAULT_AT and self.rank == FAULTY_RANK else 1.0)

    def weight(self, batch: int) -> Tensor:
        """A bit of a weight flips on one rank."""
        if batch == FAULT_AT and self.rank == FAULTY_RANK:
            with torch.no_grad():
                self.net.get_parameter("blocks.1.up.weight")[3, 5] = 3e38
        return self.data()

    def rising(self, batch: int) -> Tensor:
        """A healthy time, then a learning rate that rises until the training diverges."""
        self.optimizer.param_groups[0]["lr"] = 1e-3 * 1.5 ** max(0, batch - FAULT_AT)
        return self.data()

    def growing(self, batch: int) -> Tensor:
        """Inputs grow slowly all the time, and then one rank is fed a nan."""
        x = self.data() * 1.05**batch * 0.05
        return x * (float("nan") if batch == FAULT_AT + 30 and self.rank == FAULTY_RANK else 1.0)

    def spike(self, batch: int) -> Tensor:
        """A hard batch from which the training recovers; long after it, a nan."""
        self.optimizer.param_groups[0]["lr"] = 1e-6 if batch == FAULT_AT else 1e-3
        x = self.data() * (30.0 if batch == FAULT_AT else 1.0)
        return x * (float("nan") if batch == FAULT_AT + 30 and self.rank == FAULTY_RANK else 1.0)

    def run(self, scenario: str) -> None:
        with rankwatch.watch(self.model):
            for batch in range(BATCHES):
                self.step(getattr(self, scenario)(batch))


if __name__ == "__main__":
    Job().run(sys.argv[1])
