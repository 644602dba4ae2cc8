"""Why the disk did not take something, in words that follow ``because`` or a colon."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from .schema import RecordGone

FULL = "the disk was full"
SILENT = "the disk did not answer"
OURS = "an error of rankwatch"
GONE = "the file was removed or replaced"
DAMAGED = "the file is damaged"

LOSES_ALL = {GONE, DAMAGED}
"""Then what was stored is not on record either."""

LOCKED = "another process held the file"

_OF_ERRNO = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: "the disk quota was used up",
    errno.EIO: "I/O error",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "the folder may not be written",
    errno.EPERM: "the folder may not be written",
    errno.ENOENT: "the folder is gone",
    errno.ESTALE: "the file system is gone",
    errno.EMFILE: "no file descriptors were left",
    errno.ENFILE: "no file descriptors were left",
    errno.ENOMEM: "there was no memory",
}

_OF_SQLITE = {
    "is full": FULL,
    "disk I/O error": "I/O error",
    "unable to open": "the file could not be opened",
    "readonly": "the file is read-only",
    "locked": LOCKED,
    "malformed": DAMAGED,
    "not a database": DAMAGED,
}
"""By a part of SQLite's message: its error codes are known only from Python 3.11 on."""


def describe_failure(error: BaseException | None, path: Path) -> str:
    """``error``, of a write to ``path``, or what it was raised from."""
    while error is not None:
        if isinstance(error, RecordGone):
            return GONE
        if isinstance(error, OSError) and error.errno is not None:
            return _OF_ERRNO.get(error.errno, error.strerror or "I/O error")
        if isinstance(error, sqlite3.Error):
            # SQLite calls it an I/O error too when there is no room for its index of the write-ahead log.
            text = next((words for part, words in _OF_SQLITE.items() if part in str(error)), str(error))
            return FULL if isinstance(error, sqlite3.OperationalError) and is_full(path) else text
        error = error.__cause__
    return OURS


def is_full(path: Path) -> bool:
    """Whether the file system of ``path``, or of the nearest folder above it that exists, has no room."""
    for folder in (path, *path.absolute().parents):
        try:
            return os.statvfs(folder).f_bavail == 0
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            break
    return False
