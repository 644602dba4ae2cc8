"""The record of a run as it is read, while the collector writes and afterwards; ``store.py`` says what is in it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rankwatch.errors import ProtocolError
from rankwatch.shared import messages, wire
from rankwatch.shared.frame import BatchSummary, Frame, FrameTable, State

from ..decide import journal
from ..decide.journal import Entry, Fact, Progress
from ..decide.report import Outcome, RankStanding, RankState, RunStanding
from .digest import DIGEST, Array, Columns, Envelope, unpack_digests
from .headroom import Place
from .migrations import migrate
from .store import BUSY_TIMEOUT, FILE, OWN_EVENTS, SCHEMA, StoreError, version

LAST_PARTS = 4
"""Parts of batches that tell how far a rank had come, and what its batches are made of."""

_READ: dict[str, Callable[[Any], Any]] = {
    "state": RankState,
    "outcome": Outcome,
    "ranks": tuple,
    "reported": tuple,
    "positions": lambda positions: tuple(map(tuple, positions)),
}
"""How those fields of the collector's own events are made that JSON has no words for."""


Span: TypeAlias = tuple[int, int]
"""The first and the last batch that are meant."""

ANY: Span = (-1, 1 << 62)


class Rows(NamedTuple):
    """Of a part of a batch: the abs max of each row of its table, and the states (uint8)."""

    batch: int
    table: int
    abs_max: Array
    states: Array


class Point(NamedTuple):
    """A reading in one batch."""

    batch: int
    abs_min: float
    abs_max: float
    state: State


class Standings(NamedTuple):
    """Where a run and its ranks were at a Unix time; 0 and None when that was never written."""

    time: float
    run: RunStanding | None
    ranks: list[RankStanding]


class Record(NamedTuple):
    """A run's record as it was when it was read: its entries but for batches, and how far its ranks had come."""

    entries: list[Entry]
    progress: list[Progress]


def read(path: Path) -> Record:
    """The record in this file. Raises StoreError when there is none that can be read."""
    with reading(path) as database:
        rows = database.execute("SELECT now, rank, kind, body FROM events ORDER BY id")
        entries = [Entry(now, rank, _decode(kind, body)) for now, rank, kind, body in rows]
        return Record(entries, _progress(database, {entry.rank for entry in entries} - {journal.NO_RANK}))


def read_standings(path: Path) -> Standings:
    """Where the run and its ranks were when that was last written. Raises StoreError."""
    with reading(path) as database:
        row = database.execute("SELECT time, body FROM standing").fetchone()
        if row is None:
            return Standings(0.0, None, [])
        time, body = row[0], json.loads(row[1])
        run = RunStanding(*body["run"])
        run = run._replace(outcome=Outcome(run.outcome) if run.outcome else None)
        return Standings(time, run, [RankStanding(rank, RankState(state), *rest) for rank, state, *rest in body["ranks"]])


def read_digests(path: Path) -> Array:
    """All digests of the record in this file, in the order in which the parts came. Raises StoreError."""
    with reading(path) as database:
        segments = [unpack_digests(body) for (body,) in database.execute("SELECT body FROM digests ORDER BY id")]
        return np.concatenate([np.zeros(0, DIGEST), *segments])


def read_segments(path: Path, columns: Sequence[str], *, since: int = 0, batches: Span = ANY) -> Iterator[tuple[int, Array]]:
    """Those columns of the digests, segment after segment with its number: from segment ``since`` on, and of segments that
    hold any of these batches. The last segment still grows. Raises StoreError."""
    query = "SELECT id, body FROM digests WHERE id >= ? AND last_batch >= ? AND first_batch <= ? ORDER BY id"
    with reading(path) as database:
        for number, body in database.execute(query, (since, *batches)):
            yield number, unpack_digests(body, columns)


def read_rows(path: Path, rank: int | None, tables: Mapping[int, Columns], batches: Span = ANY) -> Iterator[Rows]:
    """Of each part of these batches the abs max and the state of every row of its table, in the order of the batches.

    Args:
        rank: as that rank sent them; None: the envelope over the ranks, so the largest and the worst.

    Raises:
        StoreError.
    """
    source, of_rank = ("envelopes", "") if rank is None else ("summaries", f" AND rank = {rank:d}")
    query = f"SELECT batch, tbl, body FROM {source} WHERE batch BETWEEN ? AND ?{of_rank} ORDER BY batch"
    with reading(path) as database:
        for batch, table, body in database.execute(query, batches):
            columns = tables[table]
            size, rows = columns.dtype.itemsize, columns.rows
            highs = np.frombuffer(body, columns.dtype, rows, size * rows)
            states = np.frombuffer(body, np.uint8, rows, 2 * size * rows + (8 * rows if rank is None else 0))
            yield Rows(batch, table, highs, states)


