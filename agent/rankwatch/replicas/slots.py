"""Which checksums are taken in which slot, and by what to see that the model has changed."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any
from weakref import ref

import torch
import torch.distributed
from torch import Tensor, nn

from ..measure.collectives import Traffic
from ..measure.modules import NamedModule, parameters_of
from ..measure.shards import own_shards
from ..shared.types.fingerprint import ALL_ROWS, NO_GATHER
from ..touch.parts import modules_in
from ..touch.torch_private import fsdp2_groups
from .meshes import LaidParameter, lay_out

Signs = tuple[object, ...]
"""If one of them changes, so may the way in which the model lies on the ranks."""


class Plan:
    """What ``lay_out`` has found, by slot. ``is_shared``: there is a rank to compare with.

    Args:
        most_slots: the number of slots, if there are enough parameters.
        tied: the names of parameters that were one.
        is_first: no forward of a batch has begun before.
    """

    def __init__(
        self,
        root: nn.Module,
        ddp: Any,
        most_slots: int,
        modules: Collection[NamedModule],
        tied: Iterable[str],
        traffic: Traffic,
        signs: Signs,
        *,
        is_first: bool,
    ) -> None:
        world = world_size()
        laid = lay_out(
            root, ddp, world, most_slots,
            is_piped=traffic.is_piped, is_shuffled=traffic.is_shuffled, has_constants=is_first,
        )  # fmt: skip
        self.table = laid.table
        self.slots = 1 + max((row.slot for row in laid.table.rows), default=0)
        self.is_shared = world > 1
        self.has_dtensors = any(mesh.source == "DTensor" for mesh in laid.table.meshes)
        is_gathered = any(mesh.gathers != NO_GATHER for mesh in laid.table.meshes)
        has_sync_norms = any(isinstance(named.module, nn.SyncBatchNorm) for named in modules)
        self.exchanges = is_gathered or self.has_dtensors or has_sync_norms
        """Whether the forward exchanges values, of another kind than parts of the input."""
        self.parameters = [*laid.parameters, *laid.apart]
        self._rows: defaultdict[int, list[LaidParameter]] = defaultdict(list, {ALL_ROWS: list(laid.parameters)})
        for parameter in laid.parameters:
            self._rows[parameter.row.slot].append(parameter)
        self._signs = signs
        self._places = _places(root, modules)
        self._tied = [self._places[name] for name in tied if name in self._places]
        self._units = [group for module in modules_in(root) for group in fsdp2_groups(module)]

    def rows(self, slot: int) -> list[LaidParameter]:
        """The parameters of a slot, in the order of the table."""
        return self._rows.get(slot, [])

    def gathered(self, slot: int) -> dict[int, list[tuple[int, LaidParameter]]]:
        """Those of a slot that are gathered, by the ``id`` of the module for which they are, numbered in the table's order."""
        found: defaultdict[int, list[tuple[int, LaidParameter]]] = defaultdict(list)
        named = [one for one in self.rows(slot) if self.table.meshes[one.row.mesh].gathers != NO_GATHER]
        for number, parameter in enumerate(named):
            found[id(parameter.gather.module) if parameter.gather is not None else 0].append((number, parameter))
        return found

    @property
    def is_synchronised(self) -> bool:
        """Whether FSDP reduces the gradients over all its ranks, as far as the training has not asked for something else."""
        return all(getattr(unit, "reduce_grads", True) and getattr(unit, "all_reduce_grads", True) for unit in self._units)

    def still_holds(self, signs: Signs, slot: int) -> bool:
        """Whether the model is as it was, as far as that shows in this slot."""
        if signs != self._signs or not all(is_same() for is_same in self._tied):
            return False
        places = [self._places.get(parameter.row.parameter) for parameter in self.rows(slot)]
        return all(is_same() for is_same in places if is_same is not None)


def _places(root: nn.Module, modules: Collection[NamedModule]) -> dict[str, Callable[[], bool]]:
    """By a parameter's name: whether it is still the same one. FSDP replaces its parameters by itself."""
    gathered = own_shards(root) if world_size() > 1 else {}
    return {
        label: _same(named.module, name, value)
        for label, named, name, value in parameters_of(modules)
        if (id(named.module), name) not in gathered
    }


def _same(module: nn.Module, name: str, value: Tensor) -> Callable[[], bool]:
    parameter, dtype, is_trainable = ref(value), value.dtype, value.requires_grad
    held = ref(module)

    def is_same() -> bool:
        owner = held()
        now = None if owner is None else owner._parameters.get(name)
        return now is not None and now is parameter() and now.dtype is dtype and now.requires_grad is is_trainable

    return is_same


def world_size() -> int:
    """The number of ranks: in the process group, or as torchrun has started them."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    started = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    return int(started) if started.isdecimal() else 1
