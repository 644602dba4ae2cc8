"""A DDP training under faults: ``soak_rank.py FOLDER``. Each rank logs its events to FOLDER.

Rank 0 reads ``FOLDER/command`` before each batch and broadcasts it: ``finish``, or ``trip R B``: rank R overflows in batch B.
Each rank appends to ``FOLDER/rank-R``, line by line: its process id, ``begun B`` and ``done B`` for each batch, ``trip B`` before
it overflows, and how it ended.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch

PACE = 0.05
"""Seconds from batch to batch."""

GO_ON, FINISH, TRIP = range(3)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def command(folder: Path) -> Tensor:
    """[what, rank, batch], the same on all ranks."""
    words = ["go"]
    if dist.get_rank() == 0 and (folder / "command").exists():
        words = (folder / "command").read_text().split()
    what = {"go": GO_ON, "finish": FINISH, "trip": TRIP}[words[0]]
    told = torch.tensor([what, *map(int, words[1:]), 0, 0][:3])
    dist.broadcast(told, 0)
    return told


def train(folder: Path, log: Path) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    gate = Gate()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), gate, nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with log.open("a", buffering=1) as told, rankwatch.watch(model):
        told.write(f"pid {os.getpid()}\n")
        batch = 0
        try:
            while True:
                what, culprit, at = command(folder).tolist()
                if what == FINISH:
                    break
                if (what, culprit, at) == (TRIP, rank, batch):
                    gate.gain = float("inf")
                    told.write(f"trip {batch}\n")
                told.write(f"begun {batch}\n")
                loss = model(torch.randn(4, 8)).square().mean()
                told.write(f"done {batch}\n")  # a batch is its forward
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                batch += 1
                time.sleep(PACE)
        except BaseException as error:
            told.write(f"ended {type(error).__name__}\n")
            raise
        told.write("ended well\n")


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    train(folder, folder / f"rank-{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
