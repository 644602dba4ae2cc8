"""The thread that writes the runs' records and all other files, so that no message waits for the disk.

Detection and abort never depend on the disk. What it does not take is held and tried again (``unwritten.py``). Only what a
committed transaction has is reported as stored, so that ranks keep the rest; what is lost all the same is reported as a gap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import NamedTuple

from rankwatch import __version__
from rankwatch.shared.system.process import boot_id

from ...decide.core.effects import Show
from ...decide.core.gaps import END, Gap
from ...decide.core.journal import NO_RANK, Entry, Opened, Trained
from ...decide.keys.keyring import ANY_JOB
from ...record.disk import LOCKED, LOSES_ALL, OURS, SILENT, describe_failure
from ...record.schema import FILE, RecordGone, StoreError
from ...record.store import Limits, Store
from ..niceness import RECORDING, yield_to_others
from .disk_budget import DiskBudgets
from .unwritten import MANY, MAX_ACTIONS, FileWrite, Held, Waiting, Weight

log = logging.getLogger(__name__)

COMMIT_INTERVAL = 0.25
"""Seconds for which batches are collected, to be written in one transaction. All other entries are written at once."""

MAX_WAITING, MAX_FACTS = 512 * 2**20, 128 * 2**20
"""Bytes of batches, and of other facts while the disk takes nothing, that may wait for it. What is over that is not recorded."""

LAST_TRIES = 5.0
"""Seconds at the end after which entries are given up, if the disk refuses them all the time."""

STUCK = 20.0
"""Seconds at the end after which the disk is given up, if it neither takes nor refuses anything. A slow disk is waited for."""

TOO_SLOW = "the disk was too slow"


class Placed(NamedTuple):
    """Where what was stored of a run is: the ``device`` and ``inode`` of its file; and of how many ranks and batches it is."""

    device: int
    inode: int
    ranks: int
    batches: int


class RecordWriter:
    """Writes each run's record into its folder.

    Args:
        folder: the folder of all runs.
        wake: called in the writer's thread when ``stored`` or ``lost`` has something new.
        limits: how much of each run is retained.
        begin_folder: yields a new folder for the record of a run that begins; renames it to the run's afterwards.
        on_headroom: called in the writer's thread with a run, and the least headroom of the batches that were just stored.
        on_over: called in the writer's thread with each run that is over, and whose record is complete.
        meta: the origin, written into every record.
    """

    def __init__(
        self,
        folder: Path,
        wake: Callable[[], None],
        limits: Limits,
        begin_folder: Callable[[str], AbstractContextManager[Path]],
        on_headroom: Callable[[str, float], None] = lambda run, doublings: None,
        on_over: Callable[[str], None] = lambda run: None,
        **meta: str,
    ) -> None:
        self._folder = folder
        self._wake = wake
        self._limits = limits
        self._begin_folder = begin_folder
        self._on_headroom = on_headroom
        self._on_over = on_over
        self._meta = {"rankwatch": __version__, "boot": boot_id(), **meta}
        self._changed = threading.Condition()
        self._runs: dict[str, Held] = {}
        self._batches, self._facts = Waiting(), Waiting()
        self._entries = Counter[str]()
        """How many wait of each key."""
        self.disk = DiskBudgets()
        self._is_urgent = self._is_waiting = False
        self._closing_at: float | None = None
        self._worked_at = float("-inf")
        self._stored: dict[str, dict[int, int]] = {}
        self._lost: dict[str, tuple[Gap, ...]] = {}
        self._overflowing: set[str] = set()
        self._stores: dict[str, Store] = {}
        self._placed: dict[str, Placed] = {}
        self._adopted: set[str] = set()
        """Runs under way whose record is to be opened, even if nothing but standings comes."""
        self._tried: dict[str, tuple[tuple[int, ...], int, int]] = {}
        """Of a transaction that failed: the mark of the record before it, and how many of the entries that wait are in the file
        if it left nothing there, and if it left all."""
        self._thread = threading.Thread(target=self._run, name="rankwatch-writer", daemon=True)
        self._thread.start()

    def adopt(self, run: str, bound: str = ANY_JOB) -> None:
        """The run was begun by another collector, by this key; call this before anything is queued for it."""
        with self._changed:
            self.disk.begin(run, bound)
            self._adopted.add(run)

    def append(self, run: str, entries: Sequence[Entry]) -> None:
        """Queues entries of a run, in the order of the calls."""
        with self._changed:
            held = self._held(run)
            queued = len(held.entries)
            if entries and isinstance(opened := entries[0].fact, Opened):
                self.disk.begin(run, opened.bound)
            key, before = self.disk.key_of(run), held.weight
            room = self._batches.room(MAX_WAITING, key, before.batches)
            bulk_room = self._facts.room(MAX_FACTS, key, before.facts)
            held.append(entries, room, bulk_room, TOO_SLOW, is_behind=self._entries[key] >= MANY)
            self._count(held, before)
            if len(held.entries) < queued + len(entries):
                self._log_overflow(held)
                self._lost[run] = held.lost.all()
            is_urgent = not all(isinstance(entry.fact, Trained) for entry in entries)
            if is_urgent > self._is_urgent or self._is_waiting:
                self._is_urgent |= is_urgent
                self._changed.notify()

    def show(self, shown: Show) -> None:
        """Queues a run's standings, in place of those before. They are not written where the run has no record."""
        with self._changed:
            self._held(shown.run).shown = shown
            self._changed.notify()

    def do(self, run: str, action: FileWrite) -> None:
        """Queues what writes another file of the run, after the entries before it."""
        with self._changed:
            held = self._held(run)
            if len(held.actions) < MAX_ACTIONS:
                held.actions.append(action)
            self._is_urgent = True
            self._changed.notify()

    def stored(self) -> dict[str, dict[int, int]]:
        """By run and rank: the sequence number up to which messages are stored, where it has changed since the last call."""
        with self._changed:
            stored, self._stored = self._stored, {}
        return stored

    def lost(self) -> dict[str, tuple[Gap, ...]]:
        """By run: all that will never be stored, where it has changed since the last call."""
        with self._changed:
            lost, self._lost = self._lost, {}
        return lost

    def unstored(self, run: str, *, late: bool = False) -> tuple[Gap, ...]:
        """What is lost of a run, or was refused so far. ``late``: and all that waits, since the disk does not answer."""
        with self._changed:
            return self._runs[run].unstored(all_of_it=late, why=SILENT) if run in self._runs else ()

    @property
    def unwritten(self) -> int:
        """Bytes of batches that wait for the disk."""
        return self._batches.total

    def close(self) -> None:
        """Writes what waits, and ends the thread: for as long as the disk takes anything."""
        with self._changed:
            self._closing_at = time.monotonic()
            for held in self._runs.values():
                held.retry_at = self._closing_at
            self._changed.notify()
        progress, moved_at = self._progress(), time.monotonic()
        while self._thread.is_alive() and time.monotonic() - moved_at < STUCK:
            self._thread.join(min(0.5, STUCK / 4))
            if (now := self._progress()) != progress:
                progress, moved_at = now, time.monotonic()
        if self._thread.is_alive():
            log.error("the disk has not answered for %g s: what came last is not in the record", STUCK)

    # --- the writer's thread ------------------------------------------------------------------------------------------

    def _progress(self) -> object:
        """Changes when the disk takes anything: a transaction, or a part of one that the kernel counts."""
        written: str | float = self._worked_at
        with suppress(OSError):
            written = Path(f"/proc/self/task/{self._thread.native_id}/io").read_text(encoding="ascii")
        return self._worked_at, written

    def _run(self) -> None:
        yield_to_others(RECORDING)
        while (due := self._take()) is not None:
            for held in due:
                self._serve(held)
            self._wake()
        for store in self._stores.values():
            _close(store)

    def _count(self, held: Held, before: Weight) -> None:
        """What waits of a run was ``before``."""
        key, now = self.disk.key_of(held.run), held.weight
        self._entries[key] += now.entries - before.entries
        self._batches.add(key, now.batches - before.batches)
        self._facts.add(key, now.facts - before.facts)

    def _held(self, run: str) -> Held:
        if run not in self._runs:
            self._runs[run] = Held(run)
        return self._runs[run]

    def _take(self) -> list[Held] | None:
        """Waits for runs that have work, and returns them; None at the end."""
        with self._changed:
            while True:
                now = time.monotonic()
                is_closing = self._closing_at is not None
                due = [held for held in self._runs.values() if held.is_due(now)]
                if due:
                    break
                retries = [held.retry_at for held in self._runs.values() if held.is_failing]
                if is_closing and not retries:
                    return None
                self._is_waiting = True
                self._changed.wait(max(0.001, min(retries) - now) if retries else None)
                self._is_waiting = False
            self._changed.wait_for(lambda: self._is_urgent or self._closing_at is not None, COMMIT_INTERVAL)
            self._is_urgent = False
            return [held for held in self._runs.values() if held.is_due(time.monotonic())]

    def _serve(self, held: Held) -> None:
        with self._changed:
            entries, shown = held.begin()
            actions, held.actions = held.actions, []
        why = self._attempt(held, entries, shown)
        with self._changed:
            now, before = time.monotonic(), held.weight
            held.past = self._past(held.run, why)
            if not why:
                self._stored.setdefault(held.run, {}).update(held.succeed())
                self._worked_at = now
            elif held.is_recordless or (self._closing_at is not None and self._is_hopeless(held, now)):
                self._give_up(held, why)
            else:
                held.fail(why, now)
                held.actions[:0] = [FileWrite(action.do, _nothing) if why == LOCKED else action for action in actions]
                actions = actions if why == LOCKED else []
            self._count(held, before)
        for action in actions:
            try:
                (action.without_record if why == LOCKED else action.do)()
            except Exception:
                log.exception("an error of ours while a file was written; the collector goes on")
        with self._changed:
            if held.is_idle and held.run not in self._stores and not held.lost and not held.is_recordless:
                self._runs.pop(held.run, None)

    def _is_hopeless(self, held: Held, now: float) -> bool:
        """At the end: whether the disk has refused all for too long."""
        assert self._closing_at is not None
        return bool(held.why) and now - max(self._closing_at, self._worked_at) > LAST_TRIES

    def _give_up(self, held: Held, why: str) -> None:
        if held.entries or held.taken:
            log.error("what came last of run %s is not in its record: %s", held.run, why)
        held.give_up(why)
        self._tried.pop(held.run, None)
        self._lost[held.run] = held.lost.all()

    def _attempt(self, held: Held, entries: Sequence[Entry], shown: Show | None) -> str:
        """Writes them in one transaction; returns why that failed, or nothing."""
        run = held.run
        if held.is_recordless:
            return OURS
        try:
            self._write(run, entries, shown)
        except (StoreError, OSError) as error:
            why = describe_failure(error, self._folder / run / FILE)
            if not held.why:
                log.error("cannot write run %s (%s); it is tried again, and the run goes on: %s", run, why, error)
            self._drop_store(run)
            return why
        except Exception:
            log.exception("an error of ours while run %s was recorded; it goes on without a record", run)
            self._drop_store(run)
            held.is_recordless = True
            return OURS
        if held.why and entries:
            log.info("run %s is written again", run)
        return ""

    def _write(self, run: str, entries: Sequence[Entry], shown: Show | None) -> None:
        is_under_way = run in self._stores or run in self._adopted
        if not entries and not (shown is not None and is_under_way):
            return
        if run not in self._stores and entries and isinstance(entries[0].fact, Opened):
            with self._begin_folder(run) as folder, closing(Store(folder / FILE, self._limits)) as first:
                self._commit(run, first, entries, shown)
            with suppress(StoreError, OSError):  # the next write opens it, or says why it cannot
                self._place(run, first)
                self._open(run)
        else:
            store = self._open(run)
            self._adopted.discard(run)
            mark, least, most = self._tried.pop(run, (store.mark, 0, 0))
            skipped = least if store.mark == mark else most
            self._commit(run, store, entries[skipped:], shown, skipped)
        if run in self._stores and self._stores[run].row.is_over:
            _close(self._stores.pop(run))
            self._placed.pop(run, None)
            self.disk.close(run)
            self._on_over(run)

    def _open(self, run: str) -> Store:
        """The run's store. Raises RecordGone where it is not the one that has what was stored."""
        if run not in self._stores:
            if run in self._placed:
                self._check_place(run)
            store = Store(self._folder / run / FILE, self._limits)
            if run in self._placed and not store.row.world_size:
                _close(store)
                raise RecordGone(self._folder / run / FILE)
            self._stores[run] = store
            self._place(run, store)
            self.disk.adopt(run, store.size)
        return self._stores[run]

    def _place(self, run: str, store: Store) -> None:
        stat = (self._folder / run / FILE).stat()
        self._placed[run] = Placed(stat.st_dev, stat.st_ino, store.row.world_size, store.row.batches)

    def _check_place(self, run: str) -> None:
        """SQLite writes on into a file that was removed or replaced, and nobody will read that."""
        path = self._folder / run / FILE
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise RecordGone(path) from None
        if (stat.st_dev, stat.st_ino) != self._placed[run][:2]:
            raise RecordGone(path)

    def _past(self, run: str, why: str) -> Gap | None:
        """What was stored of a run and cannot be read: all of it, or nothing."""
        if why not in LOSES_ALL or run not in self._placed:
            return None
        _, _, ranks, batches = self._placed[run]
        return Gap(tuple(range(ranks)), 0, batches - 1, why) if batches else Gap((NO_RANK,), END, END, why)

    def _commit(self, run: str, store: Store, entries: Sequence[Entry], shown: Show | None, before: int = 0) -> None:
        """``before``: how many entries that wait come before these, and are in the file."""
        mark = store.mark
        store.let_grow(grows=self.disk.may_grow(run, time.monotonic()))
        try:
            headroom = store.write(entries, time.time(), shown, run=run, **self._meta)
            self.disk.measure(run, store.size)
            if run in self._stores:
                self._check_place(run)
                self._place(run, store)
        except BaseException:
            if run in self._stores:
                self._tried[run] = mark, before, before + len(entries)
            raise
        if headroom is not None:
            self._on_headroom(run, headroom)

    def _drop_store(self, run: str) -> None:
        """After a failure a store no longer knows what the file has; the next try opens it anew."""
        store = self._stores.pop(run, None)
        if store is not None:
            self._adopted.add(run)
            _close(store)

    def _log_overflow(self, held: Held) -> None:
        if held.run not in self._overflowing and not held.is_recordless:
            self._overflowing.add(held.run)
            log.error("%s: batches of run %s are missing in its record", held.why or TOO_SLOW, held.run)


def _nothing() -> None:
    """Has been done."""


def _close(store: Store) -> None:
    try:
        store.close()
    except StoreError as error:
        log.error("cannot close %s", error)
