"""A DDP training of two ranks whose loss goes bad on rank 1 in batch 5, with finite outputs: ``losses.py WHAT``.

ignored   cross entropy in which every label is ignored: nan, with gradients of 0
tokens    a sum of losses that is divided by a number of tokens that is 0: nan
nan       a loss that is nan times the right one, under a GradScaler, after two micro-batches without a reduction
shrinks   from batch 3 on a gradient of the loss is inf, so that the scale shrinks for ever
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

STEPS, GUILTY, BATCH = 40, 1, 5


def loss_of(what: str, out: Tensor, is_bad: bool) -> Tensor:
    labels = torch.zeros(len(out), dtype=torch.long)
    if what == "ignored" and is_bad:
        labels.fill_(-100)
    loss = functional.cross_entropy(out, labels)
    if what == "tokens":
        mask = torch.zeros(len(out)) if is_bad else torch.ones(len(out))
        loss = (functional.cross_entropy(out, labels, reduction="none") * mask).sum() / mask.sum()
    if what == "nan" and is_bad:
        loss = loss * math.nan
    return loss


def main(what: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=what in ("nan", "shrinks"))
    for batch in range(STEPS):
        is_guilty = dist.get_rank() == GUILTY
        with model.no_sync() if batch % 2 and what == "nan" else nullcontext():
            out = model(torch.randn(5, 4))
            if what == "shrinks" and batch >= 3 and is_guilty:
                out.register_hook(lambda gradient: gradient * math.inf)
            scaler.scale(loss_of(what, out, is_guilty and batch == BATCH)).backward()
        if batch % 2 or what != "nan":
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
