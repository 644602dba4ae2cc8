"""The frame tables that the runs of one key hold in memory. The one used longest ago goes first. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from rankwatch.shared.types.frame import FrameTable

MAX_TABLES = 256
"""Frame tables retained per run. A rank that needs another one is asked to send it again."""

MAX_BYTES = 512 << 20
"""Bytes of the tables of all runs of one key."""

SPEC_BYTES, ROW_BYTES = 250, 150
"""What a frame and a reading of a table take, about, beside what their message has."""


class TableRoom:
    """What is free for the tables of one key."""

    def __init__(self) -> None:
        self.held = 0
        self._sizes: OrderedDict[tuple[FrameTables, str], int] = OrderedDict()

    def take(self, of: FrameTables, table: str, size: int) -> None:
        self._sizes[of, table] = size
        self.held += size
        while self.held > MAX_BYTES and len(self._sizes) > 1:
            oldest, name = next(iter(self._sizes))
            oldest.drop(name)

    def use(self, of: FrameTables, table: str) -> None:
        self._sizes.move_to_end((of, table))

    def free(self, of: FrameTables, table: str) -> None:
        self.held -= self._sizes.pop((of, table))


class FrameTables:
    """The tables of one run."""

    def __init__(self, room: TableRoom) -> None:
        self._room = room
        self._tables: OrderedDict[str, FrameTable] = OrderedDict()

    def __repr__(self) -> str:
        return f"FrameTables({list(self._tables)})"

    def __len__(self) -> int:
        return len(self._tables)

    def __iter__(self) -> Iterator[FrameTable]:
        return iter(self._tables.values())

    def add(self, table: FrameTable, size: int) -> None:
        """``size``: the bytes of its message."""
        self.drop(table.id)
        if len(self._tables) >= MAX_TABLES:
            self.drop(next(iter(self._tables)))
        self._tables[table.id] = table
        self._room.take(self, table.id, size + SPEC_BYTES * len(table.specs) + ROW_BYTES * table.rows)

    def get(self, table: str) -> FrameTable | None:
        return self._tables.get(table)

    def use(self, table: str) -> None:
        """It was needed now."""
        self._tables.move_to_end(table)
        self._room.use(self, table)

    def drop(self, table: str) -> None:
        if self._tables.pop(table, None) is not None:
            self._room.free(self, table)

    def clear(self) -> None:
        for table in list(self._tables):
            self.drop(table)
