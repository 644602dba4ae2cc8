"""The replicas that DDP keeps equal, and those of which it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..measure.shards import MISSING
from ..shared.types.fingerprint import RankMesh
from ..touch.parts import modules_in
from ..touch.torch_private import comm_hooks_of
from .fsdp_units import ranks_of

log = logging.getLogger(__name__)

Replicas = dict[tuple[int, str] | int, RankMesh]
"""The mesh of a parameter, by its module's ``id`` and its name in it; also by its own ``id``, if ``replicate`` was called."""

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_ONE_SIDED = ("noop_hook", "post_localSGD_hook")
"""Those of torch's communication hooks that leave each rank its own gradients."""


def replicas_in(root: nn.Module, active: nn.Module | None) -> Replicas:
    """The parameters of DDP modules: of the one that calls ``root``, and of those inside of it."""
    found: Replicas = {}
    for ddp in (active, *modules_in(root)):
        if isinstance(ddp, DistributedDataParallel):
            try:
                found.update(_of(ddp))
            except MISSING as error:  # a process group may be of another package
                log.debug("cannot find the replicas of %s: %s", type(ddp.module).__name__, error)
    return found


def held_by(module: nn.Module) -> dict[str, Any]:
    """The parameters of a module by their names in it, and the DTensors that torch makes of them while DDP runs."""
    made = {name: value for name, value in vars(module).items() if isinstance(value, Tensor) and hasattr(value, "_spec")}
    return {**module._parameters, **made}


def _of(ddp: Any) -> Replicas:
    ranks = ranks_of(ddp.process_group)
    mesh = RankMesh(ranks, (len(ranks),), (True,), source="DDP", is_declared=is_synchronising(ddp))
    ignored = replace(mesh, source="DDP ignores it", is_declared=False)
    names = ddp.parameters_to_ignore
    late = {id(value) for value in getattr(ddp, "_delay_all_reduce_params", ())}  # reduced in another way
    found: Replicas = {}
    for prefix, module in ddp.module.named_modules():
        for name, value in held_by(module).items():
            is_ignored = f"{prefix}.{name}".lstrip(".") in names and id(value) not in late
            found[id(module), name] = found[id(value)] = ignored if is_ignored else mesh
    return found


def is_synchronising(ddp: Any) -> bool:
    """Whether every rank gets the same gradients: they are averaged, or a hook of torch does that."""
    return all(_is_known(hook, set()) for hook, _ in comm_hooks_of(ddp))


def is_over_all_ranks(ddp: Any) -> bool:
    """Whether all ranks of the training get the same gradients."""
    return (
        is_synchronising(ddp) and torch.distributed.get_world_size(ddp.process_group) == torch.distributed.get_world_size()
    )


def _is_known(hook: Callable[..., Any], seen: set[int]) -> bool:
    """Whether a communication hook is one of torch's that synchronise. Some wrap another one, which may be the user's."""
    seen.add(id(hook))
    if not getattr(hook, "__module__", "").startswith(_HOOKS) or getattr(hook, "__name__", "") in _ONE_SIDED:
        return False
    wrapped = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return all(_is_known(one, seen) for one in wrapped if callable(one) and hasattr(one, "__code__") and id(one) not in seen)
