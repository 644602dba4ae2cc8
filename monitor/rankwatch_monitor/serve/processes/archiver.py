"""``--archive URL``: each run that is over is added to an archive, by ``rankwatch archive`` in a process of its own.

What a slow or broken file system does to that process, it does not do to the collector, which imports nothing for it.
"""

from __future__ import annotations

import logging
import shlex
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rankwatch.shared.printable import printable

from ...record.runs import folders, is_over
from ...record.schema import FILE, StoreError
from ...views.export.urls import shown
from .programs import NOTHING, PATIENCE, Programs

log = logging.getLogger(__name__)

LIMIT = 300.0
"""Seconds that one try may take. Then its process is ended."""

PAUSES = 5.0, 30.0, 120.0, 600.0
"""Seconds between the tries. After the last one the run is left out, and the log says so."""

CLOSING = 30.0
"""Seconds at the end for what is still to be archived: a job that was stopped must end."""

NICENESS = 10

VARIABLE = "RANKWATCH_ARCHIVE"
"""By which ``rankwatch archive`` is told the URL."""

TOLD = 300
"""Characters of what a failed try has printed last, for the log."""

MARK = "archived"
"""The file in a run's folder that names the archive that it is in."""


class Archiver:
    """Archives one run after the other, in a thread of its own.

    Args:
        url: the archive; empty: nothing is archived.
        command: what adds the run in a folder to the archive that RANKWATCH_ARCHIVE names (None: ``rankwatch archive``).
    """

    def __init__(self, url: str, runs: Path, command: Callable[[Path], list[str]] | None = None) -> None:
        self._url = url
        self._runs = runs
        self._command = command or command_of
        self._changed = threading.Condition()
        self._due: dict[str, tuple[float, int]] = {}
        """By run: when it is to be tried, and how often it was."""
        self._busy = ""
        """The run that is being tried; it is not among the others."""
        self._left_by = ""
        self._closing_at: float | None = None
        self._has_given_up = False
        self._programs = Programs()
        self._thread = threading.Thread(target=self._run, name="rankwatch-archiver", daemon=True)
        if url:
            self._thread.start()

    def add(self, run: str) -> None:
        """The run is over, and its record complete: for the first time, or again."""
        with self._changed:
            if self._url:
                self._due[run] = time.monotonic(), 0
            self._changed.notify()

    def take_over(self, collector: str) -> None:
        """Adds the runs of the collector of this name that are over and not archived: it ended before it could."""
        with self._changed:
            self._left_by = collector
            self._changed.notify()

    def close(self) -> None:
        """Tries once more what is left, for CLOSING seconds, and says what is not archived."""
        if not self._url:
            return
        with self._changed:
            self._closing_at = time.monotonic()
            self._changed.notify()
        self._thread.join(PATIENCE)
        if self._thread.is_alive() and not self._has_given_up:
            log.info("waiting for the archive, for at most %g s; Ctrl-C ends it", CLOSING)
        self._thread.join(CLOSING - PATIENCE)
        with self._changed:
            left, self._has_given_up = [*filter(None, [self._busy]), *self._due], True
        self._programs.stop()
        for run in left:
            log.error("run %s is not archived: there was no more time; later: %s", run, self._by_hand(run))

    def stop(self) -> None:
        """Gives up: ``close`` says what is not archived. For a signal's handler, too."""
        with self._changed:
            self._closing_at, self._has_given_up = time.monotonic(), True
            self._programs.stop()
            self._changed.notify()

    # --- the archiver's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (due := self._next()) is not None:
            run, tried = due
            why = self._try(run)
            with self._changed:
                if self._has_given_up:
                    return
                self._busy = ""
                is_again = run in self._due  # it was added meanwhile
                is_last = tried >= len(PAUSES) or self._closing_at is not None
                if why and not is_last and not is_again:
                    self._due[run] = time.monotonic() + PAUSES[tried], tried + 1
            if not why:
                self._mark(run)
                log.log(logging.INFO if tried else logging.DEBUG, "run %s is archived in %s", run, shown(self._url))
            elif is_last and not is_again:
                times = f"tried {tried + 1} times" if tried else "tried once"
                log.error("run %s is not archived (%s): %s; later: %s", run, times, why, self._by_hand(run))
            elif not is_again:
                log.warning("run %s is not archived, which is tried again in %g s: %s", run, PAUSES[tried], why)

    def _next(self) -> tuple[str, int] | None:
        """Waits for a run that is to be tried, and returns how often it was; None: all is done, and nothing more comes."""
        while True:
            with self._changed:
                collector, self._left_by = self._left_by, ""
                if not collector:
                    if self._closing_at is not None and (self._has_given_up or not self._due):
                        return None
                    run = min(self._due, key=self._due.__getitem__, default="")
                    at, tried = self._due.get(run, (float("inf"), 0))
                    wait = at - time.monotonic()
                    if run and (wait <= 0 or self._closing_at is not None):
                        del self._due[run]
                        self._busy = run
                        return run, tried
                    self._changed.wait(wait if run else None)
                    continue
            left = self._left(collector)
            with self._changed:
                self._due.update({run: (time.monotonic(), 0) for run in left if run not in self._due})

    def _left(self, collector: str) -> list[str]:
        found = []
        for folder in folders(self._runs):
            try:
                if not _is_archived(folder) and is_over(folder / FILE, collector):
                    found.append(folder.name)
            except (StoreError, OSError) as error:
                log.error("cannot archive %s: %s", folder.name, error)
        return found

    def _try(self, run: str) -> str:
        """Returns why the run is not archived, or nothing."""
        try:
            with suppress(FileNotFoundError):
                (self._runs / run / MARK).unlink()
        except OSError as error:
            return f"{error.strerror or error}"
        # In the environment: a command line is for all to see, and a URL may have a password.
        told = {VARIABLE: self._url}
        ended = self._programs.run(self._command(self._runs / run), told, LIMIT, niceness=NICENESS)
        if ended.error or ended.code == 0:
            return ended.error
        if ended.code is None:
            return f"it took more than {LIMIT:g} s"
        last = printable(shown((ended.printed.splitlines() or [NOTHING])[-1])[-TOLD:])
        return last.removeprefix("rankwatch: error: ")

    def _mark(self, run: str) -> None:
        try:
            (self._runs / run / MARK).write_text(f"{shown(self._url)}\n", encoding="utf-8")
        except OSError as error:
            log.warning("cannot note that run %s is archived: %s; a restarted collector archives it again", run, error)

    def _by_hand(self, run: str) -> str:
        return shlex.join(["rankwatch", "archive", str(self._runs / run), shown(self._url)])


def _is_archived(folder: Path) -> bool:
    """As the record is now: a lost rank may have come back since, and the run have ended again."""
    changed = (folder / FILE).stat().st_mtime_ns
    with suppress(FileNotFoundError):
        aside = (folder / f"{FILE}-wal").stat()
        changed = max(changed, aside.st_mtime_ns if aside.st_size else 0)  # a reader may leave an empty one
    with suppress(FileNotFoundError):
        return (folder / MARK).stat().st_mtime_ns >= changed
    return False


def command_of(run: Path) -> list[str]:
    return [sys.executable, "-m", "rankwatch_monitor", "archive", str(run)]
