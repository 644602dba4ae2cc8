"""Trainings that end without an inf or nan, and went badly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trainings.case import Training

from .policies import Adversaries
from .truth import badly
from .well import classes, draw, net, points, trained


@badly("loss-grown")
def a_divergence_in_bfloat16() -> Training:
    """From batch 40 on the rate is a little too large for the steepest direction: 0.7 becomes 1e14, far from bfloat16's end."""
    model = nn.Linear(8, 1)
    x, _ = points(0)
    steepest = torch.linalg.eigvalsh(2 * x.T @ x / len(x))[-1].item()

    def loss(number: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.mse_loss(out.squeeze(1).float(), x.sum(1))

    optimizer = torch.optim.SGD(model.parameters())
    return trained(model, loss, optimizer, lambda number: (0.1 if number < 40 else 2.07) / steepest)


@badly("loss-grown")
def a_rate_that_is_too_large() -> Training:
    """Adam at 20 after a warm-up of 30 batches: the loss settles at many times what it began with."""
    model = net(64)
    return trained(model, classes(model), torch.optim.Adam(model.parameters()), lambda number: 1e-3 if number < 30 else 20.0)


@badly("gradient-zero")
def units_that_are_dead() -> Training:
    """One large step at batch 50 leaves no unit that any input turns on."""
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))

    def loss(number: int) -> Any:
        if number == 50:
            with torch.no_grad():
                model[0].bias.fill_(-100.0)
        return classes(model)(number)

    return trained(model, loss)


@badly("weights-unchanged")
def a_rate_of_zero() -> Training:
    model = net()
    return trained(model, classes(model), torch.optim.Adam(model.parameters(), 0.0))


@badly("weights-unchanged")
def a_rate_that_ends_too_soon() -> Training:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    return trained(model, classes(model), optimizer, lambda number: max(0.0, 1e-3 * (1 - number / 100)))


@badly("no-step", 400)
def steps_that_are_skipped() -> Training:
    """A threshold that no gradient passes any more."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        classes(model)(number).backward()
        if number < 60:
            optimizer.step()

    return Training(model, step)


@badly("one-sided", 400)
def a_generator_that_is_beaten() -> Training:
    """Its critic is sure of everything, and the generator has nothing to learn from."""
    model = Adversaries()
    critic = torch.optim.Adam(model.critic.parameters(), 0.03)
    generator = torch.optim.SGD(model.generator.parameters(), 1e-6)

    def step(number: int) -> None:
        g = draw(number)
        real = torch.randn(64, 2, generator=g) * 0.1 + 3.0
        fake = model(torch.randn(64, 2, generator=g), "generator")
        critic.zero_grad()
        (F.softplus(-model(real, "critic")).mean() + F.softplus(model(fake.detach(), "critic")).mean()).backward()
        critic.step()
        generator.zero_grad()
        F.softplus(-model(fake, "critic")).mean().backward()
        generator.step()

    return Training(model, step)


@badly("output-grown")
def an_output_that_runs_away() -> Training:
    """The loss is bounded, and has no slope that leads back."""
    model = net(out=1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)

    def loss(number: int) -> Any:
        x, _ = points(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.06)
        out = model(x).squeeze(1)
        return torch.sin(1e3 * out).square().mean()

    return trained(model, loss, optimizer)


@badly("no-gradient")
def an_encoder_that_is_detached() -> Training:
    """The head learns from what an untrained encoder makes of its input."""
    model = nn.ModuleDict({"encoder": net(out=16), "head": nn.Linear(16, 4)})
    model.forward = lambda x: model["head"](model["encoder"](x).detach())
    return trained(model, classes(model), torch.optim.SGD(model.parameters(), 0.1))
