"""Colours for a report on a terminal. What stands where in its text is fixed: it is made plain, and coloured at the end."""

from __future__ import annotations

import os
import re
from typing import TextIO

_RED, _AMBER, _BOLD, _END = "\x1b[1;31m", "\x1b[33m", "\x1b[1m", "\x1b[0m"

_TITLE = re.compile(r"rankwatch: .*")
_LABEL = re.compile(r"(  )(\S+)(?= |$)")
_NOT_FINITE = re.compile(r".{14}(?:inf|nan) .*")
"""A reading whose abs max, in its columns, is not finite."""


def is_coloured(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that shows colours, and they are wanted: see https://no-color.org."""
    if stream is None or stream.closed:  # as stdout may be
        return False
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def columns_of(stream: TextIO | None) -> int:
    """Of a terminal; 0: it is none, or its size was never set."""
    if stream is None or stream.closed or not stream.isatty():
        return 0
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return 0


def amber(text: str) -> str:
    """For what went on, or to its end, and not well."""
    return f"{_AMBER}{text}{_END}"


def coloured(text: str, stream: TextIO | None) -> str:
    """A report's text as ``stream`` is to show it: in colour if it is a terminal, plain otherwise."""
    return "\n".join(map(_colour, text.split("\n"))) if is_coloured(stream) else text


def _colour(line: str) -> str:
    if _TITLE.fullmatch(line):
        return f"{_RED if 'first inf' in line or 'first nan' in line else _BOLD}{line}{_END}"
    if _NOT_FINITE.fullmatch(line):
        return f"{_RED}{line}{_END}"
    return _LABEL.sub(rf"\1{_BOLD}\2{_END}", line, count=1) if _LABEL.match(line) else line
