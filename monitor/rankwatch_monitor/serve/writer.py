"""The thread that writes the runs' records and all other files, so that no message waits for the disk.

Detection and abort never depend on the disk: what cannot be written is dropped, with one line in the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rankwatch import __version__
from rankwatch.shared import messages

from ..decide.effects import Show
from ..decide.journal import Closed, Entry, Opened, Trained
from ..record.schema import FILE, StoreError
from ..record.store import Limits, Store
from .precedence import RECORDING, yield_to_others

log = logging.getLogger(__name__)

COMMIT_INTERVAL = 0.25
"""Seconds for which batches are collected, to be written in one transaction. All other entries are written at once."""


class _Queued(NamedTuple):
    """Entries of a run, the last sequence number of each rank among them, and the bytes of their batches."""

    run: str
    entries: Sequence[Entry]
    seqs: Mapping[int, int]
    size: int


_Work: TypeAlias = tuple[list[_Queued], dict[str, Show], list[Callable[[], None]]]

MAX_WAITING = 256 * 2**20
"""Bytes of batches that may wait for the disk. Further batches are not recorded."""

LAST_WRITES = 5.0
"""Seconds to write the entries that still wait at the end."""


class RecordWriter:
    """Writes each run's record into its folder.

    Args:
        folder: the folder of all runs.
        wake: called in the writer's thread when ``stored`` has something new.
        limits: how much of each run is retained.
        begin_folder: yields a new folder for the record of a run that begins; renames it to the run's afterwards.
        on_headroom: called in the writer's thread with a run, and the least headroom of the batches that were just stored.
        meta: the origin, written into every record.
    """

    def __init__(
        self,
        folder: Path,
        wake: Callable[[], None],
        limits: Limits,
        begin_folder: Callable[[str], AbstractContextManager[Path]],
        on_headroom: Callable[[str, float], None] = lambda run, doublings: None,
        **meta: str,
    ) -> None:
        self._folder = folder
        self._wake = wake
        self._limits = limits
        self._begin_folder = begin_folder
        self._on_headroom = on_headroom
        self._meta = {"rankwatch": __version__, **meta}
        self._changed = threading.Condition()
        self._waiting: list[_Queued] = []
        self._waiting_bytes = 0
        self._actions: list[Callable[[], None]] = []
        self._shown: dict[str, Show] = {}
        self._is_urgent = False
        self._is_closing = False
        self._stored: dict[str, dict[int, int]] = {}
        self._overflowing: set[str] = set()
        self._stores: dict[str, Store | None] = {}
        """None: this run has no record, because the disk failed."""
        self._thread = threading.Thread(target=self._run, name="rankwatch-writer", daemon=True)
        self._thread.start()

    def append(self, run: str, entries: Sequence[Entry]) -> None:
        """Queues entries of a run, in the order of the calls."""
        size, is_urgent, seqs = 0, False, {}
        for _, rank, fact in entries:
            if isinstance(fact, Trained):
                size += 2 * fact.table.column_bytes + fact.table.rows
                seqs[rank] = fact.seq
            else:
                is_urgent = True
                if isinstance(fact, messages.Sequenced):
                    seqs[rank] = fact.seq
        with self._changed:
            if size and self._waiting_bytes + size > MAX_WAITING:
                self._log_overflow(run)
                entries = [entry for entry in entries if not isinstance(entry.fact, Trained)]
                size = 0
            self._waiting.append(_Queued(run, entries, seqs, size))
            self._waiting_bytes += size
            if is_urgent > self._is_urgent or len(self._waiting) == 1:
                self._is_urgent |= is_urgent
                self._changed.notify()

    def show(self, shown: Show) -> None:
        """Queues a run's standings, in place of those before. They are not written where the run has no record."""
        with self._changed:
            self._shown[shown.run] = shown
            self._changed.notify()

    def do(self, action: Callable[[], None]) -> None:
        """Queues ``action``, which writes another file, after the entries before it."""
        with self._changed:
            self._actions.append(action)
            self._is_urgent = True
            self._changed.notify()

    def stored(self) -> dict[str, dict[int, int]]:
        """By run and rank: the sequence number up to which messages are stored, where it has changed since the last call."""
        with self._changed:
            stored, self._stored = self._stored, {}
        return stored

    @property
    def unwritten(self) -> int:
        """Bytes of batches that wait for the disk."""
        return self._waiting_bytes

    def close(self) -> None:
        """Writes what waits, and ends the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(LAST_WRITES)
        if self._thread.is_alive():
            log.error("the disk did not take the last entries of the record within %g s", LAST_WRITES)

    def _log_overflow(self, run: str) -> None:
        if run not in self._overflowing:
            self._overflowing.add(run)
            log.error("the disk is too slow: batches of run %s are missing in its record", run)

    def _run(self) -> None:
        yield_to_others(RECORDING)
        while (work := self._take()) is not None:
            taken, shown, actions = work
            by_run: dict[str, list[Entry]] = {}
            for queued in taken:
                by_run.setdefault(queued.run, []).extend(queued.entries)
            for run in dict.fromkeys([*by_run, *shown]):
                self._write(run, by_run.get(run, []), shown.get(run))
            with self._changed:
                for queued in taken:
                    self._waiting_bytes -= queued.size
                    self._stored.setdefault(queued.run, {}).update(queued.seqs)
            self._wake()
            for action in actions:
                try:
                    action()
                except Exception:
                    log.exception("an error of ours while a file was written; the collector goes on")
        for store in self._stores.values():
            if store is not None:
                _close(store)

    def _take(self) -> _Work | None:
        """Waits for work; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._shown or self._is_urgent or self._is_closing)
            self._changed.wait_for(lambda: self._is_urgent or self._is_closing, COMMIT_INTERVAL)
            taken, self._waiting, self._is_urgent = self._waiting, [], False
            shown, self._shown = self._shown, {}
            actions, self._actions = self._actions, []
            return (taken, shown, actions) if taken or shown or actions or not self._is_closing else None

    def _write(self, run: str, entries: Sequence[Entry], shown: Show | None) -> None:
        def write_to(store: Store) -> None:
            headroom = store.write(entries, time.time(), shown, run=run, **self._meta)
            if headroom is not None:
                self._on_headroom(run, headroom)

        try:
            if run in self._stores:
                store = self._stores[run]
                if store is None:
                    return
                write_to(store)
            elif not entries:  # it is over
                return
            elif isinstance(entries[0].fact, Opened):
                with self._begin_folder(run) as folder, closing(Store(folder / FILE, self._limits)) as first:
                    write_to(first)
                store = self._stores[run] = Store(self._folder / run / FILE, self._limits)
            else:
                store = self._stores[run] = Store(self._folder / run / FILE, self._limits)
                write_to(store)
            if any(isinstance(entry.fact, Closed) for entry in entries):
                _close(store)
                del self._stores[run]
        except Exception as error:
            self._stores[run] = None
            if isinstance(error, StoreError):
                log.error("cannot write %s; run %s goes on without it", error, run)
            elif isinstance(error, OSError):
                log.error("cannot make the folder of run %s: %s; the run goes on without it", run, error.strerror)
            else:
                log.exception("an error of ours while run %s was recorded; it goes on without a record", run)


def _close(store: Store) -> None:
    try:
        store.close()
    except StoreError as error:
        log.error("cannot close %s", error)
