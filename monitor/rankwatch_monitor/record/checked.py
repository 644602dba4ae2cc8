"""Rows whose columns have the types that their table declares, and JSON that has those of a class: SQLite itself takes any value
in any column."""

from __future__ import annotations

import dataclasses
import enum
import re
import sqlite3
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from types import UnionType
from typing import Any, ClassVar, NamedTuple, get_args, get_origin, get_type_hints

_TABLE = re.compile(r"\bFROM (\w+)")
_CREATED = re.compile(r"CREATE TABLE (\w+) \((.*?)\n?\)(?: WITHOUT ROWID)?;", re.DOTALL)
_COLUMN = re.compile(r"(\w+) (INTEGER|REAL|TEXT|BLOB)\b")

_PYTHON = {"INTEGER": (int,), "REAL": (float, int), "TEXT": (str,), "BLOB": (bytes,)}
_NAMES = {int: "an integer", float: "a number", str: "text", bytes: "a blob", type(None): "nothing"}
_WANTED = {"INTEGER": "an integer", "REAL": "a number", "TEXT": "text", "BLOB": "a blob"}

_LEAST = {"rank": -1, "now": -1e15}
"""The smallest number of a column, where it is not 0: the collector's clock has any beginning."""

_MOST = float(1 << 62)

_MOST_TEXT = {"meta": 1 << 16, "run": 1 << 16}
"""Characters of a text in these tables, which every list of runs reads."""

_EITHER = {("events", "body")}
"""Text or a blob, by the kind of the fact."""


class Unsound(ValueError):
    """A value that no rankwatch wrote."""


class TypedColumn(NamedTuple):
    table: str
    name: str
    kind: str

    def check(self, value: Any) -> None:
        if self.kind == "BLOB" and (self.table, self.name) in _EITHER and isinstance(value, str):
            return
        if not isinstance(value, _PYTHON[self.kind]):
            found = _NAMES.get(type(value), type(value).__name__)
            raise Unsound(f"table {self.table}, column {self.name}: {found} instead of {_WANTED[self.kind]}")
        if isinstance(value, int | float) and not _LEAST.get(self.name, 0) <= value <= _MOST:
            raise Unsound(f"table {self.table}, column {self.name}: {value:g} is out of range")
        if isinstance(value, str) and len(value) > _MOST_TEXT.get(self.table, len(value)):
            raise Unsound(f"table {self.table}, column {self.name}: a text of {len(value)} characters")


def columns_of(create: str) -> dict[str, dict[str, TypedColumn]]:
    """By table, the columns of these CREATE statements."""
    return {
        table: {name: TypedColumn(table, name, kind) for name, kind in _COLUMN.findall(body)}
        for table, body in _CREATED.findall(create)
    }


class SoundConnection(sqlite3.Connection):
    """Checks each row that a query gives. Raises Unsound, which names the table and the column."""

    columns: ClassVar[dict[str, dict[str, TypedColumn]]] = {}

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        cursor = super().execute(sql, parameters)
        if cursor.description is not None:
            known = self.columns.get(_table_in(sql), {})
            names = [described[0] for described in cursor.description]
            columns = [(place, known[name]) for place, name in enumerate(names) if name in known]  # others are computed
            if columns:
                cursor.row_factory = lambda _, row: _checked(row, columns)
        return cursor


@lru_cache(512)
def _table_in(sql: str) -> str:
    found = _TABLE.search(sql)
    return found[1] if found else ""


def _checked(row: tuple[Any, ...], columns: Iterable[tuple[int, TypedColumn]]) -> tuple[Any, ...]:
    for place, column in columns:
        column.check(row[place])
    return row


@cache
def reader_of(kind: Any) -> Callable[[Any], Any]:
    """Makes a value of a type of what JSON has of it. It raises Unsound, and for a dataclass TypeError as its class does.

    Types: str, bool, int, float, an enumeration, a tuple, a dataclass, a named tuple, or one of these or None.
    """
    if get_origin(kind) is UnionType:
        (one,) = map(reader_of, set(get_args(kind)) - {type(None)})
        return lambda value: None if value is None else one(value)
    if get_origin(kind) is tuple:
        return _tuple_reader(get_args(kind))
    if dataclasses.is_dataclass(kind):
        make: Any = kind
        fields = {name: reader_of(hint) for name, hint in get_type_hints(kind).items()}
        return lambda value: make(**{name: fields[name](of) for name, of in _of(dict, value).items()})
    if issubclass(kind, tuple):
        readers = [reader_of(hint) for hint in get_type_hints(kind).values()]
        return lambda value: kind(*[read(of) for read, of in zip(readers, _of(list, value), strict=False)])
    if issubclass(kind, enum.Enum):
        return lambda value: kind(_of(str, value))
    return _number_reader(kind) if kind in (int, float) else lambda value: _of(kind, value)


def _tuple_reader(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    readers = [reader_of(kind) for kind in kinds if kind is not ...]
    if kinds[-1] is ...:
        return lambda value: tuple(map(readers[0], _of(list, value)))
    return lambda value: tuple(read(of) for read, of in zip(readers, _of(list, value), strict=True))


def _number_reader(kind: type[int | float]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is float and kind is float:
            return value
        if type(value) is not int or not -_MOST <= value <= _MOST:
            raise Unsound(f"{value!r:.40} is no {kind.__name__}")
        return value

    return read


def _of(kind: Any, value: Any) -> Any:
    if type(value) is not kind:
        raise Unsound(f"{value!r:.40} is no {kind.__name__}")
    return value
