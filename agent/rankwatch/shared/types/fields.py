"""What stands beside a field of a message: how its value is written, and how what a peer sent is checked.

A type alone says: ``str``, one line of at most MAX_NAME characters; ``int``, a whole number from 0 on; ``float``, a number from 0
on; an enum, one of its members; a dataclass or named tuple, an array of its fields. A field that differs says how, as in
``Annotated[int, integer(-1)]``, and each tuple how long it may be, as in ``Annotated[tuple[str, ...], Items(9)]``.
``link/codec.py`` reads these annotations. A wrong value is a ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, TypeVar

from ..printable import paragraph, printable

T = TypeVar("T")

MAX_NAME = 1024
MAX_TEXT = 16 * 1024
MAX_INT = 2**63 - 1
MAX_RANKS = 65_536
MAX_ROWS = 1_000_000
MAX_RING = 10_000
MAX_DIMS = 64
MAX_CLOSEUP = 3600.0
"""Seconds that a close-up may take: the report waits for it."""


@dataclass(frozen=True)
class Field:
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@dataclass(frozen=True)
class Items:
    """How many items a tuple may have. Of a longer one the first are written, or the last."""

    most: int
    least: int = 0
    keeps_last: bool = False


def same(value: Any) -> Any:
    return value


def integer(low: int = 0, high: int = MAX_INT) -> Field:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return value

    return Field(same, check)


def number(low: float = 0.0, high: float = 1e18) -> Field:
    def check(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:  # a nan fails the comparison
            raise ValueError(f"expected a number from {low:g} to {high:g}")
        return float(value)

    return Field(same, check)


def numbered(words: type[IntEnum]) -> Field:
    """A member of an enum whose values count from 0."""
    members = tuple(words)

    def check(value: Any) -> IntEnum:
        if type(value) is not int or not 0 <= value < len(members):
            raise ValueError(f"expected a whole number from 0 to {len(members) - 1}")
        return members[value]

    return Field(same, check)


def string(limit: int = MAX_NAME) -> Field:
    """A name: one line, made printable. A long one is cut where it is sent: it must cost a few letters, not the message."""
    return Field(lambda value: printable(value, limit), lambda value: printable(_check_length(value, limit), limit))


def lines(limit: int) -> Field:
    """A text that may have many lines, such as an exception's."""
    return Field(lambda value: paragraph(value, limit), lambda value: paragraph(_check_length(value, limit), limit))


def sent_name(value: str) -> str:
    """A name in a digest: the same before and after it was sent, and in each version of Python, which know other letters."""
    if value.isascii() and value.isprintable() and len(value) <= MAX_NAME:  # nearly all, and there are many
        return value
    return printable(value, MAX_NAME).encode("ascii", "backslashreplace").decode()


def _check_length(value: Any, limit: int) -> str:
    if type(value) is not str or len(value) > limit:
        raise ValueError(f"expected text of at most {limit} characters")
    return value


def one_of(words: Iterable[str]) -> Field:
    """One of these words, or of the members of an enum whose values are words."""
    known = {str(word): word for word in words}

    def check(value: Any) -> str:
        if type(value) is not str or value not in known:
            raise ValueError(f"expected one of {', '.join(sorted(known))}")
        return known[value]

    return Field(same, check)


def of_type(kind: type[T], what: str) -> Callable[[Any], T]:
    def check(value: Any) -> T:
        if type(value) is not kind:
            raise ValueError(f"expected {what}")
        return value

    return check


check_bytes = of_type(bytes, "bytes")


def check_list(value: Any, least: int, most: int) -> list[Any]:
    if type(value) is not list or not least <= len(value) <= most:
        raise ValueError(f"expected an array of {least} to {most} items")
    return value


def list_of(item: Field, items: Items) -> Field:
    kept = slice(-items.most, None) if items.keeps_last else slice(items.most)
    return Field(
        lambda values: list(map(item.encode, values[kept])),
        lambda value: tuple(map(item.decode, check_list(value, items.least, items.most))),
    )


def optional(field: Field) -> Field:
    return Field(
        lambda value: None if value is None else field.encode(value),
        lambda value: None if value is None else field.decode(value),
    )


_DOUBLE = struct.Struct("<d")


def _read_double(value: Any) -> float:
    if type(value) is not bytes or len(value) != _DOUBLE.size:
        raise ValueError(f"expected a float in {_DOUBLE.size} bytes")
    found: float = _DOUBLE.unpack(value)[0]
    return found


BatchNumber = Annotated[int, integer(-1)]
"""-1: none."""

Dtype = Annotated[str, Field(same, string(64).decode)]
"""A word of torch's: it is sent as it is."""

AnyFloat = Annotated[float, Field(_DOUBLE.pack, _read_double)]
"""nan and inf, too: it is sent as its eight bytes."""

Shape = Annotated[tuple[int, ...], Items(MAX_DIMS)]
