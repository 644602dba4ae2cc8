"""Who has the name of a run, where several collectors write to one folder.

A name belongs to whoever made the folder: ``mkdir`` succeeds once, on network file systems as well. Until the folder has a
record, a note in it names the process that claimed it. What a killed collector left is swept by a collector that has the same
keys, or that can see that the process is gone; never by another one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rankwatch.shared.system.process import ENDED, machine, stat_of

log = logging.getLogger(__name__)

NOTE = ".claim"
PART = ".record.part"
"""The folder in which a record begins."""


class Owner(NamedTuple):
    """A collector's process. ``machine`` is the running kernel and the space of process numbers; empty: unknown.

    ``began`` is in ticks since that kernel started. ``collector`` is its public key, or empty.
    """

    collector: str
    host: str
    machine: str
    pid: int
    began: str

    def is_gone(self, now: Owner) -> bool:
        """Whether a later process, ``now``, can say that this one has ended."""
        if self.collector and self.collector == now.collector:
            return True  # it has the keys, of which there is one holder
        return bool(self.machine) and self.machine == now.machine and _has_ended(self.pid, self.began)


class Claims:
    """The names of runs that this process has claimed in the folder ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = _myself("")
        self._unborn: set[str] = set()
        """Their folders have no record yet."""
        self._unmade: set[str] = set()
        """Their folders could not be made."""

    def claim(self, run: str) -> bool:
        """Whether a new run may have this name. Where no folder can be made it may, and ``hold`` tries again."""
        try:
            self._make(run)
        except OSError as error:
            # Of a link to nowhere above the folder, mkdir says that it exists too; then no other name is free either.
            if isinstance(error, FileExistsError) and os.path.lexists(self._path / run):
                return False
            log.error("cannot make the folder of run %s: %s; the run begins without it", run, error.strerror)
            self._unmade.add(run)
        return True

    def hold(self, run: str) -> Path:
        """The folder of a run that begins here. Raises OSError: it cannot be made, or is another's by now."""
        folder = self._path / run
        if run not in self._unborn or not folder.exists():  # it may be removed again, to make room on a full disk, say
            self._make(run)
        return folder

    def try_again(self, run: str) -> None:
        """Makes the folder where ``claim`` could not. Raises OSError as ``hold`` does."""
        if run in self._unmade:
            self._make(run)

    def settle(self, run: str) -> None:
        """The folder has its record, which says whose it is."""
        self._unborn.discard(run)
        with suppress(OSError):
            (self._path / run / NOTE).unlink(missing_ok=True)

    def sweep(self, collector: str) -> None:
        """Signs claims with this key from now on, and removes the half-made folders of collectors that are gone."""
        self._owner = _myself(collector)
        for note in sorted(self._path.glob(f"*/{NOTE}")):
            owner = _read(note)
            if owner is not None and owner.is_gone(self._owner):
                _remove(note, owner)

    def _make(self, run: str) -> None:
        folder = self._path / run
        folder.mkdir(parents=True)
        self._unmade.discard(run)
        self._unborn.add(run)
        try:
            (folder / NOTE).write_text(json.dumps(self._owner))
        except OSError as error:
            log.debug("run %s: no note of the claim: %s", run, error)


def _remove(note: Path, owner: Owner) -> None:
    # Of several collectors that sweep, one renames the note. By then the name may be claimed anew.
    taken = note.with_name(f"{NOTE}.{os.urandom(4).hex()}")
    with suppress(OSError):
        note.rename(taken)
        if _read(taken) != owner:
            taken.rename(note)
            return
        shutil.rmtree(note.parent / PART, ignore_errors=True)
        taken.unlink()
        note.parent.rmdir()  # fails, and rightly so, if there is a record or a report
        log.info("removed %s, which a collector that was killed had begun", note.parent)


def _read(note: Path) -> Owner | None:
    try:
        collector, host, machine, pid, began = json.loads(note.read_text())
        return Owner(str(collector), str(host), str(machine), int(pid), str(began))
    except (OSError, ValueError, TypeError):
        return None


def _myself(collector: str) -> Owner:
    own = stat_of(os.getpid())
    return Owner(collector, socket.gethostname(), machine(), os.getpid(), "" if own is None else str(own.started_at))


def _has_ended(pid: int, began: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's; /proc may hide it
        pass
    stat = stat_of(pid)
    # Its number may be another process's by now.
    return stat is not None and (stat.state in ENDED or str(stat.started_at) != began)
