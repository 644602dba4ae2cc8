"""A report on a terminal: lines that fit it, in colour. What stands where in its text is fixed, and in a file it is as it was."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TextIO

from ..words.text import FIELD_INDENT, TITLE
from .colour import coloured, columns_of

LEAST = 40
"""Columns of a terminal that is too narrow for lines with an indent."""

COMMAND = "rankwatch "
"""A field that begins so is a command: it stays in one line, as it may be copied."""


def as_shown(text: str, stream: TextIO | None) -> str:
    """A report's text as ``stream`` is to show it: wrapped and in colour if it is a terminal, unchanged otherwise."""
    columns = columns_of(stream)
    return coloured(wrapped(text, columns) if columns >= LEAST else text, stream)


def wrapped(text: str, columns: int) -> str:
    """Wraps the fields of a head between words. Frames and tables stay as they are: a head ends with a blank line."""
    return "\n".join(_wrapped(text.split("\n"), columns))


def _wrapped(lines: list[str], columns: int) -> Iterator[str]:
    is_head = False
    for line in lines:
        is_head = line.startswith(TITLE) or (is_head and bool(line))
        begin = len(TITLE) if line.startswith(TITLE) else max(FIELD_INDENT, len(line) - len(line.lstrip()))
        if not is_head or len(line) <= columns or line[begin:].startswith(COMMAND):
            yield line
            continue
        indent = " " * (begin if line.startswith(TITLE) else begin + 2)
        first, *rest = textwrap.wrap(
            line[begin:], columns, initial_indent=line[:begin], subsequent_indent=indent, break_on_hyphens=False,
            break_long_words=False, expand_tabs=False, replace_whitespace=False,
        )  # fmt: skip
        yield first
        yield from rest
