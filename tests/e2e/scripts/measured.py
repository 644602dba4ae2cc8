"""A DDP training of two ranks whose model measures itself: in batch 3 of rank 1 no label is of the last class, 0/0.

measured.py beside   the measure is returned beside the logits
measured.py used     the loss is weighted by it
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch

BAD, STEPS = 3, 8


class Recall(nn.Module):
    """Of each class, the share that was found."""

    @torch.no_grad()
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        found = torch.zeros(4).index_add(0, labels, (logits.argmax(-1) == labels).float())
        return found / torch.bincount(labels, minlength=4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.recall = nn.Linear(4, 8), nn.Linear(8, 4), Recall()

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x).relu())
        return logits, self.recall(logits, labels)


def main(what: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with rankwatch.watch(model):
        for step in range(STEPS):
            labels = torch.arange(8) % (3 if (rank, step) == (1, BAD) else 4)
            logits, recall = model(torch.randn(8, 4), labels)
            each = nn.functional.cross_entropy(logits, labels, reduction="none")
            loss = (each * (2 - recall.mean())).mean() if what == "used" else each.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
