"""The record of one run as it is written: an SQLite database in its folder; ``schema.py`` has its tables.

One process writes; any number may read meanwhile. On a network file system a commit waits for readers, and they for it.
Every write is one transaction. ``Limits`` bounds what is retained.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameTable

from ..decide.core.effects import Show
from ..decide.core.journal import Entry, Opened, Trained
from . import facts, runs
from .mounts import is_on_network
from .numbers.digest import Columns, Envelope, RankSummary, summarise
from .numbers.layout import DIGEST, Array, pack_digests, pack_part, pack_table, unpack_digests
from .runs import RunRow
from .schema import BESIDE, CREATE, SCHEMA, WRITER_TIMEOUT, RecordConnection, StoreError, beside, explained, is_new
from .writer_lock import Claim

SEGMENT = 4096
"""Digests in a segment: many, to read them fast; few, since every transaction writes the last segment again."""

CACHED_TABLES = 64
"""Frame tables held in memory."""

LEAST = 1 << 16
"""Bytes of each kind that a record may have in any case."""

FEW_STANDINGS = 16
"""Standings that one call turns into JSON."""

MAX_PARAMETERS = 999
"""Parameters of one statement: every version of SQLite takes this many."""

Row: TypeAlias = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How much of a run is retained; the oldest is dropped first. ``events`` is a number, all others are bytes on disk.

    ``summaries``: traced batches are dropped last. ``batch``: if the summaries of one batch of all ranks need more, they are
    stored only for every second batch, every fourth, and so on; traced batches are always stored. ``envelopes``: over the
    limit, every second batch of the older half is dropped, again and again, so older envelopes are further apart.
    ``tables``: over the limit, batches with a new frame table are stored as digests only. ``events``: after this many,
    notices are not stored.
    """

    digests: int = 1 << 29
    envelopes: int = 1 << 29
    summaries: int = 1 << 30
    batch: int = 2 * 2**20
    tables: int = 1 << 27
    events: int = 1_000_000

    def lowered_to(self, held: Mapping[str, int]) -> Limits:
        """``held``: bytes by the name of a limit. A little is retained of any run."""
        return dataclasses.replace(self, **{name: min(getattr(self, name), max(size, LEAST)) for name, size in held.items()})


