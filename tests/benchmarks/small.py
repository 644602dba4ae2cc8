"""Models of small modules, where watching costs more than the model: for benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import rankwatch
from benchmarks.models import COMPILED, EAGER, MODES, Experts, arguments_of, compiled, period_of


class Small(NamedTuple):
    """A model of small modules, and its targets: by mode, the most microseconds a call, and the largest ratio of the steps."""

    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, int]
    way: str
    most: dict[str, float]
    largest: dict[str, float]


SMALL = (
    Small(
        "400 linear layers of 16",
        lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(400)]),
        (8, 16),
        EAGER,
        {"default": 32.0, "gradients": 100.0},
        {},
    ),
    Small(
        "2 x 64 experts of 32",
        lambda: nn.Sequential(Experts(64, 32), Experts(64, 32)),
        (256, 32),
        EAGER,
        {},
        {"default": 1.15, "gradients": 1.5},
    ),
    Small(
        "40 linear layers of 16",
        lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(40)]),
        (8, 16),
        COMPILED,
        {},
        {"default": 1.15},
    ),
)


class SmallTrainee:
    """A small model in training, in one mode, and the CPU seconds of its thread in each step."""

    def __init__(self, build: Callable[[], nn.Module], x: Tensor, mode: str, way: str) -> None:
        self.period = period_of(mode)
        self.seconds: list[float] = []
        torch.manual_seed(0)
        self.model = build()
        self._x = x
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        arguments = MODES[mode]
        self.watch = None if arguments is None else rankwatch.watch(self.model, **arguments_of(mode))
        self._call = self.model if way == EAGER else compiled(self.model, way)

    def warm_up(self, steps: int | None = None) -> None:
        for _ in range(steps or self.period + 2):
            self.step()

    def time_step(self) -> None:
        before = time.thread_time()
        self.step()
        self.seconds.append(time.thread_time() - before)

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()

    def step(self) -> None:
        self._call(self._x).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
