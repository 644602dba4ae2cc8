"""The record of one run as it is written: an SQLite database (WAL) in its folder; ``schema.py`` has its tables.

One process writes; any number may read meanwhile. Every write is one transaction. ``Limits`` bounds what is retained.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rankwatch.shared import messages
from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.frame import FrameTable

from ..decide.effects import Show
from ..decide.journal import Entry, Opened, Trained
from . import facts, runs
from .digest import Columns, Envelope, RankSummary, summarise
from .layout import DIGEST, Array, pack_digests, pack_part, pack_table, unpack_digests
from .runs import RunRow
from .schema import BUSY_TIMEOUT, CREATE, SCHEMA, StoreError, is_new

SEGMENT = 4096
"""Digests in a segment: enough to read them fast, few enough to write the last one again with every transaction."""

CACHED_TABLES = 64
"""Frame tables held in memory."""

FEW_STANDINGS = 16
"""Turned to JSON in one call."""

MAX_PARAMETERS = 999
"""In a statement, whatever SQLite this is."""

Row: TypeAlias = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What is kept of a run, in bytes on disk and in rows; the oldest goes first.

    ``summaries``: those of traced batches go last. ``batch``: bytes of summaries of one batch of all ranks beyond which only
    those of each second batch are kept, of each fourth, and so on; those of traced ones always are. ``envelopes``: when they
    are over it, those of every second batch of the older half go, and again, so that the older they are the wider apart they
    lie. ``tables``: batches of further ones are kept as digests alone. ``events``: beyond so many, notices are not recorded.
    """

    digests: int = 1 << 29
    envelopes: int = 1 << 29
    summaries: int = 1 << 30
    batch: int = 2 * 2**20
    tables: int = 1 << 27
    events: int = 1_000_000


