"""How the parameters of a model lie on the ranks: which ranks must hold equal values, and which only a shard.

FSDP's units come first, then DTensors, then DDP; what none of them arranges is replicated on all ranks as far as anybody knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..measure.extremes import dtype_name
from ..measure.modules import NamedModule, class_name, named_modules
from ..measure.shards import MISSING
from ..shared.types.fingerprint import NO_GATHER, FingerprintRow, FingerprintTable, RankMesh
from ..touch.torch_private import shard_of
from .constants import constants_in
from .data_parallel import held_by, replicas_in
from .fsdp_units import Found, Gather, along, unit_parameters

log = logging.getLogger(__name__)

_GATES = ("gate", "gating")
"""Names of modules that choose among experts."""

_SHARDED = ("parallel", "partial", "sharded")
"""Words in the class of a module that holds shards, where neither DTensors nor FSDP say so: Megatron's ``ColumnParallelLinear``,
InsightFace's ``PartialFC``. Norms are replicated all the same."""

_OWN = {"tensor_model_parallel": True, "allreduce": False, "is_expert": True}
"""Attributes, and their values, by which Megatron and DeepSpeed mark a parameter that is a rank's own."""


@dataclass(frozen=True, slots=True)
class LaidParameter:
    """A parameter by its row. ``own`` returns this rank's values of it, its shard where it is sharded; None: they cannot be read.

    ``gather`` is None where nothing is gathered, and where what is gathered cannot be told from its shards.
    """

    row: FingerprintRow
    own: Callable[[], Tensor | None]
    gather: Gather | None = None


@dataclass(frozen=True, slots=True)
class Laid:
    """``parameters`` are in the order of the table's rows.

    ``apart`` are not in the table, because no other rank need have equal values; the mesh of their rows has this rank alone.
    """

    table: FingerprintTable
    parameters: tuple[LaidParameter, ...]
    apart: tuple[LaidParameter, ...]


def lay_out(
    root: nn.Module,
    ddp: nn.Module | None,
    world: int,
    slots: int = 1,
    *,
    is_piped: bool = False,
    is_shuffled: bool = False,
    has_constants: bool = False,
) -> Laid:
    """How the parameters of ``root`` lie on the ``world`` ranks. It reads private state: what another torch has not is left out.

    Args:
        root: the watched module, without wrappers.
        ddp: the ``DistributedDataParallel`` whose forward runs, if one does.
        slots: the most slots over which the rows are spread.
        is_piped: ranks send each other tensors, so they may be stages of a pipeline. Parameters that nothing keeps equal are
            then a rank's own.
        is_shuffled: each rank sends each other one tensors, as to experts. So are then those of them that may be experts.
        has_constants: buffers have rows, too. They are compared as the training begins.
    """
    is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() == world
    rank = dist.get_rank() if is_distributed else 0
    everywhere = None if is_piped else RankMesh(tuple(range(world)), (world,), (True,), source="none", is_declared=False)
    found = list(_find(root, ddp if is_distributed else None, is_distributed, everywhere, is_shuffled))
    wider = _widened(_meshes(found), rank)
    found = [one if one.is_own else one._replace(mesh=wider.get(one.mesh, one.mesh)) for one in found]
    inputs = _inputs(found, rank)
    slots = max(1, min(slots, sum(one.mesh is not None for one in found)))
    if has_constants and inputs is not None:
        modules = named_modules(root)
        experts = _experts(modules, is_shuffled)
        found += constants_in([named for key, named in modules.items() if key not in experts], inputs)
    alone = RankMesh((rank,), (1,), (True,), source="own", is_declared=False)
    apart = [_laid(one, alone, 0, 0) for one in found if one.mesh is None]
    meshes = _meshes(found)
    parameters: list[LaidParameter] = []
    for number, mesh in enumerate(meshes):
        shared = [one for one in found if one.mesh == mesh]  # other ranks with these may have others beside them
        spread = _slots([one.numel * one.dtype.itemsize for one in shared], slots)
        parameters += [_laid(one, mesh, number, slot) for one, slot in zip(shared, spread, strict=True)]
    table = FingerprintTable(tuple([one.row for one in parameters]), tuple(meshes), inputs)
    return Laid(table, tuple(parameters), tuple(apart))


