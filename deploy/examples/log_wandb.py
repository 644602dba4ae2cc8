"""Logs the readings of rankwatch to your own W&B run: torchrun --nproc-per-node 2 log_wandb.py --dir runs

Rank 0 logs its readings every tenth batch. The run is offline, for `wandb sync`; without mode="offline" W&B uploads it at once.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import wandb
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import rankwatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default=".")
    parser.add_argument("--batches", type=int, default=50)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = wandb.init(project="rankwatch-example", mode="offline", dir=options.dir) if dist.get_rank() == 0 else None
    with rankwatch.watch(model, gradients=True) as watch:
        for batch in range(options.batches):
            x = torch.randn(64, 8)
            loss = mse_loss(model(x), x.amax(dim=1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run and batch % 10 == 0:
                run.log({"loss": loss.item(), **watch.summaries()}, step=batch)
    if run:
        run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
