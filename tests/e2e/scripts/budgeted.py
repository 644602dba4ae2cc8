"""A training under a budget, with a fault late in it on the last rank: ``budgeted.py HOW``. ``test_budget.py`` has the truths.

Batches are short, so the fault comes in a batch that is never one of those that are measured in full: its number is prime.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import rankwatch

BAD, BATCHES = 797, 900


class Gain(nn.Module):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Length(nn.Module):
    """Its slope at 0 is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().sum(-1, keepdim=True).sqrt()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 8, bias=False), Gain(), nn.Linear(8, 8, bias=False), Length(), nn.Linear(8, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def main(how: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net, is_culprit = Net(), dist.get_rank() == dist.get_world_size() - 1
    model: Any = fully_shard(net) if how == "fsdp" else DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-7)
    gain = next(part for part in net.modules() if isinstance(part, Gain))
    with rankwatch.watch(model):
        for number in range(60 if how == "fsdp" else BATCHES):
            is_bad = is_culprit and number == BAD
            gain.gain = {"forward": 3e38, "gradient": 0.0}.get(how, 1.0) if is_bad else 1.0
            loss = model(torch.randn(4, 8) * 10).square().mean()
            if is_bad and how == "loss":
                loss = loss / (loss.detach() - loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
