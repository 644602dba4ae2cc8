"""Whether the weights of a model have changed: checksums of some of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..measure.extremes import local
from ..measure.modules import Modules
from ..touch.torch_private import shard_of
from .lanes import UNKNOWN, Lanes, Pair

MOST = 64
"""Parameters that are looked at, spread over the model."""


def some_of(model: Modules) -> list[Any]:
    """Some trainable parameters of a model."""
    trained = [
        value
        for named in model.modules
        for value in named.module._parameters.values()
        if value is not None and value.requires_grad
    ]
    return trained[:: 1 + len(trained) // MOST]


def weights_of(model: Modules) -> Lanes:
    """The checksums of these, on their way to the host."""
    lanes = Lanes.of([_own(value) for value in some_of(model)])
    lanes.send()
    return lanes


def are_same(one: list[Pair], other: list[Pair]) -> bool:
    """Whether these are the same weights; not if none of them could be read."""
    return one == other and any(pair != UNKNOWN for pair in one)


def _own(parameter: Tensor) -> Tensor | None:
    values = local(shard_of(parameter).detach())
    return values if values.numel() else None
