"""Readings as named scalars, for a training's logger and for TensorBoard. Used by the agent and by exports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..types.frame import MEASURED, BatchSummary, FrameSpec, FrameTable, Kind, Phase
from .text import PHASE_WORDS


def name_rows(specs: Iterable[FrameSpec]) -> list[str]:
    """``MODULE/LABEL`` of each reading, ``loss`` of a loss; from the second call in a batch on, with the call's number."""
    calls: Counter[tuple[str, Phase, str]] = Counter()
    rows = []
    for spec in specs:
        phase = f" ({PHASE_WORDS[spec.phase]})" if spec.phase is Phase.RECOMPUTE else ""
        for row in spec.readings:
            what = spec.module, spec.phase, row.label
            calls[what] += 1
            call = f" (call {calls[what]})" if calls[what] > 1 else ""
            module = f"{spec.module or '(root)'}{phase}{call}/{row.label}"
            rows.append(row.label + call if row.kind is Kind.LOSS else module)
    return rows


class LastBatch:
    """The parts of the last batch that was judged, still packed."""

    def __init__(self) -> None:
        self._parts: list[tuple[FrameTable, BatchSummary]] = []

    def add(self, table: FrameTable, summary: BatchSummary) -> None:
        last = self._parts[0][1].batch if self._parts else -1
        if summary.batch < last:
            return  # the backward of an earlier batch
        if summary.batch > last:
            self._parts = []
        self._parts.append((table, summary))

    def scalars(self, newer: tuple[FrameTable, BatchSummary] | None = None) -> dict[str, float]:
        """``abs_max/MODULE/LABEL`` and ``abs_min/MODULE/LABEL`` of each reading with numbers.

        ``newer``: the forward of a newer batch, whose loss has yet to come.
        """
        found: dict[str, float] = {}
        parts = self._parts if newer is None else [newer]
        readings = [reading for table, part in parts for frame in part.frames(table) for reading in frame.readings]
        names = name_rows(spec for table, _ in parts for spec in table.specs)
        for name, reading in zip(names, readings, strict=True):
            if reading.state in MEASURED:
                found[f"abs_max/{name}"] = reading.abs_max
                found[f"abs_min/{name}"] = reading.abs_min
        return found
