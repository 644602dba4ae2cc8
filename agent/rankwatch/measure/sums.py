"""Sums of tensors on the host: not finite if one value is not. To add reads the memory at its speed, on all threads.

A sum may also overflow: then it says nothing, and each value must be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

SMALL = 4096
"""Tensors of so few elements are joined and summed together: there, calling operators costs more than reading."""

JOINED = 1 << 20
"""The most elements that are joined: 4 MiB of float32."""

T = TypeVar("T")


def chunks(members: Sequence[T]) -> Iterator[Sequence[T]]:
    """Members that each have a small tensor, as many at a time as are joined."""
    for start in range(0, len(members), JOINED // SMALL):
        yield members[start : start + JOINED // SMALL]


def joined(small: Sequence[Tensor]) -> Tensor:
    """The elements of small tensors of one dtype, in one tensor."""
    together: Tensor = _flatten_dense_tensors(list(small))
    return together


def of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums of tensors of one dtype, those of small tensors in one: in all, not finite if one value is not."""
    small, found = [], []
    for values in tensors:
        if values.numel() <= SMALL:
            small.append(values)
        else:
            found.append(_sum(values))
    return found + [_sum(joined(some)) for some in chunks(small)]


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float32) if values.dtype is torch.float16 else values.sum()
