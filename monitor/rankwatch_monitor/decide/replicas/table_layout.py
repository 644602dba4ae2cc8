"""Where the rows of each mesh lie in a fingerprint, worked out once for each table and slot. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rankwatch.shared.types.fingerprint import ALL_ROWS, LANE_BYTES, NO_GATHER, FingerprintRow, FingerprintTable, RankMesh

Indexes: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Kin:
    """The parameters that lie on the ranks in one way. ``key`` is the same wherever names, dtypes and sizes are."""

    key: str
    rows: tuple[FingerprintRow, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """The rows of one mesh in a fingerprint: bytes ``start`` to ``end`` of its lanes, or of its gathers.

    ``chosen``: which rows of ``kin`` these are. Sections with the same ``key`` can be compared byte by byte.
    """

    key: str
    mesh: int
    kin: Kin
    chosen: Indexes
    start: int
    end: int


class SlotLayout(NamedTuple):
    """A fingerprint of one slot: its sections, those of its gathers, and the bytes of its lanes and of its gathers."""

    sections: tuple[Section, ...]
    gathers: tuple[Section, ...]
    size: int
    gathers_size: int


_EMPTY = SlotLayout((), (), 0, 0)


class TableLayout:
    """The sections of each slot of a table. ``trained`` counts the trained rows of each mesh, ``elements`` all of all rows.

    ``has_shards``: of some parameters, ranks hold different parts.
    """

    def __init__(self, table: FingerprintTable) -> None:
        self.id = table.id
        self.meshes = tuple(map(MeshLayout, table.meshes))
        self.inputs = None if table.inputs is None else MeshLayout(table.inputs)
        self.trained = Counter(row.mesh for row in table.rows if row.is_trainable)
        self.elements = sum(row.numel for row in table.rows)
        self.rows = len(table.rows)
        self.has_shards = not all(all(table.meshes[row.mesh].replicated) for row in table.rows)
        kins: dict[int, Kin] = {}
        by_slot: dict[int, list[tuple[int, int, FingerprintRow]]] = {ALL_ROWS: []}
        for mesh, own in groupby(table.rows, key=lambda row: row.mesh):
            rows = tuple(own)
            kins[mesh] = Kin(_digest([(row.parameter, row.dtype, row.numel) for row in rows]), rows)
            for place, row in enumerate(rows):
                by_slot[ALL_ROWS].append((mesh, place, row))
                by_slot.setdefault(row.slot, []).append((mesh, place, row))
        self._slots = {slot: _lay_out(table, kins, rows) for slot, rows in by_slot.items()}

    def of(self, slot: int) -> SlotLayout:
        return self._slots.get(slot, _EMPTY)


@lru_cache(maxsize=4)
def layout_of(table: FingerprintTable) -> TableLayout:
    """Remembered: a long table takes 0.1 s, for which another thread (``serve/door/decoder.py``) calls this first."""
    return TableLayout(table)


class MeshLayout:
    """Which ranks of a mesh have the same shard, and which ranks' shards are gathered together; each group is one object."""

    def __init__(self, mesh: RankMesh) -> None:
        self.mesh = mesh
        self._index = {rank: index for index, rank in enumerate(mesh.ranks)}
        self._groups: dict[tuple[int, ...], tuple[int, ...]] = {}

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """Those with the same shard as ``rank``; empty where it is alone, or not in the mesh."""
        return self._group(rank, self.mesh.replicated)

    def shards_of(self, rank: int) -> tuple[int, ...]:
        """Those whose shards are gathered with the shard of ``rank``; empty without a gather."""
        gathers = self.mesh.gathers
        return () if gathers == NO_GATHER else self._group(rank, [dim == gathers for dim in range(len(self.mesh.shape))])

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Where ``rank`` lies along the dimensions that are not replicated; None: it is not in the mesh."""
        index = self._index.get(rank)
        if index is None:
            return None
        return tuple([c for c, same in zip(self._coordinates(index), self.mesh.replicated, strict=True) if not same])

    def _group(self, rank: int, varies: Sequence[bool]) -> tuple[int, ...]:
        index = self._index.get(rank)
        if index is None:
            return ()
        own = self._coordinates(index)
        key = tuple([-1 if free else c for c, free in zip(own, varies, strict=True)])
        found = self._groups.get(key)
        if found is None:
            places = [0]
            for c, size, free in zip(own, self.mesh.shape, varies, strict=True):
                places = [place * size + other for place in places for other in (range(size) if free else (c,))]
            found = self._groups[key] = tuple(sorted([self.mesh.ranks[place] for place in places]))
        return found if len(found) > 1 else ()

    def _coordinates(self, index: int) -> list[int]:
        found: list[int] = []
        for size in reversed(self.mesh.shape):
            index, coordinate = divmod(index, size)
            found.append(coordinate)
        return found[::-1]


def _lay_out(table: FingerprintTable, kins: dict[int, Kin], rows: Sequence[tuple[int, int, FingerprintRow]]) -> SlotLayout:
    sections, gathers = [], []
    start = gathered = 0
    for mesh, of_mesh in groupby(rows, key=lambda row: row[0]):
        chosen = np.array([place for _, place, _ in of_mesh], np.int64)
        kin = kins[mesh]
        key = _digest([kin.key, chosen.tobytes()])
        end = start + LANE_BYTES * len(chosen)
        sections.append(Section(key, mesh, kin, chosen, start, end))
        start = end
        if table.meshes[mesh].gathers != NO_GATHER:
            end = gathered + 2 * LANE_BYTES * len(chosen)
            gathers.append(Section(key, mesh, kin, chosen, gathered, end))
            gathered = end
    return SlotLayout(tuple(sections), tuple(gathers), start, gathered)


def _digest(content: object) -> str:
    return hashlib.blake2b(repr(content).encode("utf-8", "replace"), digest_size=16).hexdigest()
