"""How much memory tensors take on a model's device."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..touch.parts import parameters_in

log = logging.getLogger(__name__)

_untold: set[torch.device] = set()
"""Devices whose allocator keeps no statistics, such as torch's CUDAPluggableAllocator."""


def memory_of_tensors(model: nn.Module) -> int:
    """Bytes on the CUDA device of the model's first parameter; 0 without one. Asks the allocator, not the device: nothing waits.

    What the allocator holds beyond that, and what others have on the device, is not in it.
    """
    if not torch.cuda.is_initialized():
        return 0
    parameter = next(parameters_in(model), None)
    if parameter is None or not parameter.is_cuda or (device := parameter.device) in _untold:
        return 0
    try:
        # The flat dictionary of torch.cuda.memory_allocated() costs several times as much to make.
        found: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
    except (RuntimeError, KeyError) as error:
        log.debug("the allocator of %s does not tell what tensors take: %s", device, error)
        _untold.add(device)
        return 0
    return found
