"""What trainings with a silent fault are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainings.case import Training
from trainings.parts import trained


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    """22 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


ALL = 22
WEIGHT = "blocks.1.up.weight"


def net(seed: int = 0) -> Tower:
    torch.manual_seed(seed)
    return Tower()


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


class Data:
    """Inputs and what a fixed linear teacher makes of them; ``shard`` chooses what a rank is fed, its own without."""

    def __init__(self, shard: int | None = None) -> None:
        self._draw = torch.Generator().manual_seed(1000 + (dist.get_rank() if shard is None else shard))
        self._teacher = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))

    def batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 8, generator=self._draw)
        return x, torch.tanh(x @ self._teacher)

    def loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        x, y = self.batch()
        return nn.functional.mse_loss(model(x), y)


def following(
    root: Any,
    data: Data | None = None,
    loss_of: Callable[[int], Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Training:
    """Learns what the teacher makes of the data. ``options``: those of ``trained``."""
    data = data or Data()
    return trained(root, loss_of or (lambda number: data.loss(root)), optimizer=optimizer or sgd(root), **options)


def flip(values: Tensor, bit: int = 0, at: int = 0) -> None:
    """Flips one bit of one element; bit 0 is the lowest of the mantissa."""
    bits = values.detach().view(-1).view({4: torch.int32, 2: torch.int16, 8: torch.int64}[values.element_size()])
    bits[at] ^= 1 << bit


def on(rank: int, at: int, act: Callable[[], object]) -> Callable[[int], None]:
    """Something happens on one rank before one batch."""

    def before(number: int) -> None:
        if number == at and dist.get_rank() == rank:
            act()

    return before