def read_reading(path: Path, rank: int | None, table: int, columns: Columns, row: int, batches: Span = ANY) -> list[Point]:
    """One row of a table over these batches; ``rank`` as for ``read_rows``. Raises StoreError."""
    size, rows = columns.dtype.itemsize, columns.rows
    places = [1 + size * row, 1 + size * (rows + row), 1 + 2 * size * rows + (8 * rows if rank is None else 0) + row]
    source, of_rank = ("envelopes", "") if rank is None else ("summaries", f" AND rank = {rank:d}")
    query = (
        f"SELECT batch, substr(body, {places[0]}, {size}), substr(body, {places[1]}, {size}), substr(body, {places[2]}, 1) "
        f"FROM {source} WHERE tbl = ? AND batch BETWEEN ? AND ?{of_rank} ORDER BY batch"
    )
    with reading(path) as database:
        found = database.execute(query, (table, *batches)).fetchall()
    lows, highs = (np.frombuffer(b"".join(line[index] for line in found), columns.dtype).tolist() for index in (1, 2))
    return [
        Point(batch, low, high, State(state[0])) for (batch, _, _, state), low, high in zip(found, lows, highs, strict=True)
    ]


def folders(runs: Path) -> list[Path]:
    """The folders of the runs that have a record, by name; neither links to them nor one that is still being made."""
    return [
        path.parent
        for path in sorted(runs.glob(f"*/{FILE}"))
        if not path.parent.is_symlink() and not path.parent.name.startswith(".")
    ]


def is_unfinished(path: Path, collector: str) -> bool:
    """Whether this is the record of a run that this collector's ranks may still come back to. Raises StoreError."""
    with reading(path) as database:
        owner = database.execute("SELECT value FROM meta WHERE name = 'collector'").fetchone()
        last = database.execute("SELECT kind FROM events WHERE kind IN ('hello', 'closed') ORDER BY id DESC").fetchone()
        return bool(owner == (collector,) and last == ("hello",))


def kept_batches(path: Path, rank: int | None) -> list[int]:
    """The batches of a rank that are kept as it sent them, in order; None: those of which the envelope is. Raises StoreError."""
    source = "envelopes" if rank is None else f"summaries WHERE rank = {rank:d}"
    with reading(path) as database:
        return [batch for (batch,) in database.execute(f"SELECT DISTINCT batch FROM {source} ORDER BY batch")]


def read_batch(path: Path, rank: int, batch: int) -> list[Frame]:
    """The frames of a batch in execution order; empty when it is not kept. Raises StoreError."""
    query = (
        "SELECT first_frame, tables.body, summaries.body FROM summaries JOIN tables ON tables.number = summaries.tbl "
        "WHERE rank = ? AND batch = ? ORDER BY first_frame"
    )
    with reading(path) as database:
        frames: list[Frame] = []
        for first_frame, table, body in database.execute(query, (rank, batch)):
            frames += frames_of(batch, first_frame, table_of(table), body)
        return frames


def read_meta(path: Path) -> dict[str, str]:
    """What the record says of itself. Raises StoreError."""
    with reading(path) as database:
        return dict(database.execute("SELECT name, value FROM meta"))


def began_at(path: Path) -> float:
    """Unix time of the first entry. Raises StoreError."""
    with reading(path) as database:
        row = database.execute("SELECT time FROM events ORDER BY id LIMIT 1").fetchone()
        return float(row[0]) if row else 0.0


def last_batch(path: Path) -> int:
    """The last batch of any rank, -1 before the first. Raises StoreError."""
    with reading(path) as database:
        (last,) = database.execute("SELECT MAX(last_batch) FROM digests").fetchone()
        return -1 if last is None else int(last)


def read_events(path: Path, *kinds: str) -> Iterator[tuple[float, Entry]]:
    """The entries that are no batches, or those of these kinds, each with the Unix time of its writing. Raises StoreError."""
    where = f"WHERE kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
    query = f"SELECT time, now, rank, kind, body FROM events {where} ORDER BY id"
    with reading(path) as database:
        for time, now, rank, kind, body in database.execute(query, kinds):
            yield time, Entry(now, rank, _decode(kind, body))


def events_after(path: Path, last: int) -> list[tuple[int, float, Entry]]:
    """The entries that are no batches behind that of number ``last``, each with its number and Unix time. Raises StoreError."""
    with reading(path) as database:
        query = "SELECT id, time, now, rank, kind, body FROM events WHERE id > ? ORDER BY id"
        rows = database.execute(query, (last,))
        return [(number, time, Entry(now, rank, _decode(kind, body))) for number, time, now, rank, kind, body in rows]


def newest_digests(path: Path, segments: int) -> Array:
    """The digests of so many last segments, in the order in which the parts came. Raises StoreError."""
    with reading(path) as database:
        rows = database.execute("SELECT body FROM digests ORDER BY id DESC LIMIT ?", (segments,)).fetchall()
        return np.concatenate([np.zeros(0, DIGEST), *(unpack_digests(body) for (body,) in reversed(rows))])


