"""Texts from outside, made safe to print: no terminal obeys them, and no line of theirs passes for one of ours.

``wire.decode`` and the readers of a record call this once, before any other code sees a text. Each function is idempotent.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from typing import Any, TypeVar

T = TypeVar("T")

MARGIN = "| "
"""Begins each further line of a text."""

_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters and marks for Unicode, and nothing on a screen."""

_SELECTORS = range(0xE0100, 0xE01F0)
"""Variation selectors that show nothing, and can carry a hidden text. Those of emoji are others."""

_NAMED = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def printable(text: str, limit: int | None = None) -> str:
    """``text`` in one line of at most ``limit`` characters; what is not visible is escaped, as in ``\\x1b``."""
    return _escaped(text[:limit], "")[:limit]


def paragraph(text: str, limit: int | None = None) -> str:
    """As ``printable``, for a text of many lines: tabs and line feeds stay, and each further line begins with MARGIN."""
    first, *rest = text[:limit].replace("\r\n", "\n").rstrip("\n").split("\n")
    lines = [first, *(line if line.startswith(MARGIN) else MARGIN + line for line in rest)]
    return "\n".join(_escaped(line, "\t") for line in lines)[:limit].rstrip("\n")


def page(text: str) -> str:
    """A whole text that is not ours to lay out, as it was written: its line feeds and tabs stay, and nothing else is obeyed."""
    return _escaped(text, "\t\n")


def one_line(text: str) -> str:
    """A paragraph where there is room for a line only."""
    return text.replace("\n", " ").replace("\t", " ")


def cleaned(value: T) -> T:
    """``value`` with each name in it made printable: of tuples, lists, dicts and dataclasses, at any depth."""
    return _cleaned(value)  # type: ignore[no-any-return]


def _escaped(text: str, kept: str) -> str:
    if text.isascii() and text.isprintable():  # nearly all
        return text
    return "".join(letter if letter in kept or _is_visible(letter) else _escape(letter) for letter in text)


def _is_visible(letter: str) -> bool:
    if not (letter.isprintable() or unicodedata.category(letter) == "Zs"):
        return False
    return letter not in _INVISIBLE and ord(letter) not in _SELECTORS


def _escape(letter: str) -> str:
    number = ord(letter)
    if letter in _NAMED:
        return _NAMED[letter]
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _cleaned(value: Any) -> Any:
    if type(value) is str:
        return printable(value)
    if type(value) is dict:
        return {_cleaned(key): _cleaned(part) for key, part in value.items()}
    if type(value) is list:
        return [_cleaned(part) for part in value]
    if isinstance(value, tuple):
        parts = [_cleaned(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _cleaned(getattr(value, name)) for name in names})
    return value
