"""Logs the readings of rankwatch to your own TensorBoard: torchrun --nproc-per-node 2 log_tensorboard.py --logdir runs

Rank 0 logs its readings every tenth batch. Then: tensorboard --logdir runs
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

import rankwatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--logdir", default="runs")
    parser.add_argument("--batches", type=int, default=50)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    writer = SummaryWriter(options.logdir) if dist.get_rank() == 0 else None
    with rankwatch.watch(model, gradients=True) as watch:
        for batch in range(options.batches):
            x = torch.randn(64, 8)
            loss = mse_loss(model(x), x.amax(dim=1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if writer and batch % 10 == 0:
                writer.add_scalar("loss", loss.item(), batch)
                for name, value in watch.summaries().items():
                    writer.add_scalar(name, value, batch)
    if writer:
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