def read_table(path: Path, number: int) -> FrameTable:
    """Raises StoreError."""
    with reading(path) as database:
        return table_of(database.execute("SELECT body FROM tables WHERE number = ?", (number,)).fetchone()[0])


def newest_places(path: Path, most: int) -> list[Place]:
    """Where there are envelopes, the newest first. Raises StoreError."""
    query = "SELECT batch, first_frame, tbl, ranks FROM envelopes ORDER BY batch DESC, first_frame DESC, tbl DESC LIMIT ?"
    with reading(path) as database:
        return [Place(*row) for row in database.execute(query, (most,))]


def read_envelope(path: Path, place: Place, columns: Columns) -> Envelope | None:
    """None: it has been let go meanwhile. Raises StoreError."""
    query = "SELECT ranks, body FROM envelopes WHERE batch = ? AND first_frame = ? AND tbl = ?"
    with reading(path) as database:
        row = database.execute(query, place[:3]).fetchone()
        return Envelope.unpack(row[0], row[1], columns) if row else None


def read_tables(path: Path) -> dict[int, FrameTable]:
    """The frame tables by number. Raises StoreError."""
    with reading(path) as database:
        return {number: table_of(body) for number, body in database.execute("SELECT number, body FROM tables")}


def read_envelopes(path: Path, tables: Mapping[int, FrameTable]) -> Iterator[tuple[int, int, int, Envelope]]:
    """Batch, first frame, table and envelope, in the order of the batches. Raises StoreError."""
    columns = {number: Columns(number, table) for number, table in tables.items()}
    query = "SELECT batch, first_frame, tbl, ranks, body FROM envelopes ORDER BY batch, first_frame, tbl"
    with reading(path) as database:
        for batch, first_frame, table, ranks, body in database.execute(query):
            yield batch, first_frame, table, Envelope.unpack(ranks, body, columns[table])


def read_frames(path: Path) -> Iterator[tuple[int, Frame]]:
    """Every frame of the batches that are kept as the ranks sent them, and its rank. Raises StoreError."""
    tables = read_tables(path)
    query = "SELECT batch, rank, first_frame, tbl, body FROM summaries ORDER BY batch, rank, first_frame"
    with reading(path) as database:
        for batch, rank, first_frame, table, body in database.execute(query):
            for frame in frames_of(batch, first_frame, tables[table], body):
                yield rank, frame


def table_of(body: bytes) -> FrameTable:
    message = wire.decode(body)
    if not isinstance(message, messages.Table):
        raise ValueError(f"a frame table is a {type(message).__name__}")
    return message.table


def frames_of(batch: int, first_frame: int, table: FrameTable, body: bytes) -> Iterator[Frame]:
    """Those of a part that is kept as its rank sent it. Raises ValueError when it does not fit its table."""
    size = table.column_bytes
    lows, highs, states = body[:size], body[size : 2 * size], body[2 * size :]
    return BatchSummary(batch, first_frame, 0, 0.0, 0.0, False, table.id, lows, highs, states).frames(table)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The record in this file, to be asked. Raises StoreError, also for what goes wrong while it is."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=BUSY_TIMEOUT, uri=True)) as database:
            known = version(database)
            if known == 0:
                raise ValueError("nothing was written to it yet")
            if known == SCHEMA:
                yield database
                return
            with closing(sqlite3.connect(":memory:")) as copy:  # the file is not ours to change
                database.backup(copy)
                migrate(copy, known)
                copy.commit()
                yield copy
    except (sqlite3.Error, OSError, ValueError, LookupError, TypeError, ProtocolError) as error:
        raise StoreError(f"the record {path}: {error}") from error


def _progress(database: sqlite3.Connection, ranks: set[int]) -> list[Progress]:
    """The last LAST_PARTS parts of each rank, oldest first."""
    found: dict[int, list[Progress]] = {rank: [] for rank in ranks}
    missing = ranks
    for (body,) in database.execute("SELECT body FROM digests ORDER BY id DESC"):
        digests = unpack_digests(body)
        for digest in digests[np.isin(digests["rank"], list(missing))][::-1][list(Progress._fields)].tolist():
            if len(of_rank := found[digest[0]]) < LAST_PARTS:
                of_rank.append(Progress(*digest))
        missing = {rank for rank in missing if len(found[rank]) < LAST_PARTS}
        if not missing:
            break
    return [part for parts in found.values() for part in reversed(parts)]


def _decode(kind: str, body: str | bytes) -> Fact:
    """Raises ValueError, KeyError, TypeError or ProtocolError when it is no fact of this kind."""
    if isinstance(body, bytes):
        return wire.decode(body)
    fields = json.loads(body)
    for name, read in _READ.items():
        if name in fields:
            fields[name] = read(fields[name])
    return OWN_EVENTS[kind](**fields)
