"""Lines and tables that fit a width, whatever their content. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rankwatch.shared.printable import one_line

GAP = 1
"""Characters between two columns."""

LEAST_NAME = 10
"""The least width of the first column, in characters."""

CUT = "..."


class Line(NamedTuple):
    """``style``: one of rich's; empty for plain text."""

    text: str
    style: str = ""


class Column(NamedTuple):
    """``least`` and ``most``: its width in characters. The first column of a table gets the width that the others leave.

    ``means``: what it shows, for the help.
    """

    name: str
    least: int = 0
    most: int = 0
    right: bool = True
    means: str = ""


class TableRow(NamedTuple):
    cells: tuple[str, ...]
    style: str = ""


class TextTable(NamedTuple):
    columns: tuple[Column, ...]
    rows: Sequence[TableRow]

    def widths(self, width: int) -> list[int]:
        """The widths of the columns, in a table of ``width`` characters."""
        others = [
            min(column.most, max([column.least, len(column.name), *(len(row.cells[at]) for row in self.rows)]))
            for at, column in enumerate(self.columns[1:], 1)
        ]
        return [width - sum(others) - GAP * len(others), *others]

    def fitted(self, width: int) -> TextTable:
        """The table with each cell cut to its column's width, and without the last columns where they have no room.

        Names in the first column are cut at the front: they differ at the end.
        """
        widths = self.widths(width)
        if widths[0] < LEAST_NAME and len(widths) > 1:
            rows = [row._replace(cells=row.cells[:-1]) for row in self.rows]
            return TextTable(self.columns[:-1], rows).fitted(width)
        columns = [
            column._replace(name=shorten(column.name, most)) for column, most in zip(self.columns, widths, strict=True)
        ]
        rows = [row._replace(cells=_fitted(row.cells, widths)) for row in self.rows]
        return TextTable(tuple(columns), rows)


def _fitted(cells: tuple[str, ...], widths: Sequence[int]) -> tuple[str, ...]:
    return tuple(shorten(cell, most, keep_end=not at) for at, (cell, most) in enumerate(zip(cells, widths, strict=True)))


def shorten(text: str, most: int, *, keep_end: bool = False) -> str:
    """``text`` in one line of at most ``most`` characters."""
    text = one_line(text)
    if len(text) <= most:
        return text
    room = max(0, most - len(CUT))
    return (CUT + text[len(text) - room :] if keep_end else text[:room] + CUT)[:most]
