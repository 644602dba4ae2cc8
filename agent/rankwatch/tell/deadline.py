"""The deadline of an abort, and its one owner: the process is ended if it has not come back by then, and never once it has.

The deadline is ``grace`` seconds after the abort. While work is held (``holds.py``), here or in another rank, it does not run:
then it is that long after the last hold has ended, at most ``hold_limit`` seconds later.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress

from ..errors import EXIT_ABORTED
from .abort import say
from .exit_timer import ExitTimer
from .holds import HOLDS, Holds

GROUPS_TIMEOUT = 0.5
"""Seconds for the abort of the process groups: they may be what hangs."""

MARGIN = 0.75
"""Seconds after the deadline until the process is ended from C, in case no Python thread can run any more."""


class Countdown:
    """When the process is due to be ended. Pure: the clock is passed in."""

    def __init__(self, grace: float, hold_limit: float, now: float) -> None:
        self._grace = grace
        self.held_until = now + hold_limit
        """When holds have no effect any more."""
        self._free_at = now
        self._was_held = False

    def due(self, now: float, *, held: bool) -> float:
        """When the process is due, if nothing changes until then."""
        held = held and now < self.held_until
        if self._was_held and not held:
            self._free_at = min(now, self.held_until)
        self._was_held = held
        return (self.held_until if held else self._free_at) + self._grace


class Deadline:
    """Ends the process with exit code 77 ``grace`` seconds after ``start``, unless it is cancelled before.

    Neither the end nor its moment needs the interpreter: a thread of ours says why, and ``ExitTimer`` stands behind it.
    """

    def __init__(self, reason: str, grace: float, hold_limit: float = 0.0, holds: Holds = HOLDS) -> None:
        self._reason = reason
        self._grace = grace
        self._hold_limit = hold_limit
        self._holds = holds
        self._lock = threading.RLock()  # a signal handler may close the watch
        self._changed = threading.Event()
        self._countdown = Countdown(grace, hold_limit, time.monotonic())
        self._timer: ExitTimer | None = None
        self._is_cancelled = False
        self._others_until = float("-inf")
        """How long holds of other ranks are waited for."""

    @property
    def is_held(self) -> bool:
        """Whether the abort waits for work of this process."""
        return bool(self._holds) and time.monotonic() < self._countdown.held_until

    def wait_for_others(self, seconds: float, *, is_news: bool = True) -> None:
        """Another rank holds work, or has yet to close: this process is not ended for so long. 0: that is over.

        torchrun ends all ranks of a node as soon as one of them has ended, and this one may wait for the other in a collective.
        """
        with self._lock:
            self._others_until = time.monotonic() + seconds
            is_news = is_news and seconds > 0 and not self._holds and not self._is_cancelled
        self._look()
        if is_news:
            say(f"another rank saves: this one is not ended before that, or in {seconds:.0f} s")

    def start(self) -> None:
        with self._lock:
            self._countdown = Countdown(self._grace, self._hold_limit, time.monotonic())
            self._timer = ExitTimer()
            self._holds.listen(self._look)
            self._look()
        try:
            threading.Thread(target=self._wait, name="rankwatch-deadline", daemon=True).start()
        except RuntimeError as error:  # no thread can be started; the timer needs none of ours
            say(f"{self._reason}; {error}")

    def cancel(self) -> None:
        """The process has come back: it is not ended any more, whatever it does."""
        with self._lock:
            self._is_cancelled = True
            if self._timer is not None:
                self._timer.cancel()
        self._holds.forget(self._look)
        self._changed.set()

    def _look(self) -> None:
        """A hold has opened or ended: the timer is set anew before the thread that did so goes on."""
        self._set_timer()
        self._changed.set()

    def _set_timer(self) -> tuple[float, float]:
        """Seconds until the process is due, and until the thread has to look again."""
        with self._lock:
            now = time.monotonic()
            held_until = self._countdown.held_until if self.is_held else min(self._others_until, self._countdown.held_until)
            is_held = now < held_until
            left = self._countdown.due(now, held=is_held) - now
            if is_held:
                left = min(left, held_until + self._grace - now)
            if self._timer is not None and not self._is_cancelled:
                self._timer.set(left + MARGIN)
            return left, held_until - now if is_held else left

    def _wait(self) -> None:
        if self.is_held:
            say(f"{self._reason}; this rank saves: the abort waits up to {self._hold_limit:g} s for it")
        while not self._is_cancelled:
            self._changed.clear()
            left, pause = self._set_timer()
            if left <= 0:
                self._end()
            self._changed.wait(max(pause, 0.0))

    def _end(self) -> None:
        with self._lock:
            if self._is_cancelled:
                return
            try:
                say(f"{self._reason}; this rank did not come back within {self._grace:g} s and is ended")
                _outlive_sigabrt()
                _abort_process_groups()
            finally:
                os._exit(EXIT_ABORTED)


def _outlive_sigabrt() -> None:
    """For the last moments of this process: a thread that calls ``abort(3)`` sleeps, and the exit code is still ours.

    The abort of a communicator may call it, as in torch 2.15's nccl (pytorch#192105), and so may its watchdog when a peer ends.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        library.signal(signal.SIGABRT, ctypes.cast(library.pause, ctypes.c_void_p))


def _abort_process_groups() -> None:
    """Aborts collectives, so that peers see their connections end. Has a timeout: the groups may be what hangs."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    abort = getattr(distributed.distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        thread = threading.Thread(target=abort, name="rankwatch-abort-groups", daemon=True)
        thread.start()
        thread.join(GROUPS_TIMEOUT)
