"""What is kept of the batches of a run, part by part, however much it is: for whoever goes through all of it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rankwatch.shared import messages
from rankwatch.shared.frame import Frame, FrameTable

from .digest import DIGEST, Array, Columns, Envelope, unpack_digests
from .reader import frames_of, read_batch, read_events, reading, table_of

AT_ONCE = 4096
"""Parts whose digests are looked up together."""

KEPT_TABLES, KEPT_SEGMENTS = 64, 64
"""Frame tables and segments of digests that a reader of many parts holds in memory."""


class Sent(NamedTuple):
    """A part of a batch as its rank sent it; ``number`` is that of its table in the record.

    ``step`` and ``ended`` are told by its digest: None where that is not kept any more.
    """

    batch: int
    rank: int
    first_frame: int
    number: int
    table: FrameTable
    step: int | None
    ended: float | None
    body: bytes

    def columns(self) -> tuple[Array, Array, Array]:
        """Abs min and abs max, of the table's dtype, and states."""
        rows = self.table.rows
        numbers = np.frombuffer(self.body, f"<{self.table.typecode}", 2 * rows)
        return numbers[:rows], numbers[rows:], np.frombuffer(self.body, np.uint8, rows, numbers.nbytes)

    def frames(self) -> Iterator[Frame]:
        return frames_of(self.batch, self.first_frame, self.table, self.body)


class Spanned(NamedTuple):
    """An envelope, and of what. ``ended`` is when the last of its ranks had run it, None where no digest tells any more."""

    batch: int
    first_frame: int
    number: int
    table: FrameTable
    ended: float | None
    envelope: Envelope


class Told(NamedTuple):
    """Digests, and the tables they name by their number (0 names none)."""

    digests: Array
    tables: dict[int, FrameTable]


def read_spanned(path: Path, batch: int | None = None) -> Iterator[Spanned]:
    """The envelopes in the order of the batches, or those of one. Raises StoreError."""
    where, values = ("", ()) if batch is None else ("WHERE batch = ?", (batch,))
    query = f"SELECT batch, first_frame, tbl, ranks, body FROM envelopes {where} ORDER BY batch, first_frame, tbl"
    with reading(path) as database:
        database.execute("BEGIN")  # all of it as it is now, whatever is written meanwhile
        tables, digests = _Tables(database), _Digests(database, ("batch", "first_frame", "ended"))
        for at, first_frame, number, ranks, body in database.execute(query, values):
            told = digests.between(at, at)
            ended = told["ended"][told["first_frame"] == first_frame]
            envelope = Envelope.unpack(ranks, body, tables.columns(number))
            yield Spanned(at, first_frame, number, tables.of(number), float(ended.max()) if len(ended) else None, envelope)


def read_sent(path: Path, rank: int | None = None) -> Iterator[Sent]:
    """The parts that are kept as the ranks sent them, of all or of one, in the order of the batches. Raises StoreError."""
    where, values = ("", ()) if rank is None else ("WHERE rank = ?", (rank,))
    of, order = f"FROM summaries {where}", "ORDER BY batch, rank, first_frame"
    with reading(path) as database:
        database.execute("BEGIN")  # all of it as it is now, whatever is written meanwhile
        tables, digests = _Tables(database), _Digests(database, ("batch", "rank", "first_frame", "step", "ended"))
        bodies = database.execute(f"SELECT tbl, body {of} {order}", values)
        places = database.execute(f"SELECT batch, rank, first_frame {of} {order}", values)
        while some := places.fetchmany(AT_ONCE):
            told = {digest[:3]: digest[3:] for digest in digests.between(some[0][0], some[-1][0]).tolist()}
            for place, (number, body) in zip(some, bodies, strict=False):
                (batch, by, first_frame), (step, ended) = place, told.get(place, (None, None))
                table = tables.of(number)
                if len(body) != 2 * table.column_bytes + table.rows:
                    raise ValueError(f"a part of {len(body)} bytes against {table.rows} rows")
                yield Sent(batch, by, first_frame, number, table, step, ended, body)


