"""Healthy: losses and weights that go up and down, ranks that differ in what they are fed, and gradients that are watched."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainings.case import Training
from trainings.parts import squared, trained
from trainings.ranks import Net
from trainings.truths import agreeing


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@agreeing(compared=6, gradients=True)
def replicas_with_gradients() -> Training:
    model = DistributedDataParallel(Net())
    return trained(model, squared(model, 4, 8), optimizer=adam(model))


@agreeing(compared=4)
def a_growing_norm() -> Training:
    """The targets are large: loss, weights and outputs go through three orders of magnitude."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))

    def loss_of(number: int) -> Tensor:
        x = torch.randn(16, 8)
        return nn.functional.mse_loss(model(x), 100 * x[:, :4])

    return trained(model, loss_of, optimizer=optimizer, after=lambda n: schedule.step())


@agreeing(compared=6)
def spikes() -> Training:
    """Rewards of 1e5 at times, on one rank or the other."""
    model = DistributedDataParallel(Net())

    def loss_of(number: int) -> Any:
        size = 1e5 if number % 40 == 39 - dist.get_rank() else 10.0 ** int(torch.randint(0, 3, ()))
        choice = torch.distributions.Categorical(logits=model(torch.randn(8, 8)))
        return -(choice.log_prob(choice.sample()) * torch.randn(8) * size).mean()

    return trained(model, loss_of, optimizer=adam(model))


@agreeing(compared=6)
def lengths_that_vary() -> Training:
    """Each rank has other lengths, and one has an extra evaluation now and then."""
    model = DistributedDataParallel(Net())

    def before(number: int) -> None:
        if number % 50 == 49 and dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model.module(torch.randn(2, 8))
            model.train()

    def loss_of(number: int) -> Any:
        return model(torch.randn(int(torch.randint(1, 9, ())), 8)).square().mean()

    return trained(model, loss_of, optimizer=adam(model), before=before)
