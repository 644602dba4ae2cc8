"""The list of runs, without a replay: the store keeps one row for each run up to date, in every transaction."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from rankwatch.shared.printable import cleaned, paragraph

from .schema import FILE, StoreError, beside, explained, open_to_read
from .writer_lock import is_alive

log = logging.getLogger(__name__)

QUERY = "SELECT began, job, restart, world_size, batches, outcome, reason, gaps, stalled, is_over, is_final FROM run"

COLUMNS = QUERY.count(",") + 1


class RunRow(NamedTuple):
    """A run in a list; ``run`` is its folder's name, and ``began`` a Unix time.

    ``ended`` is when it was last heard of. ``outcome`` and ``reason`` are empty until they are decided. ``is_final``: an abort
    was decided, or a rank tripped, so a lost rank that comes back does not reopen the run. ``gaps`` says which batches are not
    on record. ``stalled``: the stall that there is, or was at the end. ``is_alive``: a collector writes the record, or the run
    is over. ``skipped``: which steps were left out. ``judged``: what speaks against it, though it goes on or has
    finished.
    """

    run: str
    began: float = 0.0
    job: str = ""
    restart: int = 0
    world_size: int = 0
    batches: int = 0
    outcome: str = ""
    reason: str = ""
    gaps: str = ""
    stalled: str = ""
    is_over: bool = False
    is_final: bool = False
    is_alive: bool = True
    ended: float = 0.0
    skipped: str = ""
    judged: str = ""


def read_row(folder: Path) -> RunRow:
    """The run in this folder. Raises StoreError when it has no record that can be read."""
    path = folder / FILE
    with closing(open_to_read(path)) as database, explained(path):
        row = database.execute(QUERY).fetchone()
        if row is None:
            raise ValueError("it does not begin with a run's beginning")
        is_over, is_final = map(bool, row[-2:])
        boot = database.execute("SELECT value FROM meta WHERE name = 'boot'").fetchone()
        heard = database.execute("SELECT time FROM standing").fetchone() or row
        alive = is_over or boot is None or is_alive(folder, boot[0], heard[0], time.time())
        last = database.execute("SELECT time FROM events ORDER BY id DESC LIMIT 1").fetchone()
        ended = last[0] if is_over and last else heard[0]
        run = RunRow._make((folder.resolve().name, *row[:-2], is_over, is_final, alive, ended, *beside(database)))
        return cleaned(run)._replace(reason=paragraph(run.reason))


def read_rows(runs: Path) -> list[RunRow]:
    """All runs in a folder, the oldest first; a record that cannot be read is named in the log."""
    found = []
    for folder in folders(runs):
        try:
            found.append(read_row(folder))
        except StoreError as error:
            log.warning("%s", error)
    return sorted(found, key=lambda row: row.began)


def folders(runs: Path) -> list[Path]:
    """The folders of the runs that have a record, by name, without links and without folders that are still being made."""
    return [
        path.parent
        for path in sorted(runs.glob(f"*/{FILE}"))
        if not path.parent.is_symlink() and not path.parent.name.startswith(".")
    ]


def is_over(path: Path, collector: str) -> bool:
    """Whether the run in this file is this collector's, and over. Raises StoreError."""
    with closing(open_to_read(path)) as database, explained(path):
        owner = database.execute("SELECT value FROM meta WHERE name = 'collector'").fetchone()
        return bool(owner == (collector,) and database.execute("SELECT is_over FROM run").fetchone() == (1,))


def is_unfinished(path: Path, collector: str) -> bool:
    """Whether the run in this file is this collector's, and its ranks may still come back. Raises StoreError."""
    with closing(open_to_read(path)) as database, explained(path):
        owner = database.execute("SELECT value FROM meta WHERE name = 'collector'").fetchone()
        last = database.execute("SELECT kind FROM events WHERE kind IN ('hello', 'closed') ORDER BY id DESC").fetchone()
        return bool(owner == (collector,) and last == ("hello",))