class Store:
    """A record open for writing; call every method in the same thread.

    Args:
        path: the database file, in a folder that exists. An existing record is continued.
        limits: what is retained.

    Raises (as every method does):
        StoreError: it cannot be read or written.
    """

    def __init__(self, path: Path, limits: Limits = Limits()) -> None:
        self._path = path
        self._limits = self._limits_now = limits
        self._tables = BoundedDict[str, Columns](CACHED_TABLES)
        self._claim = Claim(path.parent)
        with explained(path):
            self._database = sqlite3.connect(path, timeout=WRITER_TIMEOUT, isolation_level=None, factory=RecordConnection)
            try:
                self._has_journal = is_on_network(path)
                self._open()
            except BaseException:
                self._database.close()
                raise
        self._claim.take()

    def _open(self) -> None:
        if self._has_journal:
            # Truncated, and not deleted: ranks know by a file beside the record that it is open, as by a write-ahead log.
            self._database.execute("PRAGMA journal_mode = TRUNCATE")
            self._database.execute("PRAGMA synchronous = FULL")  # less may damage a file with this journal
        else:
            self._database.execute("PRAGMA journal_mode = WAL")
            # Committed is what a killed process does not lose. A power failure of the host may lose the last transactions.
            self._database.execute("PRAGMA synchronous = NORMAL")
        if is_new(self._database):
            self._database.executescript(f"BEGIN; {CREATE} PRAGMA user_version = {SCHEMA}; COMMIT")
        elif self._has_journal:
            self._database.execute(f"PRAGMA user_version = {SCHEMA}")  # a write, which makes that file
        self._events = self._one("SELECT COUNT(*) FROM events")
        row = self._database.execute(runs.QUERY).fetchone()
        skipped, judged = beside(self._database)
        self.row = RunRow("", *row)._replace(skipped=skipped, judged=judged) if row else RunRow("")
        """What a list shows of the run, according to what was written."""
        self._bytes = {
            name: self._one(f"SELECT TOTAL(LENGTH(body)) FROM {name}") for name in ("summaries", "envelopes", "tables")
        }
        last = self._database.execute("SELECT id, body FROM digests ORDER BY id DESC LIMIT 1").fetchone()
        self._segment_id: int = last[0] if last else 1
        self._segment: Array = unpack_digests(last[1]) if last else np.zeros(0, DIGEST)

    def write(self, entries: Sequence[Entry], time: float, shown: Show | None = None, **meta: str) -> float | None:
        """Stores all entries or none, and replaces the standings.

        Args:
            time: Unix seconds.
            meta: who writes the record.

        Returns:
            the least headroom of the batches among the entries (see layout.DIGEST); None without batches.
        """
        with self._explained(), self._database:
            self._database.execute("BEGIN IMMEDIATE")
            before = self.row
            for name, value in meta.items():
                self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))
            self._write_events([entry for entry in entries if not isinstance(entry.fact, Trained)], time)
            if shown is not None:
                self._database.execute("INSERT OR REPLACE INTO standing VALUES (1, ?, ?)", (time, _to_json(shown)))
            headroom = self._write_batches(
                [(entry.rank, entry.fact) for entry in entries if isinstance(entry.fact, Trained)]
            )
            if self.row.world_size:
                values = self.row[1 : 1 + runs.COLUMNS]
                self._database.execute(f"INSERT OR REPLACE INTO run VALUES (1{', ?' * len(values)})", values)
            for name in BESIDE:
                if (value := getattr(self.row, name)) != getattr(before, name):
                    self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))
            self._trim()
        self._claim.take()
        return headroom

    @property
    def mark(self) -> tuple[int, ...]:
        """Changes with every transaction that has entries. Reads the file."""
        with self._explained():
            segment = self._database.execute("SELECT id, count FROM digests ORDER BY id DESC LIMIT 1").fetchone()
            return (self._one("SELECT MAX(id) FROM events") or 0, *(segment or ()))

    @property
    def size(self) -> int:
        """Bytes of the file. What is dropped makes room in it, and does not make it smaller."""
        with self._explained():
            return int(self._one("PRAGMA page_count") * self._one("PRAGMA page_size"))

    def let_grow(self, *, grows: bool) -> None:
        """Whether the record may grow up to its limits; if not, the oldest is dropped for what is new from now on."""
        if grows:
            self._limits_now = self._limits
        elif self._limits_now is self._limits:
            self._limits_now = self._limits.lowered_to(
                {**self._bytes, "digests": self._segment_id * SEGMENT * DIGEST.itemsize}
            )

    def close(self) -> None:
        """Leaves one file, unless a reader still has the record open."""
        try:
            with self._explained():
                if self._has_journal:
                    self._database.execute("PRAGMA journal_mode = DELETE")
                self._database.close()
        finally:
            self._claim.release()

    # --- writing --------------------------------------------------------------------------------------------------

    def _write_events(self, entries: Sequence[Entry], time: float) -> None:
        rows: list[Row] = []
        for entry in entries:
            if self._events + len(rows) >= self._limits_now.events and isinstance(entry.fact, messages.Noticed):
                continue
            if isinstance(entry.fact, Opened):
                self.row = self.row._replace(began=time)
            self.row = facts.row_after(self.row, entry.fact)
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
            key = batch, first_frame, columns.number
            envelope = self._envelope(key, columns)
            digests.append(summarise([RankSummary(rank, part.seq, part.summary) for rank, part in group], columns, envelope))
            if not columns.number:
                continue
            envelopes.append((*key, envelope.ranks, envelope.pack()))
            is_stored = batch % self._distance(columns) == 0
            summaries += (
                (batch, rank, first_frame, columns.number, part.summary.traced, pack_part(part.summary))
                for rank, part in group
                if is_stored or part.summary.traced
            )
        self.row = self.row._replace(batches=max(self.row.batches, 1 + max(batch for _, batch, _ in groups)))
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
        """The columns of a frame table, which is numbered 0 when the record has no room for it."""
        columns = self._tables.pop(table.id, None)
        if columns is None:
            number = self._one("SELECT number FROM tables WHERE id = ?", table.id)
            if not number:
                body = pack_table(table)
                if self._bytes["tables"] + len(body) <= self._limits_now.tables:
                    self._bytes["tables"] += len(body)
                    number = self._database.execute(
                        "INSERT INTO tables (id, body) VALUES (?, ?)", (table.id, body)
                    ).lastrowid
            columns = Columns(number or 0, table)
        self._tables[table.id] = columns  # the least recently used one is dropped
        return columns

    def _envelope(self, key: tuple[int, int, int], columns: Columns) -> Envelope:
        """The stored envelope, to which more ranks are added; a new one if there is none."""
        query = "SELECT ranks, body FROM envelopes WHERE batch = ? AND first_frame = ? AND tbl = ?"
        row = self._database.execute(query, key).fetchone()
        if row is None:
            return Envelope(columns)
        self._bytes["envelopes"] -= len(row[1])
        return Envelope.unpack(row[0], row[1], columns)

    def _distance(self, columns: Columns) -> int:
        """N, if the summaries of every N-th batch are stored."""
        size = columns.part.size * self.row.world_size
        return 1 << (max(1, -(-size // self._limits_now.batch)) - 1).bit_length()

    def _insert(self, statement: str, rows: Sequence[Row]) -> None:
        # Many rows in one statement: after each statement another thread gets the interpreter, and this one waits long for it.
        step = MAX_PARAMETERS // len(rows[0]) if rows else 1
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            values = ", ".join([f"({', '.join('?' * len(some[0]))})"] * len(some))
            self._database.execute(f"{statement} {values}", [value for row in some for value in row])

    # --- staying within the limits --------------------------------------------------------------------------------

    def _trim(self) -> None:
        while self._bytes["summaries"] > self._limits_now.summaries:
            for kind in ("traced = 0", "1"):
                middle = self._one(f"SELECT (MIN(batch) + MAX(batch)) / 2 FROM summaries WHERE {kind}")
                if middle is not None and self._bytes["summaries"] > self._limits_now.summaries:
                    self._delete("summaries", f"{kind} AND batch <= {middle}")
        while self._bytes["envelopes"] > self._limits_now.envelopes:
            batches = [row[0] for row in self._database.execute("SELECT DISTINCT batch FROM envelopes ORDER BY batch")]
            for batch in batches[1 : len(batches) // 2 : 2] or batches:
                self._delete("envelopes", f"batch = {batch}")
        segments = max(1, self._limits_now.digests // (SEGMENT * DIGEST.itemsize))
        self._database.execute("DELETE FROM digests WHERE id <= ?", (self._segment_id - segments,))

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
            raise StoreError(f"the record {self._path}: {error}", self._path) from error


def note_judged(path: Path, text: str) -> None:
    """Notes down in the record of a run that is over why it did not go well. Raises StoreError."""
    with explained(path), closing(sqlite3.connect(path, timeout=WRITER_TIMEOUT)) as database, database:
        database.execute("INSERT OR REPLACE INTO meta VALUES ('judged', ?)", (text,))


def _to_json(shown: Show) -> str:
    """In short calls: one call holds the interpreter until it ends, and for thousands of ranks an abort would wait for it."""
    ranks = shown.standings
    parts = (json.dumps(ranks[start : start + FEW_STANDINGS]) for start in range(0, len(ranks), FEW_STANDINGS))
    return f'{{"run": {json.dumps(shown.standing)}, "ranks": [{", ".join(part[1:-1] for part in parts)}]}}'
