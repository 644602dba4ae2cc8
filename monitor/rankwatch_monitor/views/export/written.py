"""What an export wrote, and which batches it did not find."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...record.numbers.layout import Array


@dataclass(slots=True)
class Written:
    """The number of rows, their ``first`` and ``last`` batch (-1: none), and the number of batches if these come in order."""

    rows: int = 0
    first: int = -1
    last: int = -1
    batches: int = 0

    def add(self, rows: int, batches: Array) -> None:
        """``batches``: the batches of these rows, each at least once."""
        self.rows += rows
        if len(batches):
            self.batches += len(np.unique(batches)) - int(self.batches > 0 and int(batches[0]) == self.last)
            self.first = int(batches.min()) if self.first < 0 else min(self.first, int(batches.min()))
            self.last = max(self.last, int(batches.max()))


def describe(written: Written, things: str, run: str, into: str, trained: int = 0, hint: str = "") -> str:
    """In a line. ``trained``: how many batches the run had, stored or not; ``hint``: where more of them may be."""
    text = f"{written.rows} {things} of run {run} written to {into}"
    if written.rows:
        text += f": batch {written.first}" + (f" to {written.last}" if written.last > written.first else "")
    if written.batches < trained:
        text += f", {written.batches} of {trained} batches; the others are not stored" + hint
    return text
