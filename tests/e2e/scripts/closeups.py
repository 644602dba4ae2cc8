"""A DDP training of two ranks in which rank 1 goes bad in batch 5: ``closeups.py WHAT``. The guilty line ends in ``# WHAT``.

half  a product of float16 numbers beyond 65504, called through two helper functions
once  the output is poisoned from outside, once: it does not recur
"""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import rankwatch

STEPS, GUILTY, BATCH = 8, 1, 5


def product(left: Tensor, right: Tensor) -> Tensor:
    return torch.matmul(left, right.transpose(-1, -2))  # half


def scores(x: Tensor) -> Tensor:
    half = x.half()
    return product(half, half).float()


class Attention(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(8, 8)
        self.is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.what == "half":
            return scores(x * (200.0 if self.is_bad else 1.0))
        return x


@record
def main(what: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    attention, poison = Attention(what), list[float]()
    attention.register_forward_hook(lambda module, inputs, output: output * poison.pop() if poison else None)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), attention))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with rankwatch.watch(model):
        for batch in range(STEPS):
            if dist.get_rank() == GUILTY and batch == BATCH:
                attention.is_bad = what == "half"
                poison += [math.nan] * (what == "once")
            model(torch.randn(16, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
