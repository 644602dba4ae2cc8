"""Tensor and sequence parallelism by hand, over all ranks: what Megatron's mappings do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _own_part(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()].clone()


def _gathered(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def _summed(values: Tensor) -> Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total


class OwnPart(torch.autograd.Function):
    """This rank's part of the sequence; the backward gathers the gradients of all parts."""

    @staticmethod
    def forward(context: Any, whole: Tensor) -> Tensor:
        return _own_part(whole)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return _gathered(gradients[0])


class Gathered(torch.autograd.Function):
    """The whole sequence; the backward takes this rank's part of a gradient that all ranks have alike."""

    @staticmethod
    def forward(context: Any, part: Tensor) -> Tensor:
        return _gathered(part)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return _own_part(gradients[0])


class PartsSummed(torch.autograd.Function):
    """After a layer that is split by rows."""

    @staticmethod
    def forward(context: Any, part: Tensor) -> Tensor:
        return _summed(part)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class GradientsSummed(torch.autograd.Function):
    """Before a layer that is split by columns."""

    @staticmethod
    def forward(context: Any, whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return _summed(gradients[0])


own_part: Callable[[Tensor], Tensor] = OwnPart.apply
gathered: Callable[[Tensor], Tensor] = Gathered.apply
parts_summed: Callable[[Tensor], Tensor] = PartsSummed.apply
gradients_summed: Callable[[Tensor], Tensor] = GradientsSummed.apply
