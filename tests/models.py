"""Modules that several tests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Calls(nn.Module):
    """A module that is one function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)
