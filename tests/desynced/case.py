"""A training with a silent fault: what it trains, and what is true of its replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recorded.truths import Truth as Truth


@dataclass(frozen=True)
class Faulty:
    """A training of this rank: ``before`` is called ahead of each batch, and ``step`` trains it and returns its loss."""

    root: nn.Module
    step: Callable[[int], Tensor]
    before: Callable[[int], object] = lambda number: None


@dataclass(frozen=True)
class Case:
    """``groups``: the ranks of one group must be equal."""

    name: str
    ranks: int
    truth: Truth
    build: Callable[[int], Faulty]
    groups: tuple[tuple[int, ...], ...]
    batches: int
    options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {}
Build = Callable[[int], Faulty]


def desynced(
    truth: Truth, *, ranks: int = 2, groups: tuple[tuple[int, ...], ...] = (), batches: int = 160, **options: Any
) -> Callable[[Build], Build]:
    """Adds a training to the table. ``options``: those of the watch."""

    def add(build: Build) -> Build:
        equal = groups or (tuple(range(ranks)),)
        CASES[build.__name__] = Case(build.__name__, ranks, truth, build, equal, batches, options)
        return build

    return add


# --- what they are made of ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """22 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


ALL = 22


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


class Data:
    """Inputs and what a fixed linear teacher makes of them; ``shard`` chooses what a rank is fed."""

    def __init__(self, shard: int, rows: int = 8) -> None:
        self._draw = torch.Generator().manual_seed(1000 + shard)
        self._rows = rows
        self._teacher = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))

    def batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(self._rows, 8, generator=self._draw)
        return x, torch.tanh(x @ self._teacher)


def taught(
    root: nn.Module,
    data: Data,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    before: Callable[[int], object] = lambda number: None,
    between: Callable[[int], object] = lambda number: None,
) -> Faulty:
    """``between`` is called after the backward, ahead of the optimizer's step."""
    stepped = optimizer or sgd(root)

    def step(number: int) -> Tensor:
        x, y = data.batch()
        loss = nn.functional.mse_loss(root(x), y)
        loss.backward()
        between(number)
        stepped.step()
        stepped.zero_grad()
        return loss.detach()

    return Faulty(root, step, before)


def flip(values: Tensor, bit: int = 0, at: int = 0) -> None:
    """Flips one bit of one element; bit 0 is the lowest of the mantissa."""
    bits = values.detach().view(-1).view({4: torch.int32, 2: torch.int16, 8: torch.int64}[values.element_size()])
    bits[at] ^= 1 << bit


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """What a training without DDP does by hand."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
