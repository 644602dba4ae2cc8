"""Healthy supervised trainings: some whose loss falls, and some whose loss rises or stands as it is meant to."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainings.case import Training

from .truth import peace, well

Losses = Callable[[int], Any]


def draw(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def net(width: int = 32, out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, out))


def trained(
    model: nn.Module, loss: Losses, optimizer: Any = None, schedule: Callable[[int], float] | None = None
) -> Training:
    """One step a batch; ``schedule``: the learning rate of a batch."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3) if optimizer is None else optimizer

    def step(number: int) -> Any:
        if schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = schedule(number)
        optimizer.zero_grad()
        value = loss(number)
        value.backward()
        optimizer.step()
        return value.item()

    return Training(model, step)


def points(number: int, rows: int = 32) -> tuple[Tensor, Tensor]:
    """Four classes by the signs of two sums."""
    x = torch.randn(rows, 8, generator=draw(number))
    return x, (x[:, :4].sum(1) > 0).long() + 2 * (x[:, 4:].sum(1) > 0).long()


def classes(model: nn.Module) -> Losses:
    def loss(number: int) -> Any:
        x, y = points(number)
        return F.cross_entropy(model(x), y)

    return loss


@well()
def a_classifier() -> Training:
    model = net()
    return trained(model, classes(model))


