"""Whether a collector still writes a run: it holds a lock on the run's folder, which the kernel takes back at its death.

The lock says nothing on another host, on a network file system, or after the machine was started again. There the age of the
standings decides, which a collector writes in each heartbeat.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from rankwatch.shared.system.process import boot_id

from .mounts import is_on_network

STALE_AFTER = 60.0
"""Seconds without new standings after which a run has lost its collector, where its lock says nothing."""

_HELD = errno.EWOULDBLOCK, errno.EACCES


class Claim:
    """Held from ``take`` until ``release``, or until this process ends. Where folders cannot be locked it is never held."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def take(self) -> None:
        """Does not wait: somebody may be looking at this moment, and then the next call takes it."""
        if self._descriptor is not None:
            return
        with suppress(OSError):
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _flock(descriptor, exclusive=True)
            except OSError:
                os.close(descriptor)
            else:
                self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_claimed(folder: Path) -> bool | None:
    """Whether a process of this machine has the claim; None: not known. Takes no time and changes nothing."""
    if is_on_network(folder):  # NFS locks only what is open to be written
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        _flock(descriptor, exclusive=False)
    except OSError as error:
        return True if error.errno in _HELD else None
    else:
        return False
    finally:
        os.close(descriptor)


def _flock(descriptor: int, *, exclusive: bool) -> None:
    import fcntl  # here, so that lists are read on Windows too

    fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)


def is_alive(folder: Path, boot: str, heard: float, now: float) -> bool:
    """Whether the run's collector writes it.

    Args:
        boot: ``boot_id`` of its collector.
        heard: Unix time of the last standings, or of the run's beginning.
    """
    if boot and boot == boot_id():
        claimed = is_claimed(folder)
        if claimed is not None:
            return claimed
    return abs(now - heard) <= STALE_AFTER  # the clock of another host may be ahead, or a record invented
