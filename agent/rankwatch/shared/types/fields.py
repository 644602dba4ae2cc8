"""The field types of messages: how a value is written, and how what a peer sent is checked. A wrong value is a ValueError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ..printable import paragraph, printable

MAX_NAME = 1024
MAX_INT = 2**63 - 1


@dataclass(frozen=True)
class Field:
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


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
    number, members = integer(0, len(words) - 1), tuple(words)
    return Field(int, lambda value: members[number.decode(value)])


def check_str(value: Any, limit: int) -> str:
    """A name, made printable. What sends it need not have done so."""
    return printable(_check_length(value, limit), limit)


def string(limit: int = MAX_NAME) -> Field:
    """A name: one line."""
    return Field(lambda value: cut(value, limit), lambda value: check_str(value, limit))


def lines(limit: int) -> Field:
    """A text that may have many lines, such as an exception's."""
    return Field(lambda value: paragraph(value, limit), lambda value: paragraph(_check_length(value, limit), limit))


def cut(value: str, limit: int = MAX_NAME) -> str:
    """A name as it is sent: a long one must cost a few letters, not the message."""
    return printable(value, limit)


def sent_name(value: str) -> str:
    """A name in a digest: the same before and after it was sent, and in each version of Python, which know other letters."""
    if value.isascii() and value.isprintable() and len(value) <= MAX_NAME:  # nearly all, and there are many
        return value
    return cut(value).encode("ascii", "backslashreplace").decode()


def _check_length(value: Any, limit: int) -> str:
    if type(value) is not str or len(value) > limit:
        raise ValueError(f"expected text of at most {limit} characters")
    return value


def one_of(words: frozenset[str]) -> Field:
    def check(value: Any) -> str:
        if type(value) is not str or value not in words:
            raise ValueError(f"expected one of {', '.join(sorted(words))}")
        return value

    return Field(same, check)


def check_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("expected true or false")
    return value


def check_bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise ValueError("expected bytes")
    return value


def check_list(value: Any, least: int, most: int) -> list[Any]:
    if type(value) is not list or not least <= len(value) <= most:
        raise ValueError(f"expected an array of {least} to {most} items")
    return value


def list_of(item: Field, most: int) -> Field:
    return Field(
        lambda values: [item.encode(value) for value in values[:most]],
        lambda value: tuple(item.decode(part) for part in check_list(value, 0, most)),
    )


def optional(field: Field) -> Field:
    return Field(
        lambda value: None if value is None else field.encode(value),
        lambda value: None if value is None else field.decode(value),
    )
