"""Norms of many tensors, none of which is finite if one value is not. They read the memory at its speed, on all threads.

A 2-norm may also overflow: then it says nothing, and each value must be looked at. The largest number never does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

SMALL = 4096
"""Tensors of so few elements are joined with others of their shape, and have one norm together: there, calling operators costs
more than reading."""

LARGE = 1 << 16
"""From so many elements on, BLAS is faster: by a third, and than to add them."""

JOINED = 1 << 20
"""The most elements that are joined: 4 MiB of float32."""

T = TypeVar("T")


def chunks(members: Sequence[T]) -> Iterator[Sequence[T]]:
    """Members that each have a small tensor, as many at a time as are joined."""
    for start in range(0, len(members), JOINED // SMALL):
        yield members[start : start + JOINED // SMALL]


def joined(alike: Sequence[Tensor]) -> Tensor:
    """The elements of small tensors of one dtype and shape, in one tensor. (Of several shapes, each would get a view first.)"""
    return torch.cat(list(alike)) if alike[0].ndim else torch.stack(list(alike))


def of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norms of tensors of one dtype on the host, those of small tensors of one shape in one."""
    by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
    for values in tensors:  # of hundreds of small ones: each call counts
        by_shape[values.shape].append(values)
    found = list[Tensor]()
    for shape, alike in by_shape.items():
        are_small = shape.numel() <= SMALL
        found += [_norm(joined(some)) for some in chunks(alike)] if are_small else map(_norm, alike)
    return found


def _norm(values: Tensor) -> Tensor:
    if values.numel() >= LARGE and values.dtype in (torch.float32, torch.float64) and values.is_contiguous():
        flat = values.view(-1)
        return torch.dot(flat, flat).sqrt()
    is_narrow = values.dtype is torch.float16  # its own norms end at 65504
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32 if is_narrow else None)
    return norm


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest absolute number of each of some tensors, none of them empty: nan where one is.

    On the host ``aminmax`` takes a fifth of the time of torch's norm of this kind; on a device one operator reads them all.

    Raises:
        RuntimeError: of tensors that torch does not know it of.
    """
    if all([values.is_cpu for values in tensors]):
        return [torch.maximum(-ends.min, ends.max) for ends in map(torch.aminmax, tensors)]
    try:
        return list(torch._foreach_norm(list(tensors), math.inf))
    except RuntimeError:  # not each version of torch, nor each device, has it
        return [torch.linalg.vector_norm(values, math.inf) for values in tensors]
