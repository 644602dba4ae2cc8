"""A timer of the kernel that has the C library call a function, even if a C extension keeps the GIL.

A forked child inherits no timer.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from typing import Any

from ..shared.system.native_call import NativeCall, realtime_libraries


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> _Time:
        whole, part = divmod(max(seconds, 1e-9), 1.0)  # 0 would stop the timer
        return cls(int(whole), int(part * 1e9))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


class NativeTimer:
    """A POSIX timer that is not set yet. ``call`` must stay as it is for as long as the process lives.

    Raises:
        OSError: the system has no such timer, or no further one.
    """

    def __init__(self, call: NativeCall) -> None:
        self._c, self._timer = _make(call)

    def set(self, seconds: float, again: float = 0.0) -> None:
        """It fires in ``seconds`` from now, and then every ``again`` seconds (0: once)."""
        setting = _Setting(_Time.of(again) if again else _Time(), _Time.of(seconds))
        self._c.timer_settime(self._timer, 0, ctypes.byref(setting), None)

    def cancel(self) -> None:
        """It does not fire any more, unless it is set again."""
        self._c.timer_settime(self._timer, 0, ctypes.byref(_Setting()), None)

    def delete(self) -> None:
        """Gives it back to the system; the last call."""
        self._c.timer_delete(self._timer)


def _make(call: NativeCall) -> tuple[Any, ctypes.c_void_p]:
    for c in realtime_libraries():
        timer = ctypes.c_void_p()
        with suppress(AttributeError):
            if c.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(call), ctypes.byref(timer)) == 0:
                return c, timer
    raise OSError("there is no POSIX timer")
