"""How records that an earlier rankwatch has written become ones of today's schema, one step after another."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

import numpy as np

from .digest import DIGEST, Array, pack_digests

STANDING = "CREATE TABLE standing (id INTEGER PRIMARY KEY CHECK (id = 1), time REAL NOT NULL, body TEXT NOT NULL)"


def migrate(database: sqlite3.Connection, version: int) -> None:
    """Brings a record of schema ``version`` up to date, in the transaction under way."""
    for number, step in enumerate(_STEPS[version - 1 :], version + 1):
        step(database)
        database.execute(f"PRAGMA user_version = {number}")


def _to_2(database: sqlite3.Connection) -> None:
    """Digests take a third of the room; where the ranks are has a table; an event has its name of today."""
    database.execute(STANDING)
    database.execute("UPDATE events SET kind = 'jobended' WHERE kind = 'commandended'")
    for (segment,) in database.execute("SELECT id FROM digests").fetchall():
        (body,) = database.execute("SELECT body FROM digests WHERE id = ?", (segment,)).fetchone()
        database.execute("UPDATE digests SET body = ? WHERE id = ?", (pack_digests(_unpack_1(body)), segment))


def _unpack_1(body: bytes) -> Array:
    """Column after column, each as it is in memory."""
    digests = np.zeros(len(body) // DIGEST.itemsize, DIGEST)
    start = 0
    for name in DIGEST.names or ():
        digests[name] = np.frombuffer(body, DIGEST[name], len(digests), start)
        start += digests[name].nbytes
    return digests


def _to_3(database: sqlite3.Connection) -> None:
    """A rank's stage and what it has told of are on record: nothing of that was known before, and nothing is to be changed."""


_STEPS: list[Callable[[sqlite3.Connection], None]] = [_to_2, _to_3]