@well()
def a_classifier_in_bfloat16() -> Training:
    model = net()
    forward = classes(model)

    def loss(number: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(number)

    return trained(model, loss)


@well()
def momentum_and_a_cosine() -> Training:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return trained(model, classes(model), optimizer, lambda number: 0.05 * (1 + math.cos(math.pi * number / 320)))


@peace()
def warm_restarts_of_the_rate() -> Training:
    """On few rows, so that the loss is tiny when the rate is large again."""
    model = net()
    x, y = points(0, 24)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    return trained(
        model,
        lambda number: F.cross_entropy(model(x), y),
        optimizer,
        lambda n: 0.15 * (1 + math.cos(math.pi * (n % 90) / 90)),
    )


@peace()
def learnt_by_heart_with_a_large_rate() -> Training:
    model = net(64)
    x, y = points(0, 48)
    return trained(model, lambda number: F.cross_entropy(model(x), y), torch.optim.Adam(model.parameters(), 0.05))


@well()
def large_targets() -> Training:
    """The output grows from 0.1 to 10,000, as prices do."""
    model = net(out=1)
    scale = nn.Parameter(torch.ones(()))
    model.register_parameter("scale", scale)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model.append(Scaled())

    def loss(number: int) -> Any:
        x, _ = points(number)
        return F.mse_loss(model(x).squeeze(1), 300.0 * x.sum(1))

    return trained(model, loss, torch.optim.Adam(model.parameters(), 0.3) if optimizer else None)


class Scaled(nn.Module):
    """An output that is learnt in logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.log.exp()


@peace()
def a_curriculum() -> Training:
    """Noisier from lesson to lesson, after an easy one that is learnt to a tiny loss."""
    model = net(out=1)

    def loss(number: int) -> Any:
        x, _ = points(number % 4)
        noise = 0.0 if number < 160 else 0.5 * (1 + number // 160)
        return F.mse_loss(model(x).squeeze(1), x[:, 0] + noise * torch.randn(32, generator=draw(number)))

    return trained(model, loss, torch.optim.Adam(model.parameters(), 0.02))


@peace(400)
def one_task_after_another() -> Training:
    """Each task is forgotten for the next."""
    model = net()

    def loss(number: int) -> Any:
        x, y = points(number % 3)
        return F.cross_entropy(model(x), (y + number // 100) % 4)

    return trained(model, loss, torch.optim.Adam(model.parameters(), 0.02))


@peace()
def fine_tuned_at_its_minimum() -> Training:
    model = net()
    forward = classes(model)
    before = trained(model, forward)
    for number in range(1500):
        before.step(number + 1000)
    return trained(model, forward, torch.optim.AdamW(model.parameters(), 1e-5))


@peace()
def labels_that_are_noise() -> Training:
    model = net()

    def loss(number: int) -> Any:
        x, _ = points(number)
        return F.cross_entropy(model(x), torch.randint(4, (32,), generator=draw(number)))

    return trained(model, loss)


@well()
def adapters_that_begin_at_zero() -> Training:
    """Frozen, but for an adapter whose output is 0 at first, under a rate that begins at 0."""
    base = net()
    for parameter in base.parameters():
        parameter.requires_grad_(False)
    down, up = nn.Linear(8, 4, bias=False), nn.Linear(4, 4, bias=False)
    nn.init.zeros_(up.weight)
    model = Both(base, nn.Sequential(down, up))
    optimizer = torch.optim.Adam([*down.parameters(), *up.parameters()], 0.01)
    return trained(model, classes(model), optimizer, lambda number: 0.02 * min(1.0, number / 100) ** 3)


class Both(nn.Module):
    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> Any:
        return self.one(x) + self.other(x)


@peace()
def layers_that_are_thawed() -> Training:
    model = net()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    forward = classes(model)

    def loss(number: int) -> Any:
        if number == 200:
            for parameter in model[0].parameters():
                parameter.requires_grad_(True)
        return forward(number)

    return trained(model, loss)


@peace()
def an_embedding_alone() -> Training:
    """Few of its rows change, and neither its largest nor its smallest number."""
    table = nn.Embedding(1000, 8)
    with torch.no_grad():
        table.weight[900] = 50.0
        table.weight[901] = 0.0
    head = nn.Linear(8, 4)
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    model = nn.Sequential(table, head)

    def loss(number: int) -> Any:
        tokens = torch.randint(64, (32,), generator=draw(number))
        return F.cross_entropy(model(tokens), tokens % 4)

    return trained(model, loss, torch.optim.SGD(table.parameters(), 5.0))


@peace()
def an_image_through_a_frozen_net() -> Training:
    """What is trained is no weight: style transfer, adversarial examples, inversion."""
    model = net()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    image = nn.Parameter(torch.randn(1, 8))
    target = torch.randn(1, 4)
    return trained(model, lambda number: F.mse_loss(model(image), target), torch.optim.Adam([image], 0.02))


@peace()
def a_hinge_that_is_satisfied() -> Training:
    """The loss and its gradients become exactly 0: all is learnt."""
    model = nn.Linear(8, 1)
    x = torch.randn(16, 8)
    y = torch.where(x[:, 0] > 0, 1.0, -1.0)
    return trained(
        model, lambda number: F.relu(0.1 - y * model(x).squeeze(1)).mean(), torch.optim.SGD(model.parameters(), 0.5)
    )


@peace()
def batches_that_grow() -> Training:
    """Their losses are summed."""
    model = net()

    def loss(number: int) -> Any:
        x, y = points(number, 8 << min(5, number // 50))
        return F.cross_entropy(model(x), y, reduction="sum")

    return trained(model, loss, torch.optim.Adam(model.parameters(), 1e-3))


@well()
def a_decoder_of_noise() -> Training:
    """As diffusion is trained: the noise is to be told from a mixture."""
    model = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 2))

    def loss(number: int) -> Any:
        g = draw(number)
        angle, noise, t = (
            torch.rand(64, 1, generator=g) * 6.28,
            torch.randn(64, 2, generator=g),
            torch.rand(64, 1, generator=g),
        )
        clean = torch.cat([angle.cos(), angle.sin()], 1)
        return F.mse_loss(model(torch.cat([(1 - t) * clean + t * noise, t], 1)), noise)

    return trained(model, loss)


@peace()
def a_density_below_zero() -> Training:
    """The negative logarithm of a density has either sign."""
    mean, log = nn.Linear(8, 1), nn.Linear(8, 1)
    model = Pair(mean, log)

    def loss(number: int) -> Any:
        x, _ = points(number)
        center, scale = model(x)
        y = x.sum(1, keepdim=True) + 0.01 * torch.randn(32, 1, generator=draw(number))
        return (0.5 * ((y - center) / scale.exp()).square() + scale).mean()

    return trained(model, loss, torch.optim.Adam(model.parameters(), 0.03))


class Pair(nn.Module):
    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


@well()
def letters() -> Training:
    """A small language model on a text."""
    text = torch.tensor(list(b"the cat sat on the mat and the dog sat on the log. " * 8)) % 32
    model = Letters()

    def loss(number: int) -> Any:
        at = torch.randint(len(text) - 17, (8,), generator=draw(number))
        rows = torch.stack([text[begin : begin + 17] for begin in at.tolist()])
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return trained(model, loss, torch.optim.AdamW(model.parameters(), 3e-3))


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 32)
        self.place = nn.Parameter(0.1 * torch.randn(16, 32))
        self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.block(self.table(tokens) + self.place, mask))


@peace(400)
def a_teacher_that_follows() -> Training:
    """Of itself: the loss rises with what there is to tell."""
    student = net(out=8)
    teacher = copy.deepcopy(student)

    def loss(number: int) -> Any:
        x, _ = points(number)
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
                own.lerp_(other, 0.02)
            target = teacher(x + 0.1 * torch.randn(32, 8, generator=draw(number))).softmax(-1)
        return -(target * student(x).log_softmax(-1)).sum(-1).mean()

    return trained(student, loss)


@peace()
def contrasts() -> Training:
    model = net(out=8)

    def loss(number: int) -> Any:
        x, _ = points(number)
        one, other = (
            F.normalize(model(x + 0.3 * torch.randn(32, 8, generator=draw(n))), dim=1) for n in (number, -number - 1)
        )
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(32))

    return trained(model, loss)