def _meshes(found: Sequence[Found]) -> list[RankMesh]:
    return list(dict.fromkeys([one.mesh for one in found if one.mesh is not None]))


def _laid(one: Found, mesh: RankMesh, number: int, slot: int) -> LaidParameter:
    row = FingerprintRow(one.name, dtype_name(one.dtype), one.numel, number, slot, one.is_trainable)
    return LaidParameter(row, one.own, one.gather if mesh.gathers != NO_GATHER else None)


def _slots(sizes: Sequence[int], slots: int) -> list[int]:
    """The slot of each row: the largest first, each into the slot that has the least."""
    filled = [0] * slots
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        slot = filled.index(min(filled))
        found[index] = slot
        filled[slot] += sizes[index] + 1
    return found


# --- each parameter -----------------------------------------------------------------------------------------------------


def _find(
    root: nn.Module, ddp: nn.Module | None, is_distributed: bool, everywhere: RankMesh | None, is_shuffled: bool
) -> Iterator[Found]:
    """Each parameter once, under its first name."""
    replicas = replicas_in(root, ddp) if is_distributed else {}
    modules = named_modules(root)
    experts = _experts(modules, is_shuffled)
    in_units: dict[int, dict[str, Found]] = {}
    for places, found in unit_parameters(root) if is_distributed else ():
        for module, name in places:
            in_units.setdefault(id(module), {})[name] = found
    seen: set[int] = set()
    for key, named in modules.items():
        held: dict[str, Any] = in_units.get(key, {})
        for name, value in {**held, **held_by(named.module), **held}.items():  # those of units come first
            if value is None or id(value) in seen:
                continue
            seen.add(id(value))
            label = named.label(name)
            if isinstance(value, Found):
                yield value._replace(name=label, is_own=key in experts)
            elif not _is_elsewhere(value):
                is_own = key in experts or _is_own(value)
                mesh, data = _place(label, value, replicas.get((key, name)) or replicas.get(id(value)), everywhere)
                if mesh is not None and not mesh.is_declared and is_own:
                    mesh = None
                own = partial(_own, ref(named.module), name)
                yield Found(value.dtype, value.numel(), value.requires_grad, mesh, data, own, name=label, is_own=is_own)


def _is_elsewhere(value: Any) -> bool:
    """Whether the module does not hold the values: FSDP's flat parameters have their user's names, DeepSpeed's shards none."""
    is_cut = hasattr(value, "ds_id") and not getattr(value, "ds_persist", False)
    return is_cut or getattr(value, "_is_flat_param", False) or is_lazy(value) or value.is_meta or not value.numel()


def _own(held: ref[nn.Module], name: str) -> Tensor | None:
    """The values of a parameter, if its module is still there: it may be replaced before the next table is made."""
    module = held()
    value: Any = None if module is None else module._parameters.get(name)
    if module is None or (value is None and (value := vars(module).get(name)) is None):
        return None
    return shard_of(value).detach()


def _place(
    label: str, value: Any, replicas: RankMesh | None, everywhere: RankMesh | None
) -> tuple[RankMesh | None, RankMesh | None]:
    """The mesh of a parameter, and that of the inputs."""
    data = None if replicas is None else replace(replicas, replicated=(False,) * len(replicas.shape))
    spec = getattr(value, "_spec", None) or getattr(value, "_st_info", None)  # in DDP, it is a DTensor in the forward only
    if spec is None:
        return replicas or everywhere, data
    try:
        if any(one.is_partial() for one in spec.placements):
            return None, data
        replicated = tuple(one.is_replicate() for one in spec.placements)
        own = RankMesh(tuple(spec.mesh.mesh.flatten().tolist()), tuple(spec.mesh.shape), replicated, source="DTensor")
        if replicas is None:
            return own, replace(own, replicated=(True,) * len(own.shape))
        both = _product(replicas, own, spec.mesh)
        return (both, replace(both, replicated=(False, *(True for _ in own.shape)))) if both else (replicas, data)
    except MISSING as error:
        log.debug("cannot find how %s lies on the ranks: %s", label, error)
        return None, data


