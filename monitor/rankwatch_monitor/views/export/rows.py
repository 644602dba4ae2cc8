"""Rows of frame tables -> columns of numbers that stand for words: what readings of many parts have in common, told once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.frame import FrameTable

from ...record.layout import NO_ROW, Array

TEXTS = "module", "module_class", "phase", "label", "kind", "dtype"
"""What a frame table says of each of its rows, beside the frame it is of."""

NO_WORD = -1
"""The number of a word that there is none of."""

KEPT = 64
"""Tables whose columns are kept."""


class Words:
    """Words and their numbers, in the order in which they came."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._numbers: dict[str, int] = {}
        self.numbers(words)

    def numbers(self, words: Iterable[str]) -> Array:
        """Those of these words."""
        numbers = self._numbers
        return np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int32)

    def all(self) -> list[str]:
        return list(self._numbers)


class TableWords:
    """The columns of frame tables: ``frame``, counted from a part's first, and of each of TEXTS the numbers of its words."""

    def __init__(self) -> None:
        self.words = {name: Words() for name in TEXTS}
        self._of = BoundedDict[int, dict[str, Array]](KEPT)

    def of(self, number: int, table: FrameTable) -> dict[str, Array]:
        """Those of the table of this number."""
        if number not in self._of:
            self._of[number] = self._columns(table)
        return self._of[number]

    def at(self, tables: dict[int, FrameTable], numbers: Array, rows: Array) -> dict[str, Array]:
        """Those of single rows, each of the table beside it; NO_WORD, and frame -1, where there is no such table or row."""
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
