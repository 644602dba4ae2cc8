"""Names that ranks choose, made fit for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` in one line, without what would move a terminal's cursor: ranks choose the names in it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
