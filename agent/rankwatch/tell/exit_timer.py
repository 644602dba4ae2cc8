"""Ends this process at a moment, with exit code 77, even if a C extension keeps the GIL: the C library's ``_exit`` is called."""

from __future__ import annotations

import faulthandler
from contextlib import suppress

from ..shared.system.native_call import exit_call
from .native_timer import NativeTimer

_STDERR = 2  # sys.stderr may have been replaced by something without a file descriptor
_AGAIN = 1.0
"""Seconds until the timer tries again, if the C library had no memory for its thread."""


class ExitTimer:
    """Ends the process when it fires; it may be set again, until ``cancel``.

    Where the C library has no such timer, that of ``faulthandler`` is used: it ends the process with code 1.
    """

    def __init__(self) -> None:
        self._timer: NativeTimer | None = None
        with suppress(OSError, AttributeError):
            self._timer = NativeTimer(exit_call())

    def set(self, seconds: float) -> None:
        """Fires in ``seconds`` from now."""
        if self._timer is None:
            faulthandler.dump_traceback_later(max(seconds, 0.001), exit=True, file=_STDERR)
        else:
            self._timer.set(seconds, _AGAIN)

    def cancel(self) -> None:
        if self._timer is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            self._timer.cancel()
