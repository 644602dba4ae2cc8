"""The record of a run as it is read, while the collector writes and afterwards; ``store.py`` says what is in it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rankwatch import wire
from rankwatch.errors import ProtocolError
from rankwatch.frame import BatchSummary, Frame

from . import journal
from .digest import DIGEST, Array, unpack_digests
from .journal import Entry, Fact, Progress
from .report.data import Outcome, RankState
from .store import BUSY_TIMEOUT, OWN_EVENTS, StoreError, version

LAST_PARTS = 4
"""Parts of batches that tell how far a rank had come, and what its batches are made of."""

_READ: dict[str, Callable[[Any], Any]] = {
    "state": RankState,
    "outcome": Outcome,
    "ranks": tuple,
    "places": lambda places: tuple(map(tuple, places)),
}
"""How those fields of the collector's own events are made that JSON has no words for."""


class Record(NamedTuple):
    """A run's record as it was when it was read: its entries but for batches, and how far its ranks had come."""

    entries: list[Entry]
    progress: list[Progress]


def read(path: Path) -> Record:
    """The record in this file. Raises StoreError when there is none that can be read."""
    with _reading(path) as database:
        rows = database.execute("SELECT now, rank, kind, body FROM events ORDER BY id")
        entries = [Entry(now, rank, _decode(kind, body)) for now, rank, kind, body in rows]
        return Record(entries, _progress(database, {entry.rank for entry in entries} - {journal.NO_RANK}))


def read_digests(path: Path) -> Array:
    """All digests of the record in this file, in the order in which the parts came. Raises StoreError."""
    with _reading(path) as database:
        segments = [unpack_digests(body) for (body,) in database.execute("SELECT body FROM digests ORDER BY id")]
        return np.concatenate([np.zeros(0, DIGEST), *segments])


def is_unfinished(path: Path, collector: str) -> bool:
    """Whether this is the record of a run that this collector's ranks may still come back to. Raises StoreError."""
    with _reading(path) as database:
        owner = database.execute("SELECT value FROM meta WHERE name = 'collector'").fetchone()
        last = database.execute("SELECT kind FROM events WHERE kind IN ('hello', 'closed') ORDER BY id DESC").fetchone()
        return bool(owner == (collector,) and last == ("hello",))


class Kept(NamedTuple):
    """The batches of one rank that are kept as it sent them, in order."""

    rank: int
    batches: list[int]


def kept_batches(path: Path, rank: int) -> Kept:
    """Raises StoreError."""
    with _reading(path) as database:
        rows = database.execute("SELECT DISTINCT batch FROM summaries WHERE rank = ? ORDER BY batch", (rank,))
        return Kept(rank, [batch for (batch,) in rows])


def read_batch(path: Path, rank: int, batch: int) -> list[Frame]:
    """The frames of a batch in execution order; empty when it is not kept. Raises StoreError."""
    query = (
        "SELECT first_frame, tables.body, summaries.body FROM summaries JOIN tables ON tables.number = summaries.tbl "
        "WHERE rank = ? AND batch = ? ORDER BY first_frame"
    )
    with _reading(path) as database:
        frames: list[Frame] = []
        for first_frame, table, body in database.execute(query, (rank, batch)):
            frames += _frames(batch, first_frame, wire.decode(table), body)
        return frames


def _frames(batch: int, first_frame: int, message: wire.Message, body: bytes) -> Iterator[Frame]:
    if not isinstance(message, wire.Table):
        raise ValueError(f"a frame table is a {type(message).__name__}")
    table, size = message.table, message.table.column_bytes
    lows, highs, states = body[:size], body[size : 2 * size], body[2 * size :]
    return BatchSummary(batch, first_frame, 0, 0.0, 0.0, False, table.id, lows, highs, states).frames(table)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=BUSY_TIMEOUT, uri=True)) as database:
            if version(database) == 0:
                raise ValueError("nothing was written to it yet")
            yield database
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
