"""This rank's own values of parameters that FSDP shards: during a forward, their modules have the gathered ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..touch.parts import modules_in
from ..touch.torch_private import fsdp1_handle, fsdp2_groups
from .extremes import local

log = logging.getLogger(__name__)

Key = tuple[int, str]
"""A module, by its ``id``, and the name of its parameter."""

MISSING = (AttributeError, TypeError, ValueError, RuntimeError, LookupError, AssertionError)
"""What may be raised where torch's private state is another one."""

T = TypeVar("T")


def in_units(
    modules: Iterable[nn.Module], of_flat: Callable[[Any, Any], Iterable[T]], of_group: Callable[[Any], Iterable[T]]
) -> Iterator[T]:
    """What ``of_flat`` finds in each unit of FSDP1 and its handle, and ``of_group`` in each group of parameters of FSDP2.

    They read private state: what another version of torch has not is left out.
    """
    for unit in modules:
        try:
            if (handle := fsdp1_handle(unit)) is not None:
                yield from of_flat(unit, handle)
            for group in fsdp2_groups(unit):
                yield from of_group(group)
        except MISSING as error:
            log.debug("cannot find the parameters of %s: %s", type(unit).__name__, error)


def own_shards(model: nn.Module) -> dict[Key, Tensor]:
    """The shards of FSDP's units in ``model``."""
    return dict(in_units(modules_in(model), _of_flat, _of_group))


def is_bad(shard: Tensor | None) -> bool:
    """Whether a shard has a nan or inf; of None, a parameter that is not sharded, this rank has all. Waits for the device."""
    return shard is None or (shard.numel() > 0 and not bool(torch.isfinite(shard.float()).all()))


def _of_flat(unit: Any, handle: Any) -> Iterator[tuple[Key, Tensor]]:
    """FSDP1: one flat parameter; each of the user's parameters is a range of it, or its shard has nothing of it."""
    flat = handle.flat_param
    shard = flat._local_shard.detach()
    yield (id(handle._fully_sharded_module), "_flat_param"), shard
    infos = getattr(flat, "_shard_param_infos", None)
    for info, part in zip(flat._param_infos, infos or (), strict=bool(infos)):
        start = part.offset_in_shard or 0
        yield (id(info.module), info.param_name), shard[start : start + (part.numel_in_shard or 0)]


def _of_group(group: Any) -> Iterator[tuple[Key, Tensor]]:
    """FSDP2: each parameter is sharded by itself."""
    for parameter in group.fsdp_params:
        info = parameter._module_info
        yield (id(info.module), info.param_name), local(parameter.sharded_param)
