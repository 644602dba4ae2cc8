"""The parameters that FSDP keeps in its units: how they lie on the ranks, where this rank's shard is, and what is gathered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..measure.modules import wrapped_in
from ..measure.shards import in_units
from ..shared.types.fingerprint import NO_GATHER, RankMesh
from ..touch.parts import modules_in
from ..touch.stack import outwards
from ..touch.torch_private import fsdp1_handle, shard_of

_HOOKS = "torch.distributed.algorithms._comm_hooks"


class Gather(NamedTuple):
    """A parameter is gathered from shards for the forward of ``module``.

    ``find`` returns the gathered values, None where they are not in memory: they are, when the pre-hooks of ``module`` are
    called after FSDP's own. Shards are cast to ``dtype`` first. ``offset``: the number of elements before this rank's shard.
    """

    module: nn.Module
    dtype: torch.dtype
    offset: int
    find: Callable[[], Tensor | None]


class Found(NamedTuple):
    """A parameter before it has a row; ``mesh`` None: no other rank has it.

    ``data``: the mesh of the inputs, as the parameter shows it: not replicated along the data-parallel dimensions. ``own``
    returns this rank's values of it, its shard where it is sharded. ``is_own``: it may differ from rank to rank, but for what
    arranges it.
    """

    dtype: torch.dtype
    numel: int
    is_trainable: bool
    mesh: RankMesh | None
    data: RankMesh | None
    own: Callable[[], Tensor | None]
    gather: Gather | None = None
    name: str = ""
    is_own: bool = False


Places = tuple[tuple[nn.Module, str], ...]
"""The modules that use a parameter, and its names there."""


def unit_parameters(root: nn.Module) -> Iterator[tuple[Places, Found]]:
    """The parameters of the units in ``root``, and of those that call it."""
    return in_units((*_callers(root), *modules_in(root)), _of_flat, _of_group)


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a process group; empty without one."""
    return tuple(dist.get_process_group_ranks(group)) if group is not None else ()


def along(ranks: Tensor, rank: int) -> list[tuple[int, ...]]:
    """The ranks of a mesh that differ from ``rank`` in nothing but one coordinate, for each dimension."""
    own = [int(index) for index in (ranks == rank).nonzero()[0]]
    return [
        tuple(ranks[tuple(slice(None) if at == dim else index for at, index in enumerate(own))].tolist())
        for dim in range(ranks.dim())
    ]


def _callers(root: nn.Module) -> Iterable[nn.Module]:
    """The modules of FSDP1 that wrap ``root`` and call it now: it may have been watched before it was wrapped."""
    callers = [frame.f_locals.get("self") for frame in outwards(sys._getframe(1))]
    units = [one for one in callers if isinstance(one, nn.Module) and one is not root and fsdp1_handle(one) is not None]
    return {id(one): one for one in units if any(inner is root for inner in wrapped_in(one))}.values()


# --- FSDP1: one flat parameter; each of the user's parameters is a range of it, or its shard has nothing of it ------------


def _of_flat(unit: Any, handle: Any) -> Iterator[tuple[Places, Found]]:
    flat = handle.flat_param
    mesh = _mesh_of_unit(unit, handle.uses_sharded_strategy)
    data = replace(mesh, replicated=(False,) * len(mesh.shape), gathers=NO_GATHER)
    infos, parts = flat._param_infos, getattr(flat, "_shard_param_infos", None)
    dtype = getattr(handle, "_fwd_bwd_param_dtype", None) or flat.dtype
    if parts is None:
        numel = flat._unpadded_unsharded_size.numel()
        own = partial(_own_flat, handle, 0, None)
        yield ((handle._fully_sharded_module, "_flat_param"),), Found(flat.dtype, numel, flat.requires_grad, mesh, data, own)
        return
    shared: dict[tuple[int, str], list[tuple[nn.Module, str]]] = {}
    for one in flat._shared_param_infos:
        shared.setdefault((id(one.prim_module), one.prim_param_name), []).append((one.module, one.param_name))
    users = getattr(flat, "_params", None) or [flat] * len(infos)
    for info, part, numel, start, user in zip(infos, parts, flat._numels, _starts(flat), users, strict=True):
        gather = None
        if mesh.gathers != NO_GATHER:
            find = partial(_gathered_flat, handle, start, numel, dtype)
            gather = Gather(handle._fully_sharded_module, dtype, part.intra_param_start_idx or 0, find)
        own = partial(_own_flat, handle, part.offset_in_shard or 0, part.numel_in_shard or 0)
        places = ((info.module, info.param_name), *shared.get((id(info.module), info.param_name), ()))
        yield places, Found(flat.dtype, numel, user.requires_grad, mesh, data, own, gather)


def _starts(flat: Any) -> list[int]:
    """Where each of the user's parameters begins in the gathered flat parameter: there may be padding between them."""
    sizes = getattr(flat, "_numels_with_padding", flat._numels)
    is_padding = getattr(flat, "_is_padding_mask", None) or [False] * len(sizes)
    starts = [0, *accumulate(sizes)]
    return [start for start, skipped in zip(starts, is_padding, strict=False) if not skipped]


def _own_flat(handle: Any, start: int, length: int | None) -> Tensor | None:
    flat = handle.flat_param
    shard: Tensor = getattr(flat, "_local_shard", flat).detach()  # until the first forward, the flat parameter is the shard
    return shard if length is None else shard[start : start + length]


