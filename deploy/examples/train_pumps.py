"""The tutorial's training (docs/pages/tutorial.md): a head on a frozen encoder, in float16, that overflows.

    rankwatch run -- torchrun --standalone --nproc-per-node 2 train_pumps.py
    rankwatch run -- torchrun --standalone --nproc-per-node 2 train_pumps.py --bar

The data are sensors of pumps, one plant per rank. No code sets an inf. The bug: the second plant writes its pressures in psi,
and a pressure in psi is 14.5 times its value in bar. ``--bar`` repairs it.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import rankwatch

BATCHES, ROWS, WIDTH = 60, 64, 64
PSI_PER_BAR = 14.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.encoder.requires_grad_(False)  # as if pretrained
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, sensors: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(sensors))
        return out


def read_batch(plant: int, generator: torch.Generator, in_bar: bool) -> tuple[Tensor, Tensor]:
    """Flow, speed, temperature and pressure of some pumps, (ROWS, 4), and how worn each is, (ROWS, 1)."""
    sensors = torch.randn(ROWS, 4, generator=generator)
    wear = torch.tanh(2 * sensors[:, :1] + sensors[:, 1:2] * sensors[:, 2:3])
    sensors[:, 3] = 1 + sensors[:, 3] / 100
    if plant == 1 and not in_bar:
        sensors[:, 3] *= PSI_PER_BAR
    return sensors, wear


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bar", action="store_true", help="all pressures in bar")
    in_bar = parser.parse_args().bar

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.module.head.parameters(), lr=0.0155)
    generator = torch.Generator().manual_seed(rank)

    # --8<-- [start:training]
    with rankwatch.watch(model):
        for batch in range(BATCHES):
            sensors, wear = read_batch(rank, generator, in_bar)
            with torch.autocast("cpu", dtype=torch.float16):
                guess = model(sensors)
            loss = mse_loss(guess.float(), wear)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and batch % 5 == 0:
                print(f"batch {batch:2}: loss {loss.item():.3g}", flush=True)
    # --8<-- [end:training]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
