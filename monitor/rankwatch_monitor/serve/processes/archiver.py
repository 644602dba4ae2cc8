"""``--archive URL``: each run that is over is added to an archive, by ``rankwatch archive`` in a process of its own.

What a slow or broken file system does to that process, it does not do to the collector, which imports nothing for it. Records lie
on the disk: where very many runs are over, some wait here, and the others are looked for on the disk once there is room.
"""

from __future__ import annotations

import logging
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
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

MOST_WAITING = 1024
"""Runs that wait here, as many as one key may have under way: each has its tries, and its lines in the log."""

NAMED = 16
"""Runs that are named at the end, of those that are not archived."""

NICENESS = 10

VARIABLE = "RANKWATCH_ARCHIVE"
"""By which ``rankwatch archive`` is told the URL."""

TOLD = 300
"""Characters of what a failed try has printed last, for the log."""

LATER = "a collector with the same connection file archives them"

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
        self._collector = ""
        self._missed = 0
        """Runs that are over and found no room here, since the last look for such runs began."""
        self._sought = 0
        """Those before, as far as the look has not come to them."""
        self._looked_up_to: str | None = None
        """The name of a run: those up to it were looked at, those after it were not. None: no look is under way."""
        self._closing_at: float | None = None
        self._has_given_up = False
        self._programs = Programs()
        self._thread = threading.Thread(target=self._run, name="rankwatch-archiver", daemon=True)
        if url:
            self._thread.start()

    def begin(self, collector: str, *, takes_over: bool) -> None:
        """Whose runs these are. ``takes_over``: a collector of this name has ended, maybe before it could archive its own."""
        with self._changed:
            self._collector = collector
            if takes_over:
                self._looked_up_to = ""
            self._changed.notify()

    def add(self, run: str) -> None:
        """The run is over, and its record complete: for the first time, or again."""
        if not self._url:
            return
        with self._changed:
            if len(self._due) < MOST_WAITING or run in self._due or run == self._busy:
                self._due[run] = time.monotonic(), 0
                self._changed.notify()
                return
            if not self._is_behind:
                log.warning("%d runs wait to be archived: those that end now are looked for on the disk later", MOST_WAITING)
            self._missed += 1

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
            more = len(left[NAMED:]) + self._missed + self._sought
        self._programs.stop()
        for run in left[:NAMED]:
            log.error("run %s is not archived: there was no more time; later: %s", run, self._by_hand(run))
        if more:
            log.error("and %d more runs in %s are not archived; %s", more, self._runs, LATER)

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

    @property
    def _is_behind(self) -> bool:
        """Whether runs are to be looked for on the disk."""
        return bool(self._missed) or self._looked_up_to is not None

    def _next(self) -> tuple[str, int] | None:
        """Waits for a run that is to be tried, and returns how often it was; None: all is done, and nothing more comes."""
        while True:
            with self._changed:
                if self._has_given_up:
                    return None
                looks = self._is_behind and len(self._due) <= MOST_WAITING // 2
                if not looks:
                    if self._closing_at is not None and not self._due:
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
                if self._looked_up_to is None:
                    self._looked_up_to, self._sought, self._missed = "", self._missed, 0
                after = self._looked_up_to
            found = list(islice(self._left(after), max(1, MOST_WAITING // 2)))
            with self._changed:
                self._due.update({run: (time.monotonic(), 0) for run in found if run not in self._due})
                if found:
                    self._looked_up_to, self._sought = found[-1], max(0, self._sought - len(found))
                else:
                    self._looked_up_to, self._sought = None, 0

    def _left(self, after: str) -> Iterator[str]:
        """The runs on the disk that are over and not archived, by name. Each look goes on behind the one before: what cannot be
        archived must not hold up the others."""
        for folder in folders(self._runs):
            try:
                if folder.name > after and not _is_archived(folder) and is_over(folder / FILE, self._collector):
                    yield folder.name
            except (StoreError, OSError) as error:
                log.error("cannot archive %s: %s", folder.name, error)

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
