"""Small trainings, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Training:
    """A root module to watch, and what trains batch ``number`` of it and may return its loss."""

    root: nn.Module
    step: Callable[[int], object]


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Scaled(nn.Module):
    """Multiplies twice by a number, which a training may change: 1e30 is finite, and its square is not."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * self.gain


class Root(nn.Module):
    """A root whose forward is a function of itself and of what it is fed."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


def chain(*modules: nn.Module) -> Any:
    """Modules one after another; typed as anything, since their attributes are those of many classes."""
    return nn.Sequential(*(modules or (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))))


def trained(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    *,
    before: Callable[[int], object] = lambda number: None,
    lr: float = 0.01,
    accumulate: int = 1,
) -> Training:
    """Plain SGD; ``before`` is called ahead of each batch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)

    def step(number: int) -> float:
        before(number)
        loss = loss_of(number)
        (loss / accumulate).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return Training(model, step)
