"""What ``?`` shows: each column of the tables on the screen, the words and curves around them, and the keys. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from .ranks import MEANINGS
from .table import Line, TextTable

NAMES = 10
"""Characters of a name that is explained, with the space after it."""

CURVES = (
    ("loss", "the mean over the ranks that have one, batch by batch, from its least to its largest, by its logarithm if that is "
     "more than 10 times its least; the newest is at the right; ! is an inf or nan. Losses that take "
     "turns have the class that they train"),
    ("gradient norm", "of all gradients in the step before each batch, before they were clipped; drawn as the loss"),
    ("batches/s", "how many batches are trained in a second, from 0 to the most; a low bar: they took long"),
)  # fmt: skip

KEYS = (
    ("up, down", "choose a node or a rank; so do k, j and the page keys"),
    ("enter", "open the node, then the rank with its last batches; right does the same"),
    ("b", "back; so do escape and left"),
    ("n, p", "next and previous rank, while one is open"),
    ("g", "sort the modules by growth, or by headroom again"),
    ("?", "this help, and back"),
    ("q", "quit; the run goes on"),
)


def explained(tables: Sequence[TextTable], width: int) -> list[Line]:
    """The lines, wrapped to the width. A table's first column heads the explanation of the others."""
    lines: list[Line] = []
    for first, *others in (table.columns for table in tables):
        lines += [
            Line(line, "bold") for line in textwrap.wrap(f"{first.name}: {first.means}", width, subsequent_indent="  ")
        ]
        lines += _entries(((column.name, column.means) for column in others), width)
        if any(column.name == "state" for column in others):
            lines += [Line("states", "bold"), *_entries(MEANINGS.items(), width)]
    for title, entries in (("curves", CURVES), ("keys", KEYS)):
        lines += [Line(title, "bold"), *_entries(entries, width)]
    return lines


def _entries(entries: Iterable[tuple[str, str]], width: int) -> list[Line]:
    indent = " " * (NAMES + 2)
    wrapped = (
        textwrap.wrap(f"{name:{NAMES - 1}} {text}", width, initial_indent="  ", subsequent_indent=indent)
        for name, text in entries
    )
    return [Line(line) for lines in wrapped for line in lines]