def _gathered_flat(handle: Any, start: int, numel: int, dtype: torch.dtype) -> Tensor | None:
    whole = getattr(handle.flat_param, "_full_param_padded", None)
    if whole is None or whole.dtype != dtype or not whole.untyped_storage().nbytes():
        return None
    found: Tensor = whole.detach()[start : start + numel]
    return found


def _mesh_of_unit(unit: Any, is_sharded: bool) -> RankMesh:
    """Of HYBRID_SHARD with one rank in each group of shards, torch makes NO_SHARD, and reduces over that one rank."""
    inner, outer = ranks_of(unit.process_group), ranks_of(getattr(unit, "_inter_node_pg", None))
    is_declared = _is_synchronising(getattr(unit, "_comm_hook", None))
    gathers = is_sharded and len(inner) > 1
    if not outer:
        return RankMesh(inner, (len(inner),), (not is_sharded,), 0 if gathers else NO_GATHER, "FSDP", is_declared)
    grid = _grid(getattr(unit, "_device_mesh", None), outer, inner)
    if grid is None:
        return RankMesh(outer, (len(outer),), (True,), NO_GATHER, "HSDP", is_declared)
    return RankMesh(grid, (len(outer), len(inner)), (True, not is_sharded), 1 if gathers else NO_GATHER, "HSDP", is_declared)


def _grid(mesh: Any, outer: tuple[int, ...], inner: tuple[int, ...]) -> tuple[int, ...] | None:
    """The ranks of HYBRID_SHARD. If it was given groups, this rank knows only its own: those of the others must lie like them."""
    if mesh is not None and mesh.ndim == 2:
        return tuple(mesh.mesh.flatten().tolist())
    rank = dist.get_rank()
    grid = tuple([one - rank + other for one in outer for other in inner])
    is_possible = len(set(grid)) == len(grid) and min(grid) >= 0 and max(grid) < dist.get_world_size()
    return grid if is_possible else None


def _is_synchronising(hook: Any) -> bool:
    return hook is None or getattr(hook, "__module__", "").startswith(_HOOKS)


# --- FSDP2: each parameter is sharded by itself -------------------------------------------------------------------------


def _of_group(group: Any) -> Iterator[tuple[Places, Found]]:
    modules = getattr(group, "modules", None)
    meshes: dict[tuple[Any, ...], tuple[RankMesh, RankMesh]] = {}  # there may be thousands of ranks
    for parameter in group.fsdp_params:
        info = parameter._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        sharded = parameter.sharded_param
        key = id(sharded.device_mesh), id(parameter.mesh_info), *(one.is_replicate() for one in sharded.placements)
        if key not in meshes:
            meshes[key] = _mesh_of_dtensor(sharded, parameter.mesh_info)
        mesh, data = meshes[key]
        gather = None
        if mesh.gathers != NO_GATHER:
            gather = _gather_of(parameter, modules[0] if modules else info.module)
            if gather is None:
                mesh = replace(mesh, gathers=NO_GATHER)
        own = partial(_own_shard, parameter)
        found = Found(sharded.dtype, sharded.numel(), sharded.requires_grad, mesh, data, own, gather)
        yield ((info.module, info.param_name), *shared), found


def _mesh_of_dtensor(sharded: Any, mesh_info: Any) -> tuple[RankMesh, RankMesh]:
    ranks = sharded.device_mesh.mesh
    replicated = tuple(one.is_replicate() for one in sharded.placements)
    lines = along(ranks, dist.get_rank())
    shard, replicate = (ranks_of(getattr(mesh_info, f"{name}_process_group", None)) for name in ("shard", "replicate"))
    gathers = [dim for dim, line in enumerate(lines) if line == shard and len(line) > 1 and not replicated[dim]]
    mesh = RankMesh(
        tuple(ranks.flatten().tolist()),
        tuple(ranks.shape),
        replicated,
        gathers[0] if len(gathers) == 1 else NO_GATHER,
        "HSDP" if replicate and shard else "FSDP",
    )
    # Ranks along tensor-parallel dimensions may be given the same input.
    return mesh, replace(mesh, replicated=tuple(line not in (shard, replicate) for line in lines), gathers=NO_GATHER)


def _gather_of(parameter: Any, module: nn.Module) -> Gather | None:
    """None where shards do not add up to what is gathered: the user's tensor changes it, or it is cut along another dimension."""
    placement = getattr(parameter, "fsdp_placement", None)
    local = shard_of(parameter.sharded_param)
    if (placement is not None and placement.dim != 0) or type(local) is not Tensor:
        return None
    policy = getattr(parameter, "mp_policy", None)
    dtype = getattr(parameter, "param_dtype", getattr(policy, "param_dtype", None))  # not set before the first forward
    if dtype is None or not local.dtype.is_floating_point:
        dtype = local.dtype
    offset = parameter.mesh_info.shard_mesh_rank * parameter.padded_sharded_param_size.numel()
    return Gather(module, dtype, offset, partial(_gathered, parameter, dtype))


def _own_shard(parameter: Any) -> Tensor | None:
    return shard_of(parameter.sharded_param).detach()


def _gathered(parameter: Any, dtype: torch.dtype) -> Tensor | None:
    whole: Any = getattr(parameter, "_unsharded_param", None)
    if whole is None or parameter.sharded_state.name != "UNSHARDED":
        return None
    values = shard_of(whole).detach()
    return values if values.dtype == dtype and values.untyped_storage().nbytes() else None
