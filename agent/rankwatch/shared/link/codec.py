"""How messages and their data are written and read, by the annotations of their classes (see ``types/fields.py``).

By hand is what these cannot say: columns of numbers, ranks that few bytes stand for, and for its speed the batch summary. The
counts of collectives stand in a BATCH without arrays in arrays, which a message of columns must not have.
What a peer sent is checked: a wrong value is a ValueError, a wrong type a ValueError or TypeError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ..str_enum import StrEnum
from ..types.calls import MAX_TOLD, GroupCount
from ..types.fields import (
    MAX_INT,
    MAX_RANKS,
    MAX_RING,
    MAX_ROWS,
    Field,
    check_bytes,
    check_list,
    integer,
    list_of,
    number,
    numbered,
    of_type,
    one_of,
    optional,
    same,
    string,
)
from ..types.fingerprint import MAX_MESHES, FingerprintTable, RankMesh
from ..types.frame import NO_NORM, BatchSummary, Frame, FrameSpec, FrameTable, Position, State, pack, unpack
from ..types.gpu import Gpu
from ..types.messages import Batch, Beat, Bye, Counts, Hello, Inspect, Inspected
from ..types.notice import Notice
from ..types.trip import Operator, Trip
from ..types.tuning import Tuning

MAX_FRAMES = 200_000
MAX_PLACES = 8 * MAX_RANKS
"""Ranks in all meshes of one fingerprint table."""

SHORT_ARRAY = 64
"""An array header that claims so many items costs next to nothing, even if the items are missing."""

_PLAIN = {
    str: string(),
    int: integer(),
    float: number(),
    bool: Field(same, of_type(bool, "true or false")),
    bytes: Field(same, check_bytes),
}


@cache
def field_of(kind: Any) -> Field:
    """How a value of this type is written and read."""
    if kind in _BY_HAND:
        return _BY_HAND[kind]
    if get_origin(kind) is Annotated:
        inner, note = get_args(kind)
        return note if isinstance(note, Field) else list_of(field_of(get_args(inner)[0]), note)
    if get_origin(kind) in (Union, UnionType):
        (one,) = set(get_args(kind)) - {NoneType}
        return optional(field_of(one))
    if kind in _PLAIN:
        return _PLAIN[kind]
    if issubclass(kind, IntEnum):
        return numbered(kind)
    if issubclass(kind, StrEnum):
        return one_of(kind)
    array = FieldArray(kind)
    if kind in _OPEN:
        return Field(array.write, lambda value: array.read_open(check_list(value, array.least, SHORT_ARRAY)))
    return Field(array.write, array.read)


class FieldArray:
    """How an instance of a class is written and read: as an array of its fields, in their order.

    A class whose parts must fit each other has a method ``check_parts``, which raises ValueError.
    """

    def __init__(self, cls: type[Any]) -> None:
        names = getattr(cls, "_fields", None)  # of a named tuple
        self._names: Sequence[str] = names or [one.name for one in dataclasses.fields(cls) if one.init]
        hints = get_type_hints(cls, include_extras=True)
        fields = [_BY_HAND.get((cls, name)) or field_of(hints[name]) for name in self._names]
        self._readers = [field.decode for field in fields]
        places = [f"parts[{place}]" for place in range(len(fields))]
        self._read = _compiled("lambda parts: make({})", places, self._readers, make=cls)
        places = [f"value.{name}" for name in self._names]
        self.write = _compiled("lambda value: [{}]", places, [field.encode for field in fields])
        self._make, self._check = cls, getattr(cls, "check_parts", None)
        self.least = len(self._names) - LATER.get(cls, 0)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, value: Any) -> Any:
        made = self._read(check_list(value, len(self._names), len(self._names)))
        if self._check is not None:
            self._check(made)
        return made

    def read_open(self, parts: list[Any]) -> Any:
        """As ``read``, but a newer minor version may have appended parts. An error names the field."""
        found: list[Any] = []
        try:
            for read, part in zip(self._readers, parts, strict=False):
                found.append(read(part))
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"{self._names[len(found)]}: {error}") from None
        made = self._make(*found)
        if self._check is not None:
            self._check(made)
        return made


def _compiled(form: str, places: Sequence[str], calls: Sequence[Callable[[Any], Any]], **names: Any) -> Any:
    """A function that calls each of ``calls`` with what is in its place. A loop over them would take 1.4 times as long."""
    numbered_places = enumerate(zip(places, calls, strict=True))
    parts = [place if call is same else f"call_{number}({place})" for number, (place, call) in numbered_places]
    names |= {f"call_{number}": call for number, call in enumerate(calls)}
    return eval(form.format(", ".join(parts)), names)


def _check_states(value: Any) -> bytes:
    states = check_bytes(value)
    if states != bytes(len(states)) and (unknown := states.translate(None, _STATES)):
        raise ValueError(f"{max(unknown)} is no state")
    return states


_STATES = bytes(State)


def _write_table(table: FrameTable) -> list[Any]:
    return list(map(_SPEC.encode, table.specs))


def _read_table(value: Any) -> FrameTable:
    table = FrameTable(tuple(map(_SPEC.decode, check_list(value, 0, MAX_FRAMES))))
    if table.rows > MAX_ROWS:
        raise ValueError(f"{table.rows} rows are over the limit of {MAX_ROWS}")
    return table


def _read_summary(value: Any) -> BatchSummary:
    summary = BatchSummary._make(check_list(value, 12, 12))
    # All types are compared at once: thousands of batches come each second, and few other messages.
    if tuple(map(type, summary)) != _SUMMARY_TYPES:
        index = next(i for i, (part, kind) in enumerate(zip(summary, _SUMMARY_TYPES, strict=True)) if type(part) is not kind)
        raise ValueError(f"{summary._fields[index]}: expected {_SUMMARY_TYPES[index].__name__}")
    batch, first, step, started, ended, _, table_id, lows, highs, states, norm, memory = summary
    if min(batch, first, step, memory) < 0 or max(batch, first, step, memory) > MAX_INT:
        raise ValueError(f"batch, first_frame, optimizer_step, memory: expected whole numbers from 0 to {MAX_INT}")
    if norm < 0 and norm != NO_NORM:
        raise ValueError(f"gradient_norm: expected a number from 0 on, or {NO_NORM:g}")
    if not (0 <= started <= _LATEST and 0 <= ended <= _LATEST):  # a nan fails the comparison
        raise ValueError(f"started_at, ended_at: expected seconds from 0 to {_LATEST:g}")
    if len(table_id) > _MAX_TABLE_ID or not (table_id.isascii() and table_id.isprintable()):
        raise ValueError(f"table_id: expected at most {_MAX_TABLE_ID} printable ASCII characters")
    _check_states(states)
    # Only the receiver has the table that the columns must fit; that the columns fit each other is checked here.
    if len(lows) != len(highs) or len(lows) not in (4 * len(states), 8 * len(states)):
        raise ValueError(f"columns of {len(lows)}, {len(highs)}, {len(states)} bytes do not fit each other")
    return summary


_LATEST, _MAX_TABLE_ID = 1e18, 64
_SUMMARY_TYPES = tuple(get_type_hints(BatchSummary).values())


def _write_frame(frame: Frame) -> list[Any]:
    code = frame.spec.typecode
    columns = pack(code, frame.abs_min), pack(code, frame.abs_max), frame.states
    return [list(frame.position), _SPEC.encode(frame.spec), *columns]


def _read_frame(value: Any) -> Frame:
    position, spec_value, lows, highs, states = check_list(value, 5, 5)
    spec = _SPEC.decode(spec_value)
    frame = Frame(
        _POSITION.decode(position),
        spec,
        unpack(spec.typecode, check_bytes(lows)),
        unpack(spec.typecode, check_bytes(highs)),
        _check_states(states),
    )
    if not len(frame.abs_min) == len(frame.abs_max) == len(frame.states) == len(spec.readings):
        raise ValueError(f"the columns of {spec.module} do not fit its {len(spec.readings)} readings")
    return frame


def _write_ranks(ranks: tuple[int, ...]) -> list[Any]:
    # Mostly the ranks follow each other: then the first one and the distance say it all.
    first, *rest = ranks or (0,)
    distance = rest[0] - first if rest else 1
    is_even = ranks == tuple(range(first, first + distance * len(ranks), distance or 1))
    return [first, distance, len(ranks)] if is_even and distance > 0 else [list(ranks)]


def _read_ranks(value: Any) -> tuple[int, ...]:
    parts = check_list(value, 1, 3)
    if len(parts) == 1:
        return tuple(map(_RANK.decode, check_list(parts[0], 0, MAX_RANKS)))
    first, distance, count = check_list(parts, 3, 3)
    count, distance = integer(0, MAX_RANKS).decode(count), integer(1, MAX_RANKS).decode(distance)
    ranks = tuple(range(_RANK.decode(first), _RANK.decode(first) + count * distance, distance))
    _RANK.decode(max(ranks, default=0))
    return ranks


def _write_meshes(meshes: tuple[RankMesh, ...]) -> list[Any]:
    return list(map(field_of(RankMesh).encode, meshes))


def _read_meshes(value: Any) -> tuple[RankMesh, ...]:
    """A few bytes stand for many ranks: ten for a mesh of any size."""
    read, found, places = field_of(RankMesh).decode, [], 0
    for mesh in check_list(value, 0, MAX_MESHES):
        found.append(read(mesh))
        places += len(found[-1].ranks)
        if places > MAX_PLACES:
            raise ValueError(f"its meshes have more than {MAX_PLACES} ranks in all")
    return tuple(found)


def _read_counts(value: Any) -> Counts:
    numbers = check_list(value, 0, MAX_TOLD * _OF_GROUP)
    if len(numbers) % _OF_GROUP:
        raise ValueError(f"{len(numbers)} numbers are not {_OF_GROUP} of each group")
    each = map(_NUMBER.decode, numbers)
    return tuple(map(GroupCount, each, each, each))


_OF_GROUP, _NUMBER = len(GroupCount._fields), integer()

_BY_HAND: dict[Any, Field] = {
    Counts: Field(lambda counts: [number for one in counts[:MAX_TOLD] for number in one], _read_counts),
    BatchSummary: Field(list, _read_summary),
    Frame: Field(_write_frame, _read_frame),
    FrameTable: Field(_write_table, _read_table),
    (FingerprintTable, "meshes"): Field(_write_meshes, _read_meshes),
    (Operator, "operands"): Field(
        lambda operands: pack("d", operands[:MAX_RING]), lambda value: unpack("d", check_bytes(value))
    ),
    (RankMesh, "ranks"): Field(_write_ranks, _read_ranks),
}
"""Classes and fields whose form is not an array of parts."""

_OPEN = frozenset({Gpu, Notice, Trip, Tuning})
"""Classes to which a newer minor version may append fields."""

LATER = {Batch: 1, Beat: 8, Bye: 1, Hello: 2, Inspect: 2, Inspected: 3, Notice: 1, Trip: 7, Tuning: 3}
"""How many of its last fields an older agent does not send: they have their defaults."""

_RANK = integer(0, MAX_RANKS - 1)
_POSITION, _SPEC = field_of(Position), field_of(FrameSpec)
