"""Ends this process at a moment, with exit code 77, even if a C extension keeps the GIL: the C library's ``_exit`` is called.

A timer of the kernel has it called. A forked child inherits no timer.
"""

from __future__ import annotations

import ctypes
import faulthandler
import time
from contextlib import suppress
from typing import Any

from ..shared.system.exit_call import ExitCall, realtime_libraries

_STDERR = 2  # sys.stderr may have been replaced by something without a file descriptor
_AGAIN = 1
"""Seconds until the timer tries again, if the C library had no memory for its thread."""
_SETTING = ctypes.c_long * 4
"""``struct itimerspec``: seconds and nanoseconds between two times, and until the first one. Zeros stop the timer."""


class ExitTimer:
    """Ends the process when it fires; it may be set again, until ``cancel``.

    Where the C library has no such timer, that of ``faulthandler`` is used: it ends the process with code 1.
    """

    def __init__(self) -> None:
        self._c: Any = None
        with suppress(OSError, AttributeError):
            self._c, self._timer = _make()

    def set(self, seconds: float) -> None:
        """Fires in ``seconds`` from now."""
        if self._c is None:
            faulthandler.dump_traceback_later(max(seconds, 0.001), exit=True, file=_STDERR)
        else:
            whole, part = divmod(max(seconds, 1e-9), 1.0)  # 0 would stop the timer
            self._set(_SETTING(_AGAIN, 0, int(whole), int(part * 1e9)))

    def cancel(self) -> None:
        if self._c is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            self._set(_SETTING())

    def _set(self, setting: ctypes.Array[ctypes.c_long]) -> None:
        self._c.timer_settime(self._timer, 0, ctypes.byref(setting), None)


def _make() -> tuple[Any, ctypes.c_void_p]:
    """The library of the new timer, which is not set yet, and its number."""
    for c in realtime_libraries():
        timer = ctypes.c_void_p()
        with suppress(AttributeError):
            if c.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(ExitCall()), ctypes.byref(timer)) == 0:
                return c, timer
    raise OSError("there is no POSIX timer")