class Store:
    """A record that is written to; every method in one thread.

    Args:
        path: the database file; its folder exists. A record that is there is gone on with.
        limits: what is kept.

    Raises (as every method does):
        StoreError: it cannot be read or written.
    """

    def __init__(self, path: Path, limits: Limits = Limits()) -> None:
        self._path = path
        self._limits = limits
        self._tables = BoundedDict[str, Columns](CACHED_TABLES)
        with self._explained():
            self._database = sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            # After a power failure the last transactions may be missing; a killed process loses nothing.
            self._database.execute("PRAGMA synchronous = NORMAL")
            if is_new(self._database):
                self._database.executescript(f"BEGIN; {CREATE} PRAGMA user_version = {SCHEMA}; COMMIT")
            self._events = self._one("SELECT COUNT(*) FROM events")
            row = self._database.execute(runs.QUERY).fetchone()
            self._row = RunRow("", *row) if row else RunRow("")
            self._bytes = {
                name: self._one(f"SELECT TOTAL(LENGTH(body)) FROM {name}") for name in ("summaries", "envelopes", "tables")
            }
            last = self._database.execute("SELECT id, body FROM digests ORDER BY id DESC LIMIT 1").fetchone()
            self._segment_id: int = last[0] if last else 1
            self._segment: Array = unpack_digests(last[1]) if last else np.zeros(0, DIGEST)

    def write(self, entries: Sequence[Entry], time: float, shown: Show | None = None, **meta: str) -> float | None:
        """Stores entries, all or none, and the standings in place of those before.

        Args:
            time: Unix seconds.
            meta: what there is to say of the record.

        Returns:
            the least headroom of the batches among them (see digest.DIGEST); None where there are none.
        """
        with self._explained(), self._database:
            self._database.execute("BEGIN IMMEDIATE")
            for name, value in meta.items():
                self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))
            self._write_events([entry for entry in entries if not isinstance(entry.fact, Trained)], time)
            if shown is not None:
                self._database.execute("INSERT OR REPLACE INTO standing VALUES (1, ?, ?)", (time, _to_json(shown)))
            headroom = self._write_batches(
                [(entry.rank, entry.fact) for entry in entries if isinstance(entry.fact, Trained)]
            )
            if self._row.world_size:
                columns = ", ?" * (len(self._row) - 1)
                self._database.execute(f"INSERT OR REPLACE INTO run VALUES (1{columns})", self._row[1:])
            self._trim()
            return headroom

    def close(self) -> None:
        """Leaves one file behind, where no reader is in the way."""
        with self._explained():
            self._database.close()

    # --- writing --------------------------------------------------------------------------------------------------

    def _write_events(self, entries: Sequence[Entry], time: float) -> None:
        rows: list[Row] = []
        for entry in entries:
            if self._events + len(rows) >= self._limits.events and isinstance(entry.fact, messages.Noticed):
                continue
            if isinstance(entry.fact, Opened):
                self._row = self._row._replace(began=time)
            self._row = facts.row_after(self._row, entry.fact)
            rows.append((time, entry.now, entry.rank, *facts.encode(entry.fact)))
        self._insert("INSERT INTO events (time, now, rank, kind, body) VALUES", rows)
        self._events += len(rows)

    def _write_batches(self, parts: Sequence[tuple[int, Trained]]) -> float | None:
        if not parts:
            return None
        digests: list[Array] = []
        envelopes: list[Row] = []
        summaries: list[Row] = []
        groups: dict[tuple[str, int, int], list[tuple[int, Trained]]] = {}
        for part in parts:
            summary = part[1].summary
            groups.setdefault((summary.table_id, summary.batch, summary.first_frame), []).append(part)
        for (_, batch, first_frame), group in groups.items():
            columns = self._columns(group[0][1].table)
            place = batch, first_frame, columns.number
            envelope = self._envelope(place, columns)
            digests.append(summarise([RankSummary(rank, part.seq, part.summary) for rank, part in group], columns, envelope))
            if not columns.number:
                continue
            envelopes.append((*place, envelope.ranks, envelope.pack()))
            keeps_all = batch % self._distance(columns) == 0
            summaries += (
                (batch, rank, first_frame, columns.number, part.summary.traced, pack_part(part.summary))
                for rank, part in group
                if keeps_all or part.summary.traced
            )
        self._row = self._row._replace(batches=max(self._row.batches, 1 + max(batch for _, batch, _ in groups)))
        self._write_digests(np.concatenate(digests))
        self._insert("INSERT OR REPLACE INTO envelopes VALUES", envelopes)
        self._insert("INSERT OR REPLACE INTO summaries VALUES", summaries)
        self._bytes["envelopes"] += sum(len(row[-1]) for row in envelopes)
        self._bytes["summaries"] += sum(len(row[-1]) for row in summaries)
        return float(min(each["headroom"].min() for each in digests))

    def _write_digests(self, digests: Array) -> None:
        while len(digests):
            room = SEGMENT - len(self._segment)
            self._segment, digests = np.concatenate([self._segment, digests[:room]]), digests[room:]
            batches = self._segment["batch"]
            row = self._segment_id, int(batches.min()), int(batches.max()), len(self._segment), pack_digests(self._segment)
            self._database.execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?)", row)
            if len(self._segment) == SEGMENT:
                self._segment_id, self._segment = self._segment_id + 1, self._segment[:0]

    def _columns(self, table: FrameTable) -> Columns:
        """Those of a frame table; numbered 0 where the record has no room for it."""
        columns = self._tables.pop(table.id, None)
        if columns is None:
            number = self._one("SELECT number FROM tables WHERE id = ?", table.id)
            if not number:
                body = pack_table(table)
                if self._bytes["tables"] + len(body) <= self._limits.tables:
                    self._bytes["tables"] += len(body)
                    number = self._database.execute(
                        "INSERT INTO tables (id, body) VALUES (?, ?)", (table.id, body)
                    ).lastrowid
            columns = Columns(number or 0, table)
        self._tables[table.id] = columns  # the one that was used longest ago goes first
        return columns

    def _envelope(self, place: tuple[int, int, int], columns: Columns) -> Envelope:
        """That of the ranks which were told before, to be written again with those that are told now."""
        query = "SELECT ranks, body FROM envelopes WHERE batch = ? AND first_frame = ? AND tbl = ?"
        row = self._database.execute(query, place).fetchone()
        if row is None:
            return Envelope(columns)
        self._bytes["envelopes"] -= len(row[1])
        return Envelope.unpack(row[0], row[1], columns)

    def _distance(self, columns: Columns) -> int:
        """Summaries are kept of each so many-th batch."""
        size = columns.part.size * self._row.world_size
        return 1 << (max(1, -(-size // self._limits.batch)) - 1).bit_length()

    def _insert(self, statement: str, rows: Sequence[Row]) -> None:
        # Many rows in a statement: with each statement the thread gives up the interpreter, and it is long until its next turn.
        step = MAX_PARAMETERS // len(rows[0]) if rows else 1
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            places = ", ".join([f"({', '.join('?' * len(some[0]))})"] * len(some))
            self._database.execute(f"{statement} {places}", [value for row in some for value in row])

    # --- keeping within the limits --------------------------------------------------------------------------------

    def _trim(self) -> None:
        while self._bytes["summaries"] > self._limits.summaries:
            for kind in ("traced = 0", "1"):
                middle = self._one(f"SELECT (MIN(batch) + MAX(batch)) / 2 FROM summaries WHERE {kind}")
                if middle is not None and self._bytes["summaries"] > self._limits.summaries:
                    self._delete("summaries", f"{kind} AND batch <= {middle}")
        while self._bytes["envelopes"] > self._limits.envelopes:
            batches = [row[0] for row in self._database.execute("SELECT DISTINCT batch FROM envelopes ORDER BY batch")]
            for batch in batches[1 : len(batches) // 2 : 2] or batches:
                self._delete("envelopes", f"batch = {batch}")
        kept = max(1, self._limits.digests // (SEGMENT * DIGEST.itemsize))
        self._database.execute("DELETE FROM digests WHERE id <= ?", (self._segment_id - kept,))

    def _delete(self, table: str, condition: str) -> None:
        self._bytes[table] -= self._one(f"SELECT TOTAL(LENGTH(body)) FROM {table} WHERE {condition}")
        self._database.execute(f"DELETE FROM {table} WHERE {condition}")

    def _one(self, query: str, *values: object) -> Any:
        """The first column of the first row, or None."""
        row = self._database.execute(query, values).fetchone()
        return row[0] if row else None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError) as error:
            raise StoreError(f"the record {self._path}: {error}") from error


def _to_json(shown: Show) -> str:
    """Few at a time: a call keeps the interpreter to its end, and of thousands that is long for an abort to wait."""
    ranks = shown.standings
    parts = (json.dumps(ranks[start : start + FEW_STANDINGS]) for start in range(0, len(ranks), FEW_STANDINGS))
    return f'{{"run": {json.dumps(shown.standing)}, "ranks": [{", ".join(part[1:-1] for part in parts)}]}}'
