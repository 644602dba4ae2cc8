"""A DDP training that files in a shared folder control: ``told.py FOLDER``.

``stop``: all ranks end after the same batch. ``overflow-R``: rank R overflows in its next batch.
``kill-R``: it kills itself. The ranks also write files:
``trained-R``, once rank R has trained some batches, holds its host; ``ended`` holds the number of batches.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch

SOME, PAUSE = 3, 0.05


class Square(nn.Module):
    """x -> gain * x * x: with a gain of 1e38 float32 overflows from |x| = 1.9 on."""

    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * x * self.gain


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.square = Square()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.square(self.linear(x) + 2.0))


def is_told_to_stop(folder: Path) -> bool:
    """Only rank 0 looks for the file, so all ranks end with the same batch."""
    told = torch.tensor(float((folder / "stop").exists()))
    dist.broadcast(told, 0)
    return bool(told)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
    batch = 0
    with rankwatch.watch(wrapped):
        while not is_told_to_stop(folder):
            if (folder / f"overflow-{rank}").exists():
                model.square.gain = 1e38
            if (folder / f"kill-{rank}").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            wrapped(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            batch += 1
            if batch == SOME:
                (folder / f"trained-{rank}").write_text(f"{socket.gethostname()} {os.environ.get('SLURM_RESTART_COUNT', 0)}")
            time.sleep(PAUSE)  # many ranks share two cores
    if rank == 0:
        (folder / "ended").write_text(str(batch))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
