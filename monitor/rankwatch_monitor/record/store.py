"""The record of one run: an SQLite database (WAL) in its folder, ``run.db``. ``record.py`` reads it.

    meta       whose the record is
    standing   where the ranks are, while the run goes on: one row, JSON
    events     every fact that is no batch (journal.py), in the order in which they came; replaying them gives the verdict
    tables     the frame tables, numbered from 1
    digests    segments of digests (digest.py), in the order in which the parts came
    envelopes  one for each part of a batch and frame table
    summaries  parts of batches as the ranks sent them: abs min, abs max and states, one after the other

One process writes; any number may read meanwhile. Every write is one transaction. What is kept is bounded by ``Limits``.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from rankwatch.shared import messages, wire
from rankwatch.shared.frame import BatchSummary, FrameTable

from ..decide import journal
from ..decide.effects import Show
from ..decide.journal import Entry, Fact, Trained
from .digest import DIGEST, Array, Columns, Envelope, Part, pack_digests, summarise, unpack_digests
from .migrations import STANDING, migrate

SCHEMA = 3
"""PRAGMA user_version of the files written here; an older one is brought up to it, those of a newer one are refused."""

FILE = "run.db"

SEGMENT = 4096
"""Digests in a segment: enough to read them fast, few enough to write the last one again with every transaction."""

KEPT_TABLES = 64
"""Frame tables held in memory."""

FEW_STANDINGS = 16
"""Turned to JSON in one call."""

MAX_PARAMETERS = 999
"""In a statement, whatever SQLite this is."""

BUSY_TIMEOUT = 30.0
"""Seconds that a write waits for somebody else who writes to the file; readers lock nothing."""

Row: TypeAlias = tuple[Any, ...]

_CREATE = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, now REAL NOT NULL, rank INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL
);
CREATE TABLE tables (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, body BLOB NOT NULL);
CREATE TABLE digests (
    id INTEGER PRIMARY KEY, first_batch INTEGER NOT NULL, last_batch INTEGER NOT NULL, count INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE TABLE envelopes (
    batch INTEGER NOT NULL, first_frame INTEGER NOT NULL, tbl INTEGER NOT NULL, ranks INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (batch, first_frame, tbl)
);
CREATE TABLE summaries (
    batch INTEGER NOT NULL, rank INTEGER NOT NULL, first_frame INTEGER NOT NULL, tbl INTEGER NOT NULL, traced INTEGER NOT NULL,
    body BLOB NOT NULL, PRIMARY KEY (batch, rank, first_frame)
);
{STANDING};
"""

OWN_EVENTS: dict[str, type[journal.OwnEvent]] = {
    cls.__name__.lower(): cls
    for cls in (
        journal.Opened, journal.Left, journal.Reached, journal.Waited, journal.JobInterrupted, journal.JobEnded, journal.Decided,
        journal.Closed,
    )
}  # fmt: skip


class StoreError(Exception):
    """A record cannot be read or written; the text says which and why."""


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
        self._tables: dict[str, Columns] = {}
        with self._explained():
            self._database = sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            # After a power failure the last transactions may be missing; a killed process loses nothing.
            self._database.execute("PRAGMA synchronous = NORMAL")
            known = version(self._database)
            if known == 0:
                self._database.executescript(f"BEGIN; {_CREATE} PRAGMA user_version = {SCHEMA}; COMMIT")
            elif known < SCHEMA:
                with self._database:
                    self._database.execute("BEGIN IMMEDIATE")
                    migrate(self._database, known)
            self._events = self._one("SELECT COUNT(*) FROM events")
            opened = self._one("SELECT body FROM events ORDER BY id LIMIT 1")
            self._world_size = json.loads(opened)["world_size"] if opened else 1
            self._bytes = {
                name: self._one(f"SELECT TOTAL(LENGTH(body)) FROM {name}") for name in ("summaries", "envelopes", "tables")
            }
            last = self._database.execute("SELECT id, body FROM digests ORDER BY id DESC LIMIT 1").fetchone()
            self._segment_id: int = last[0] if last else 1
            self._segment: Array = unpack_digests(last[1]) if last else np.zeros(0, DIGEST)

    def write(self, entries: Sequence[Entry], time: float, shown: Show | None = None, **meta: str) -> float | None:
        """Puts entries on record, all or none, and the standings in place of those before.

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
            if isinstance(entry.fact, journal.Opened):
                self._world_size = entry.fact.world_size
            rows.append((time, entry.now, entry.rank, *_encode(entry.fact)))
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
            digests.append(summarise([Part(rank, part.seq, part.summary) for rank, part in group], columns, envelope))
            if not columns.number:
                continue
            envelopes.append((*place, envelope.ranks, envelope.pack()))
            keeps_all = batch % self._distance(columns) == 0
            summaries += (
                (batch, rank, first_frame, columns.number, part.summary.traced, _body(part.summary))
                for rank, part in group
                if keeps_all or part.summary.traced
            )
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
                body = wire.encode(messages.Table(table))
                if self._bytes["tables"] + len(body) <= self._limits.tables:
                    self._bytes["tables"] += len(body)
                    number = self._database.execute(
                        "INSERT INTO tables (id, body) VALUES (?, ?)", (table.id, body)
                    ).lastrowid
            columns = Columns(number or 0, table)
        self._tables[table.id] = columns  # the one that was used longest ago goes first
        if len(self._tables) > KEPT_TABLES:
            del self._tables[next(iter(self._tables))]
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
        size = columns.rows * (2 * columns.dtype.itemsize + 1) * self._world_size
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


def version(database: sqlite3.Connection) -> int:
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA:
        raise ValueError(f"written by a newer rankwatch (schema {version}, known here up to {SCHEMA}): use that one")
    return version


def _body(summary: BatchSummary) -> bytes:
    return summary.abs_min + summary.abs_max + summary.states


def _to_json(shown: Show) -> str:
    """Few at a time: a call keeps the interpreter to its end, and of thousands that is long for an abort to wait."""
    ranks = shown.standings
    parts = (json.dumps(ranks[start : start + FEW_STANDINGS]) for start in range(0, len(ranks), FEW_STANDINGS))
    return f'{{"run": {json.dumps(shown.standing)}, "ranks": [{", ".join(part[1:-1] for part in parts)}]}}'


def _encode(fact: Fact) -> tuple[str, str | bytes]:
    """The kind of a fact and its body: the wire's bytes of a message, JSON of what is the collector's own."""
    kind = type(fact).__name__.lower()
    if kind in OWN_EVENTS:
        return kind, json.dumps(dataclasses.asdict(cast(journal.OwnEvent, fact)))
    return kind, wire.encode(cast(messages.Message, fact))
