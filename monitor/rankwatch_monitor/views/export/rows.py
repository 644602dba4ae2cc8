"""Frame tables -> Arrow columns of their rows, from which readings take theirs: each word is stored once for all readings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from rankwatch.shared.types.frame import FrameTable

from ...record.numbers.layout import NO_ROW, Array

TEXTS = "module", "module_class", "phase", "label", "kind", "dtype"
"""The columns of words that a frame table has for its rows, besides the frame."""


class FrameRows:
    """The rows of frame tables, one table after the other: ``frame``, counted from the part's first, and TEXTS."""

    def __init__(self, tables: Mapping[int, FrameTable]) -> None:
        specs = [(frame, spec) for table in tables.values() for frame, spec in enumerate(table.specs)]
        rows = [(frame, spec, row) for frame, spec in specs for row in spec.readings]
        words = {
            "module": [spec.module for _, spec, _ in rows],
            "module_class": [spec.module_class for _, spec, _ in rows],
            "phase": [spec.phase.name.lower() for _, spec, _ in rows],
            "label": [row.label for _, _, row in rows],
            "kind": [row.kind.name.lower() for _, _, row in rows],
            "dtype": [row.dtype for _, _, row in rows],
        }
        self._columns = {"frame": pa.array([frame for frame, _, _ in rows], pa.int64())}
        self._columns |= {name: of_words(words[name]) for name in TEXTS}
        self._counts = {number: table.rows for number, table in tables.items()}
        self._starts = dict(zip(tables, np.cumsum([0, *self._counts.values()]).tolist(), strict=False))

    def has(self, tables: Mapping[int, FrameTable]) -> bool:
        return tables.keys() <= self._starts.keys()

    def of(self, number: int) -> Array:
        """The places of all rows of the table with this number."""
        start = self._starts[number]
        return np.arange(start, start + self._counts[number])

    def places(self, numbers: Array, rows: Array) -> pa.Array:
        """The places of single rows, each in the table of its number; null without such a table or row."""
        found, known = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_)
        for number, start in self._starts.items():
            here = (numbers == number) & (rows != NO_ROW) & (rows < self._counts[number])
            found[here] = rows[here].astype(np.int64) + start
            known |= here
        return pa.array(found, mask=~known)

    def take(self, places: pa.Array) -> dict[str, pa.Array]:
        return {name: column.take(places) for name, column in self._columns.items()}


def of_words(words: Sequence[str | None]) -> pa.Array:
    return pa.array(words, pa.string()).dictionary_encode()
