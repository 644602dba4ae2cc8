"""This rank's own values of parameters that FSDP shards: during a forward, their modules have the gathered ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..touch.torch_private import fsdp1_handle, fsdp2_groups
from .extremes import local

log = logging.getLogger(__name__)

Key = tuple[int, str]
"""A module, by its ``id``, and the name of its parameter."""


def own_shards(model: nn.Module) -> dict[Key, Tensor]:
    """The shards of FSDP's units in ``model``. It reads private state: what another version of torch has not is left out."""
    found: dict[Key, Tensor] = {}
    unit: Any
    for unit in model.modules():
        try:
            if (handle := fsdp1_handle(unit)) is not None:
                found.update(_of_flat(handle))
            for group in fsdp2_groups(unit):
                found.update(_of_group(group))
        except (AttributeError, TypeError) as error:
            log.debug("cannot find the shards of %s: %s", type(unit).__name__, error)
    return found


def is_bad(shard: Tensor | None) -> bool:
    """Whether a shard has a nan or inf; of None, a parameter that is not sharded, this rank has all. Waits for the device."""
    return shard is None or (shard.numel() > 0 and not bool(torch.isfinite(shard.float()).all()))


def _of_flat(handle: Any) -> Iterator[tuple[Key, Tensor]]:
    """FSDP1: one flat parameter; each of the user's parameters is a range of it, or its shard has nothing of it."""
    flat = handle.flat_param
    shard = flat._local_shard.detach()
    yield (id(handle._fully_sharded_module), "_flat_param"), shard
    infos = getattr(flat, "_shard_param_infos", None)
    for info, part in zip(flat._param_infos, infos or (), strict=bool(infos)):
        start = part.offset_in_shard if part.in_shard else 0
        yield (id(info.module), info.param_name), shard[start : start + (part.numel_in_shard or 0)]


def _of_group(group: Any) -> Iterator[tuple[Key, Tensor]]:
    """FSDP2: each parameter is sharded by itself."""
    for parameter in group.fsdp_params:
        info = parameter._module_info
        yield (id(info.module), info.param_name), local(parameter.sharded_param)