def _product(replicas: RankMesh, own: RankMesh, mesh: Any) -> RankMesh | None:
    """The mesh of a DTensor that DDP keeps equal, if both are cut from one mesh."""
    if not hasattr(mesh, "_get_root_mesh"):
        return None
    whole, rank = mesh._get_root_mesh().mesh, dist.get_rank()
    lines = along(whole, rank)
    if replicas.ranks not in lines:
        return None
    dims = [lines.index(line) for line in (replicas.ranks, *along(mesh.mesh, rank))]
    at = (whole == rank).nonzero()[0].tolist()
    kept = whole[tuple(slice(None) if dim in dims else index for dim, index in enumerate(at))]
    kept = kept.permute([sorted(dims).index(dim) for dim in dims])
    replicated = (*replicas.replicated, *own.replicated)
    return replace(replicas, ranks=tuple(kept.flatten().tolist()), shape=tuple(kept.shape), replicated=replicated)


def _is_own(value: Any) -> bool:
    """Whether a framework marks the parameter as this rank's own."""
    is_marked = any(getattr(value, name, None) is mark for name, mark in _OWN.items())
    return is_marked or getattr(value, "partition_dim", -1) >= 0 or hasattr(value, "group_name")


def _experts(modules: dict[int, NamedModule], is_shuffled: bool) -> set[int]:
    """The modules that are experts, lie in one, or hold shards, by names and classes; with ``is_shuffled``, all that may be."""
    classes = {name: class_name(named.module).lower() for named in modules.values() for name in named.names if name}
    by_class = {name for name, cls in classes.items() if "expert" in cls and not _chooses(name)}
    by_name = {name for name in classes if "expert" in _last(name) and not _chooses(name)}
    around = {above for name in by_class | by_name for above in _above(name)}
    experts = by_name | (by_class - around)  # a class that is made of experts, and of what chooses among them, is none
    found: set[int] = set()
    for key, named in modules.items():
        is_expert = any(name in experts or not experts.isdisjoint(_above(name)) for name in named.names)
        is_shard = any(_holds_shards(classes[name]) for name in named.names if name)
        may_be = is_shuffled and not any(_chooses(name) or "norm" in _last(name) for name in named.names)
        if (is_expert or is_shard or may_be) and not any("router" in name.lower() for name in named.names):
            found.add(key)
    return found


def _chooses(name: str) -> bool:
    """Whether a module chooses among experts, by its name: it is the same on all ranks."""
    last = _last(name)
    return last in _GATES or "router" in last or ("expert" in last and "gate" in last)


def _holds_shards(cls: str) -> bool:
    return "norm" not in cls and any(word in cls for word in _SHARDED)


def _last(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _above(name: str) -> Iterator[str]:
    """The names of the modules in which a module lies."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


# --- what all of them show ----------------------------------------------------------------------------------------------


def _widened(meshes: Sequence[RankMesh], rank: int) -> dict[RankMesh | None, RankMesh]:
    """Meshes of parameters that FSDP alone keeps, where others are tensor-parallel as well, and what takes their place.

    Such a parameter is the same on the tensor-parallel ranks, as far as that is seen.
    """
    found: dict[RankMesh | None, RankMesh] = {}
    wide = [
        (mesh, along(torch.tensor(mesh.ranks, device="cpu").view(mesh.shape), rank))
        for mesh in meshes
        if len(mesh.shape) > 1 and rank in mesh.ranks
    ]
    for mesh in meshes:
        if len(mesh.shape) == 1 and not mesh.replicated[0]:
            for wider, lines in wide:
                dim = lines.index(mesh.ranks) if mesh.ranks in lines else -1
                if dim >= 0 and not wider.replicated[dim]:
                    replicated = tuple(other != dim for other in range(len(lines)))
                    gathers = dim if mesh.gathers != NO_GATHER else NO_GATHER
                    found[mesh] = replace(wider, replicated=replicated, gathers=gathers, source="FSDP", is_declared=False)
    return found


def _inputs(found: Sequence[Found], rank: int) -> RankMesh | None:
    """The mesh of the inputs: of those that the parameters show, that in which the fewest inputs must differ from this rank's."""
    known = list(dict.fromkeys(one.data for one in found if one.data is not None))
    least = min(known, key=lambda mesh: len(mesh.ranks) - len(mesh.replicas_of(rank)), default=None)
    return least if least is not None and set(least.replicas_of(rank)) != set(least.ranks) else None
