"""Fingerprints: checksums of what must be equal on several ranks, or must differ. Standard library only.

A fingerprint table says of which parameters, and how each of them lies on the ranks. It is the same on all ranks with the
same model, and is sent once. A fingerprint has the checksums of some of its rows after one optimizer step.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, NamedTuple

from .fields import MAX_DIMS, MAX_ROWS, Dtype, Items, Shape, integer, sent_name, string

LANE_BYTES = 16
"""A checksum: two lanes, each an integer modulo 2^64, little-endian."""

UNKNOWN = b"\xff" * LANE_BYTES
"""In the place of a checksum: this rank could not read the values."""

ALL_ROWS = -1
"""The slot of a fingerprint that has all rows of its table."""

NO_GATHER = -1

OF_BUFFERS = "buffer"
"""The source of a mesh whose rows are buffers that must be equal on its ranks, as far as anybody knows."""

MAX_MESHES = 4096
"""Of one fingerprint table."""


@dataclass(frozen=True, slots=True)
class RankMesh:
    """How a tensor lies on ranks: they form a mesh, along each of whose dimensions it is replicated or sharded.

    ``ranks`` are global ranks in row-major order of ``shape``. ``gathers`` is the dimension along which a shard is gathered
    for the forward (FSDP's), NO_GATHER without one. ``source`` names what arranged it, as in ``DDP``. ``is_declared``: whether
    it keeps the replicas equal at every step; where it is not, they are equal only as far as that was seen.
    """

    ranks: tuple[int, ...]
    shape: Shape
    replicated: Annotated[tuple[bool, ...], Items(MAX_DIMS)]
    gathers: Annotated[int, integer(NO_GATHER, MAX_DIMS)] = NO_GATHER
    source: str = ""
    is_declared: bool = True

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same shard as ``rank``, which is one of them; empty if ``rank`` is not in the mesh."""
        places = dict(zip(self.ranks, product(*map(range, self.shape)), strict=True))
        own = places.get(rank)
        if own is None:
            return ()
        return tuple(
            other
            for other, place in places.items()
            if all(is_free or a == b for is_free, a, b in zip(self.replicated, own, place, strict=True))
        )


class FingerprintRow(NamedTuple):
    """A parameter, by its name in the watched model; it lies on the ranks as mesh number ``mesh`` of the table says.

    ``numel`` is of the whole parameter, not of a shard. ``slot``: its checksum is taken at the steps of this slot.
    """

    parameter: str
    dtype: Dtype
    numel: int
    mesh: Annotated[int, integer(0, MAX_MESHES)]
    slot: int
    is_trainable: bool


@dataclass(frozen=True, slots=True)
class FingerprintTable:
    """What a rank takes checksums of. ``id`` is a hash of the content, with the names as they are sent.

    The rows are in the order of their meshes. ``inputs``: the mesh of the data; ranks that differ in a coordinate along a
    dimension that is not replicated must be fed different inputs. None: nothing is known of that.
    """

    rows: Annotated[tuple[FingerprintRow, ...], Items(MAX_ROWS)]
    meshes: tuple[RankMesh, ...]
    inputs: RankMesh | None = None
    id: str = field(init=False)

    def __post_init__(self) -> None:
        rows = tuple([row._replace(parameter=sent_name(row.parameter)) for row in self.rows])
        meshes = tuple([replace(mesh, source=sent_name(mesh.source)) for mesh in self.meshes])
        inputs = None if self.inputs is None else replace(self.inputs, source=sent_name(self.inputs.source))
        content = repr((rows, meshes, inputs))
        object.__setattr__(self, "id", hashlib.blake2b(content.encode(), digest_size=16).hexdigest())

    def __hash__(self) -> int:
        return hash(self.id)

    def rows_of(self, slot: int) -> tuple[FingerprintRow, ...]:
        """The rows of a fingerprint of this slot, in their order in ``lanes``."""
        return self.rows if slot == ALL_ROWS else tuple([row for row in self.rows if row.slot == slot])

    def gathered_of(self, slot: int) -> tuple[FingerprintRow, ...]:
        """Those of them that are gathered for the forward, in their order in ``gathers``."""
        return tuple([row for row in self.rows_of(slot) if self.meshes[row.mesh].gathers != NO_GATHER])

    def check_parts(self) -> None:
        """Each row must have a mesh, the rows be in their order, and each mesh have as many ranks as its shape says."""
        meshes = [*self.meshes, *([self.inputs] if self.inputs is not None else [])]
        numbers = [row.mesh for row in self.rows]
        is_valid = (
            numbers == sorted(numbers)
            and all(0 <= number < len(self.meshes) for number in numbers)
            and all(
                len(set(mesh.ranks)) == len(mesh.ranks) == math.prod(mesh.shape)
                and len(mesh.shape) == len(mesh.replicated) > mesh.gathers
                for mesh in meshes
            )
        )
        if not is_valid:
            raise ValueError("the rows do not fit the meshes, or a mesh does not fit its shape")


class Fingerprint(NamedTuple):
    """The checksums of the rows of one slot of ``table_id``, as a forward begins, after ``step`` optimizer steps.

    Fingerprints of ranks are compared where ``era`` and ``ordinal`` are equal: ``ordinal`` counts the optimizer steps since the
    era began. A new era begins on all ranks alike, where their counts of steps may have come apart (DDP's ``join``).

    ``lanes`` has LANE_BYTES for each row, ``gathers`` twice LANE_BYTES for each gathered row: the checksum of this rank's
    shard as it is handed to the gather, at its place in the whole, and that of the result; only their first lanes add up.
    ``gathers`` is empty where nothing was gathered; ``inputs`` is the checksum of all tensors that the root was given, empty
    where there were none or they are not compared.

    ``is_loaded``: weights were loaded since the last fingerprint. ``is_local``: the optimizer has stepped upon gradients that
    were not synchronised, as the training asked for (``no_sync``). ``communicates``: this rank has called a collective on
    more than a few elements since the first fingerprint, or talks to the others in a way that is not seen.
    """

    table_id: Annotated[str, string(64)]
    era: int
    ordinal: int
    step: int
    slot: Annotated[int, integer(ALL_ROWS)]
    is_loaded: bool
    is_local: bool
    communicates: bool
    lanes: bytes
    gathers: bytes = b""
    inputs: bytes = b""

    def fits(self, table: FingerprintTable) -> bool:
        """Whether the checksums are as many as the table asks for."""
        gathered = len(table.gathered_of(self.slot)) if self.gathers else 0
        return (
            self.table_id == table.id
            and len(self.lanes) == LANE_BYTES * len(table.rows_of(self.slot))
            and len(self.gathers) == 2 * LANE_BYTES * gathered
            and len(self.inputs) in (0, LANE_BYTES)
        )
