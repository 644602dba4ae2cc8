"""Frame tables -> columns of numbers for words: each word is stored once for all readings of all parts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.types.frame import FrameTable

from ...record.layout import NO_ROW, Array

TEXTS = "module", "module_class", "phase", "label", "kind", "dtype"
"""The columns of words that a frame table has for its rows, besides the frame."""

NO_WORD = -1
"""The number that stands for no word."""

CACHED_TABLES = 64
"""Frame tables whose columns are held in memory."""


class Words:
    """Words, numbered in the order in which they came."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._numbers: dict[str, int] = {}
        self.numbers(words)

    def numbers(self, words: Iterable[str]) -> Array:
        """The numbers of these words."""
        numbers = self._numbers
        return np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int32)

    def all(self) -> list[str]:
        return list(self._numbers)


class TableWords:
    """The columns of frame tables: ``frame``, counted from the part's first, and for each of TEXTS the numbers of its words."""

    def __init__(self) -> None:
        self.words = {name: Words() for name in TEXTS}
        self._of = BoundedDict[int, dict[str, Array]](CACHED_TABLES)

    def of(self, number: int, table: FrameTable) -> dict[str, Array]:
        """The columns of the table with this number."""
        if number not in self._of:
            self._of[number] = self._columns(table)
        return self._of[number]

    def at(self, tables: dict[int, FrameTable], numbers: Array, rows: Array) -> dict[str, Array]:
        """The columns of single rows, each in the table of its number; NO_WORD, and frame -1, without such a table or row."""
        found = {name: np.full(len(rows), NO_WORD, np.int32) for name in ("frame", *TEXTS)}
        for number, table in tables.items():
            here = (numbers == number) & (rows != NO_ROW) & (rows < table.rows)
            for name, column in self.of(number, table).items():
                found[name][here] = column[rows[here]]
        return found

    def _columns(self, table: FrameTable) -> dict[str, Array]:
        rows = [(frame, spec, row) for frame, spec in enumerate(table.specs) for row in spec.readings]
        words = {
            "module": [spec.module for _, spec, _ in rows],
            "module_class": [spec.module_class for _, spec, _ in rows],
            "phase": [spec.phase.name.lower() for _, spec, _ in rows],
            "label": [row.label for _, _, row in rows],
            "kind": [row.kind.name.lower() for _, _, row in rows],
            "dtype": [row.dtype for _, _, row in rows],
        }
        frames = np.array([frame for frame, _, _ in rows], np.int32)
        return {"frame": frames, **{name: self.words[name].numbers(words[name]) for name in TEXTS}}
