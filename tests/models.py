"""Modules that several tests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Calls(nn.Module):
    """A module that is one function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class Checkpointed(nn.Module):
    """A layer, then a block whose forward is run again in the backward."""

    def __init__(self, use_reentrant: bool, *block: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block: Any = nn.Sequential(*(block or (nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)
        return out


def replicated(model: nn.Module) -> nn.Module:
    """A replica as ``nn.DataParallel`` makes them: it shares the hooks, and its parameters are copies without a name."""
    replica: nn.Module = model._replicate_for_data_parallel()
    for name, child in model.named_children():
        setattr(replica, name, replicated(child))
    for name, parameter in model._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.clone())
    for name, buffer in model._buffers.items():
        replica._buffers[name] = None if buffer is None else buffer.clone()
    return replica