def read_tripped(path: Path, rank: int | None = None) -> list[Sent]:
    """What ranks that tripped told with their trips of the batches they did it in, and not otherwise: the last frames.

    In the order of the batches; their tables, which are not of the record, are numbered from -1 downwards. Raises StoreError.
    """
    found: list[Sent] = []
    for _, (_, by, fact) in read_events(path, "tripped"):
        if not isinstance(fact, messages.Tripped) or rank not in (None, by) or fact.trip.position.eval:
            continue
        batch = fact.trip.position.batch
        known = {frame.position for frame in read_batch(path, by, batch)}
        frames = [f for f in fact.trip.frames if f.position[:2] == fact.trip.position[:2] and f.position not in known]
        if frames and batch >= 0:
            table = FrameTable(tuple(frame.spec for frame in frames))
            first, step, time = frames[0].position.frame, fact.trip.optimizer_step, fact.trip.time
            found.append(Sent(batch, by, first, -1 - len(found), table, step, time, _body(frames, table.typecode)))
    return sorted(found, key=lambda part: part[:3])


def read_told(path: Path) -> Iterator[Told]:
    """The digests, segment by segment, in the order in which the parts came. Raises StoreError."""
    with reading(path) as database:
        tables = _Tables(database)
        for (body,) in database.execute("SELECT body FROM digests ORDER BY id"):
            yield tables.beside(unpack_digests(body))


def last_told(path: Path, rank: int, batches: int) -> Told:
    """The digests of so many last batches of a rank. Raises StoreError."""
    found: list[Array] = [np.zeros(0, DIGEST)]
    with reading(path) as database:
        for (body,) in database.execute("SELECT body FROM digests ORDER BY id DESC"):
            digests = unpack_digests(body)
            found.insert(0, digests[digests["rank"] == rank])
            # One batch more, so that no part is missing of the first that is asked for.
            if len({batch for some in found for batch in some["batch"].tolist()}) > batches:
                break
        digests = np.concatenate(found)
        last = np.unique(digests["batch"])[-batches:]
        return _Tables(database).beside(digests[np.isin(digests["batch"], last)])


def told_of(path: Path, rank: int, batch: int) -> Told:
    """The digests of the parts of a batch of a rank. Raises StoreError."""
    with reading(path) as database:
        digests = _Digests(database, DIGEST.names or ()).between(batch, batch)
        return _Tables(database).beside(digests[digests["rank"] == rank])


def _body(frames: Sequence[Frame], typecode: str) -> bytes:
    values = [value for column in ("abs_min", "abs_max") for frame in frames for value in getattr(frame, column)]
    with np.errstate(over="ignore"):
        return np.array(values).astype(f"<{typecode}").tobytes() + b"".join(frame.states for frame in frames)


class _Tables:
    """The frame tables of a record by number, each read when it is asked for; those used last are kept."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self.of = lru_cache(KEPT_TABLES)(self._of)
        self.columns = lru_cache(KEPT_TABLES)(self._columns)

    def beside(self, digests: Array) -> Told:
        return Told(digests, {number: self.of(number) for number in np.unique(digests["table"]).tolist() if number})

    def _of(self, number: int) -> FrameTable:
        row = self._database.execute("SELECT body FROM tables WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise LookupError(f"no frame table {number}")
        return table_of(row[0])

    def _columns(self, number: int) -> Columns:
        return Columns(number, self.of(number))


class _Digests:
    """Columns of the digests of a record, by batches; segments used last are kept unpacked."""

    def __init__(self, database: sqlite3.Connection, names: Sequence[str]) -> None:
        self._database = database
        self._names = names
        spans = database.execute("SELECT id, first_batch, last_batch FROM digests ORDER BY id").fetchall()
        self._ids, self._firsts, self._lasts = np.array(spans, np.int64).reshape(-1, 3).T
        self._segment = lru_cache(KEPT_SEGMENTS)(self._unpack)

    def between(self, first: int, last: int) -> Array:
        """Those of the batches from ``first`` to ``last``, in the order in which they came."""
        ids = self._ids[(self._firsts <= last) & (self._lasts >= first)]
        found = [np.zeros(0, [(name, DIGEST[name]) for name in self._names]), *map(self._segment, ids.tolist())]
        return np.concatenate([digests[(digests["batch"] >= first) & (digests["batch"] <= last)] for digests in found])

    def _unpack(self, segment: int) -> Array:
        (body,) = self._database.execute("SELECT body FROM digests WHERE id = ?", (segment,)).fetchone()
        return unpack_digests(body, self._names)
