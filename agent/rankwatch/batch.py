"""The frames of the batch in progress -> its frame table and summary."""

from __future__ import annotations

import time

from .frame import BatchSummary, Frame, FrameSpec, FrameTable, Position, pack

MAX_TABLES = 64
"""Tables remembered. A model whose every batch looks different hashes its table each time, but stays bounded."""


class Tables:
    """The frame tables of this process, so that a batch like the last ones costs one look-up."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], FrameTable] = {}

    def of(self, specs: list[FrameSpec]) -> FrameTable:
        key = tuple(map(id, specs))  # specs are interned, and the table keeps them alive
        table = self._tables.pop(key, None) or FrameTable(tuple(specs))
        self._tables[key] = table
        if len(self._tables) > MAX_TABLES:
            del self._tables[next(iter(self._tables))]
        return table


class BatchInProgress:
    """Collects the columns of one batch, frame by frame."""

    def __init__(self, position: Position, optimizer_step: int, traced: bool) -> None:
        self.number = position.batch
        self.optimizer_step = optimizer_step
        self.traced = traced
        self.trace: list[Frame] = []
        self._started_at = time.time()
        self._specs: list[FrameSpec] = []
        self._lows: list[float] = []
        self._highs: list[float] = []
        self._states = bytearray()

    def add(self, frame: Frame) -> None:
        self._specs.append(frame.spec)
        self._lows += frame.abs_min
        self._highs += frame.abs_max
        self._states += frame.states
        if self.traced:
            self.trace.append(frame)

    def finish(self, tables: Tables) -> tuple[FrameTable, BatchSummary]:
        table = tables.of(self._specs)
        return table, BatchSummary(
            batch=self.number,
            optimizer_step=self.optimizer_step,
            started_at=self._started_at,
            ended_at=time.time(),
            traced=self.traced,
            table_id=table.id,
            abs_min=pack(table.typecode, self._lows),
            abs_max=pack(table.typecode, self._highs),
            states=bytes(self._states),
        )
