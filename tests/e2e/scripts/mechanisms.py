"""Trainings of one process without a collector, each of which goes bad: ``mechanisms.py FOLDER``. A folder below has its capsule.

The script stays a script: a replay must not begin a training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankwatch
from rankwatch.errors import OverflowDetected

STEEPNESS = 1.0
"""Set by ``main``, so that its value here is not that of the training."""


@dataclass
class Sample:
    values: Tensor
    weights: Tensor
    name: str = "pump"


def steep(x: Tensor) -> Tensor:
    return inner(x * STEEPNESS)


def inner(x: Tensor) -> Tensor:
    return torch.exp(x)  # line of helpers


class Helpers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return steep(self.linear(x))


class Weighs(nn.Module):
    def forward(self, sample: Sample, *, scale: float) -> Tensor:
        return sample.values / sample.weights * scale  # line of dataclass


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((64, 8), 40.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return x @ self.weight  # line of half


class Masked(nn.Module):
    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)  # line of masked


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sqrt(x)  # line of function

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Applies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Root.apply(x)  # type: ignore[no-untyped-call]
        return out


class Drops(nn.Module):
    """Bad only with the random numbers that it drew."""

    def forward(self, x: Tensor) -> Tensor:
        kept = F.dropout(x, 0.5)
        return torch.log(kept.sum(1) - 2 * x.sum(1) + 1e-6)  # line of random


class Inside(nn.Module):
    """Judged at the end of the batch: the module's own inputs are gone by then."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4, eps=0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 0
        return torch.nan_to_num(self.norm(x))  # line of inside


class Between(nn.Module):
    """The bad number is made outside of the module in which it is seen: the capsule is the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.log(self.first(x) * 0 - 1))  # line of between
        return out


class Closed(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def closed() -> nn.Module:
    power = -2.0

    def call(x: Tensor) -> Tensor:
        return x.pow(power)  # line of closure

    return Closed(call)


class Rooted(nn.Module):
    """Finite forwards. In the backward the root of 0 has no slope."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Sample:
        norm = self.first(x).square().sum(-1).sqrt()  # line of slope
        return Sample(norm, norm.detach(), "fan")


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.first(x).abs(), 0.1)
        return torch.where(y > 0, y.log(), 0 * y)  # line of branch


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        small: Tensor = (self.first(x) * 1e-9).half()
        return small * 60000  # line of narrow


def batch_with(row: int, value: float, rows: int = 16, columns: int = 4) -> Tensor:
    x = torch.ones(rows, columns)
    x[row] = value
    return x


def one_hidden(rows: int = 8) -> tuple[Tensor, Tensor]:
    mask = torch.ones(rows, 4, dtype=torch.bool)
    mask[5] = False
    return torch.zeros(rows, 4), mask


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], dict[str, Any], dict[str, Any]]] = {
    "helpers": (Helpers, lambda: (batch_with(7, 1e3),), {}, {}),
    "dataclass": (Weighs, lambda: (Sample(torch.ones(6, 2), batch_with(3, 0.0, 6, 2)),), {"scale": 2.0}, {}),
    "half": (Half, lambda: (batch_with(2, 200.0, 8, 64),), {}, {}),
    "masked": (Masked, one_hidden, {}, {}),
    "function": (Applies, lambda: (batch_with(9, -1.0),), {}, {}),
    "random": (Drops, lambda: (torch.ones(32, 4),), {}, {}),
    "inside": (Inside, lambda: (torch.ones(4, 4),), {}, {"check": "batch"}),
    "between": (Between, lambda: (torch.ones(4, 4),), {}, {"check": "batch"}),
    "slope": (Rooted, lambda: (batch_with(11, 0.0),), {}, {}),
    "branch": (Chosen, lambda: (batch_with(3, 0.0),), {}, {}),
    "narrow": (Narrow, lambda: (torch.ones(8, 4),), {}, {}),
    "closure": (closed, lambda: (batch_with(0, 0.0),), {}, {}),
}


def train(name: str) -> None:
    make, given, kwargs, options = TRAININGS[name]
    torch.manual_seed(3)
    model = make()
    with rankwatch.watch(model, **options) as watch:
        try:
            made = model(*given(), **kwargs)
            made = made.values if isinstance(made, Sample) else made
            (made.sum() * 64).backward()
            torch.optim.SGD(model.parameters()).step()
        except OverflowDetected:
            watch.close()
            return
    raise AssertionError(f"{name} did not trip")


if __name__ == "__main__":
    STEEPNESS = 50.0
    for each in TRAININGS:
        place = Path(sys.argv[1], each)
        place.mkdir()
        os.chdir(place)
        train(each)
