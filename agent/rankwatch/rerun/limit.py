"""How long a rerun may take."""

from __future__ import annotations

import math
import threading
import time

CPU_SECONDS, WALL_SECONDS = 1.0, 10.0
"""Before a TRIP: the other ranks wait in a collective, or come to one, while this rank repeats."""


class Limit:
    """Reached at ``until`` of ``time.monotonic``, or once the threads that run operators have had ``cpu`` seconds of a core.

    Where other processes keep the cores busy, a rerun of a moment takes seconds of wall time. So its work is counted. A backward
    on a GPU runs in a thread of autograd, and a thread that reads a number from a GPU spins until it is there. What waits for
    anything else ends by the wall time.
    """

    def __init__(self, until: float = math.inf, cpu: float = math.inf) -> None:
        self._until = until
        self._cpu = cpu
        self._began = {threading.get_ident(): time.thread_time()}
        self._used: dict[int, float] = {}

    def is_reached(self) -> bool:
        """Called before each operator, in the thread that is to run it."""
        thread, now = threading.get_ident(), time.thread_time()
        self._used[thread] = now - self._began.setdefault(thread, now)
        return time.monotonic() > self._until or sum(self._used.values()) > self._cpu


def before_a_trip() -> Limit:
    return Limit(time.monotonic() + WALL_SECONDS, CPU_SECONDS)
