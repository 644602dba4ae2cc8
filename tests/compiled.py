"""A net of blocks, and the ways to compile it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = nn.Linear(16, 8)
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return x + inner


class Net(nn.Module):
    def __init__(self, depth: int = 3, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block(checkpointed=checkpointed) for _ in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def whole(model: nn.Module, backend: Any, **options: Any) -> Callable[..., Tensor]:
    return torch.compile(model, backend=backend, **options)


def in_place(model: nn.Module, backend: Any, **options: Any) -> Callable[..., Tensor]:
    model.compile(backend=backend, **options)
    return model


def inside_a_function(model: nn.Module, backend: Any, **options: Any) -> Callable[..., Tensor]:
    return torch.compile(lambda x: model(x) * 2, backend=backend, **options)


def by_block(model: Any, backend: Any, **options: Any) -> Callable[..., Tensor]:
    for block in model.blocks:
        block.compile(backend=backend, **options)
    return model  # type: ignore[no-any-return]


WAYS = (whole, in_place, inside_a_function, by_block)
