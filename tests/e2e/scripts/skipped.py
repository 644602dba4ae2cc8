"""DDP trainings in which rank 1's data is bad in some batches: ``skipped.py NAME``. ``test_skip.py`` has the truths."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankwatch
from rankwatch.hook.step import guard

BATCHES = 14
BAD = {"nan": (5, 9), "by_hand": (5, 9), "zeros": (3, 6, 9), "all": tuple(range(5, BATCHES))}
BAD |= dict.fromkeys(("killed", "stands", "broken", "without"), (5,))
"""By the name of a training, its bad batches."""


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x / x.norm(dim=-1, keepdim=True)  # 0 / 0
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit, self.first, self.norm, self.head = Unit(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.norm(self.first(self.unit(x)))))
        return out


def fed(name: str, batch: int) -> Tensor:
    torch.manual_seed(1000 * dist.get_rank() + batch)
    x = torch.randn(16, 8)
    if batch in BAD[name] and dist.get_rank() == 1:
        x[3] = 0.0 if name == "zeros" else float("nan")
    return x


def main(name: str) -> None:
    """``by_hand``: the training itself does not run the bad batches. ``killed``, ``stands``: rank 1 never comes to the bad step.

    ``broken``: rank 1's detector has an error of its own in batch 2; ``without``: the same, without the bad batch.

    In these four, the script adds the gradients, so that the ranks ask each other before each step.
    """
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    is_summed, is_ended = name in ("killed", "stands", "broken", "without"), name in ("killed", "stands")
    model = Net() if is_summed else DDP(Net())
    rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in range(BATCHES):
        x = fed(name, batch)
        if name in ("by_hand", "without") and batch in BAD[name]:
            continue
        if name == "broken" and batch == 2 and dist.get_rank() == 1:
            vars(guard)["norms_of"] = None
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if is_summed:
            for value in model.parameters():
                dist.all_reduce(value.grad)
        if is_ended and batch in BAD[name] and dist.get_rank() == 1:
            if name == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        optimizer.step()
    numbers = torch.cat([value.detach().double().flatten() for value in model.state_dict().values()]).tolist()
    print(f"rank {dist.get_rank()}: {numbers}\n", end="", flush=True)  # in one piece: another rank writes, too
    dist.destroy_process_group()


main(sys.argv[1])
