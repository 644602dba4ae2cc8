"""A message queue of the kernel by which a collector on the same host ends a rank with exit code 77, whatever keeps its GIL.

A rank whose C extension keeps the GIL hears of no abort: its link needs the interpreter. A message in this queue has the C
library call ``_exit(77)``. The queue has no name, so it is gone with its process. Processes of the same user, which may end
this one in any case, find it among its open files.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from .exit_call import ExitCall, realtime_libraries

log = logging.getLogger(__name__)


class _Attributes(ctypes.Structure):
    """``struct mq_attr``: one message of one byte."""

    _fields_ = (
        ("flags", ctypes.c_long),
        ("most_messages", ctypes.c_long),
        ("message_bytes", ctypes.c_long),
        ("waiting", ctypes.c_long),
        ("padding", ctypes.c_long * 4),
    )


class ExitQueue:
    """This process's queue, until ``close``. Where the system has no such queues, there is none, and nothing else changes.

    Args:
        name: random, so that no other process has it.
    """

    def __init__(self, name: str) -> None:
        self._descriptor, self._c = -1, _library()
        if self._c is None:
            return
        path = _path(name)
        flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = self._c.mq_open(path, flags, 0o600, ctypes.byref(_Attributes(0, 1, 1)))
        if descriptor >= 0:
            self._c.mq_unlink(path)
        if descriptor < 0 or self._c.mq_notify(descriptor, ctypes.byref(ExitCall())) != 0:
            log.debug("no queue to be ended by: %s", os.strerror(ctypes.get_errno()))
            self._c = None
            if descriptor >= 0:
                os.close(descriptor)
            return
        self._descriptor = descriptor

    def close(self) -> None:
        """From now on nobody ends this process by it."""
        c, self._c = self._c, None
        if c is not None:
            c.mq_notify(self._descriptor, None)
            os.close(self._descriptor)


def end_process(pid: int, name: str) -> bool:
    """Ends the process of this number that has the queue of this name; returns whether there is one."""
    c, entry = _library(), _find(pid, name)
    if c is None or entry is None:
        return False
    with suppress(OSError):  # it may be closed meanwhile
        descriptor = os.open(entry, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return bool(c.mq_send(descriptor, b"\0", 1, 0) == 0)
        finally:
            os.close(descriptor)
    return False


def has_queue(pid: int, name: str) -> bool:
    """Whether the process of this number lives and has the queue of this name."""
    return _find(pid, name) is not None


def _find(pid: int, name: str) -> Path | None:
    """The queue among the open files of a process."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(entry).partition(" ")[0] == _path(name).decode():
                    return entry
    return None


def _path(name: str) -> bytes:
    return b"/rankwatch-" + name.encode()


def _library() -> Any:
    """The C library with message queues; None: there is none."""
    return next((c for c in realtime_libraries() if hasattr(c, "mq_notify")), None)
