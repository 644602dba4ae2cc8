"""The record's file, ``run.db``: its name, its tables, its version, and how it is opened to be read.

Imports neither NumPy nor the data types, so that ``rankwatch list`` starts fast.
"""

from __future__ import annotations

import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankwatch.errors import ProtocolError
from rankwatch.shared.printable import printable

from .checked import SoundConnection, columns_of

FILE = "run.db"

SCHEMA = 2
"""The PRAGMA user_version of a record; a file with another one is refused."""

BUSY_TIMEOUT = 30.0
"""Seconds that a reader waits for the writer of the file, on a network file system."""

WRITER_TIMEOUT = 2.0
"""Seconds that a write waits for another process that has locked the file: one thread writes all records, and tries again."""

CREATE = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1), began REAL NOT NULL, job TEXT NOT NULL, restart INTEGER NOT NULL,
    world_size INTEGER NOT NULL, batches INTEGER NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    gaps TEXT NOT NULL, stalled TEXT NOT NULL, is_over INTEGER NOT NULL, is_final INTEGER NOT NULL
);
CREATE TABLE standing (id INTEGER PRIMARY KEY CHECK (id = 1), time REAL NOT NULL, body TEXT NOT NULL);
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
"""
"""The tables:

    meta       who wrote the record: name and value
    run        one row: what a list of runs shows (runs.py)
    standing   one row: where the run and its ranks are while it is running, as JSON
    events     every fact except batches (decide/core/journal.py), in the order of arrival; a replay of them gives the verdict
    tables     the frame tables, numbered from 1
    digests    segments of digests, in the order in which the parts came
    envelopes  one for each part of a batch and frame table
    summaries  parts of batches as the ranks sent them

``facts.py`` has the bodies of the events, ``numbers/layout.py`` the bytes of all other bodies.
"""


BESIDE = "skipped", "judged"
"""Fields of a run in a list that are in the table ``meta``: a record of an earlier release has no columns for them."""


class RecordConnection(SoundConnection):
    """Takes what it reads only in the types of these tables."""

    columns = columns_of(CREATE)


class StoreError(Exception):
    """A record cannot be read or written; the text says which and why. ``path``: its file, if there is one."""

    def __init__(self, text: str, path: Path | None = None) -> None:
        super().__init__(printable(text))
        self.path = path


class RecordGone(StoreError):
    """The file in which a run was recorded is no longer there: another is, or none."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"the record {path} was removed or replaced while it was written", path)


def beside(database: sqlite3.Connection) -> list[str]:
    """What the run has of BESIDE."""
    found = dict(database.execute("SELECT name, value FROM meta WHERE name IN (?, ?)", BESIDE))
    return [found.get(name, "") for name in BESIDE]


def is_new(database: sqlite3.Connection) -> bool:
    """Whether the file is empty. Raises ValueError when another version of rankwatch wrote it."""
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, SCHEMA):
        raise ValueError(f"written by another rankwatch (schema {version}; known here: {SCHEMA}): use that one")
    return version == 0


def open_to_read(path: Path, *, by_writer: bool = False) -> sqlite3.Connection:
    """The record in this file, in one read transaction: every query sees the same state. Raises StoreError.

    ``by_writer``: the thread that writes it asks. Once it has closed the record, no file is left beside it.
    """
    with explained(path):
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")  # to open a pipe would wait for a writer
        if by_writer and path.is_file() and not path.with_name(path.name + "-wal").exists():
            return _open(path, "mode=ro&immutable=1")
        try:
            return _open(path, "mode=ro")
        except sqlite3.OperationalError as error:
            # To read it, SQLite would have to write: beside it, in another's folder or on a full disk, or to mend it.
            if not str(error).startswith(("attempt to write", "unable to open", "disk I/O error")) or not path.is_file():
                raise
        left = [
            aside for aside in (path.with_name(path.name + "-journal"), path.with_name(path.name + "-wal")) if _size(aside)
        ]
        return _open_copy([path, *left]) if left else _open(path, "mode=ro&immutable=1")


def _open(path: Path, how: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{how}"
    database = sqlite3.connect(uri, timeout=BUSY_TIMEOUT, isolation_level=None, uri=True, factory=RecordConnection)
    try:
        database.execute("BEGIN")
        if is_new(database):
            raise ValueError("nothing was written to it yet")
        if database.execute("SELECT COUNT(*) FROM sqlite_master WHERE type = 'view'").fetchone() != (0,):
            raise ValueError("it has views, which may be endless, and no rankwatch makes any")
    except BaseException:
        database.close()
        raise
    return database


def _open_copy(files: list[Path]) -> sqlite3.Connection:
    """A record whose collector was killed in the middle of a commit, as it was before or after it. The files themselves are
    mended by the next collector alone: who reads cannot always see that a writer lives, on another host."""
    with tempfile.TemporaryDirectory(prefix="rankwatch-") as folder:
        for file in files:
            shutil.copyfile(file, Path(folder) / file.name)
        return _open(Path(folder) / files[0].name, "mode=rw")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


_DAMAGE = (
    *(sqlite3.Error, OSError, ProtocolError, ValueError, LookupError, TypeError, AttributeError, OverflowError),
    *(struct.error, RecursionError, MemoryError, AssertionError),
)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns whatever a damaged record causes into a StoreError that names the record."""
    try:
        yield
    except StoreError:
        raise
    except _DAMAGE as error:
        raise StoreError(f"the record {path}: {error}", path) from error
