"""Trainings without a training-mode forward of the model: ``parts.py direct | eval | frozen RANK``.

The data of rank RANK overflow in batch 3. Rank 0 alone evaluates before each batch, and forgets ``no_grad``.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BATCHES, FAULT_AT = 5, 3


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(4, 4), Square())

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.decode(self.encode(x) * scale)

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out

    def decode(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.decoder(hidden)
        return out


def reduce(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def train(how: str, faulty: int) -> None:
    torch.manual_seed(0)
    model = AutoEncoder()
    adapter = nn.Linear(4, 4)
    if how == "frozen":
        model.requires_grad_(False)
    whole = DistributedDataParallel(model) if how == "eval" else model
    optimizer = torch.optim.SGD((adapter if how == "frozen" else model).parameters(), lr=0.001)
    if how != "direct":
        whole.eval()
    if how == "frozen":
        import rankwatch

        rankwatch.watch(model)  # without it, the adapter is watched: that is what is trained
    for batch in range(BATCHES):
        x = torch.ones(3, 4)
        if dist.get_rank() == 0:
            training = model.training
            model.eval()
            model.decode(model.encode(x)) if how == "direct" else model(x)
            model.train(training)
        scale = 1e30 if batch == FAULT_AT and dist.get_rank() == faulty else 1.0
        if how == "direct":
            loss = model.decode(model.encode(x) * scale).mean()
        else:
            loss = whole(adapter(x) if how == "frozen" else x, scale).mean()
        loss.backward()
        if how != "eval":
            reduce(adapter if how == "frozen" else model)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1], int(sys.argv[2]))
