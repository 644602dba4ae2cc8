"""The time in which a loop turned: while it does not run, nobody else is silent. Pure: the time is passed in."""

from __future__ import annotations


class OwnTime:
    """Seconds on the clock of one loop, from ``now`` on.

    Of a longer time between two readings only ``longest`` counts: the process was stopped, or had no core, or another thread
    kept the interpreter. What came meanwhile waits in the socket, and is handled before it counts as missing.
    """

    def __init__(self, now: float) -> None:
        self._seconds = self._read_at = now

    def read(self, now: float, longest: float) -> float:
        self._seconds += min(max(0.0, now - self._read_at), longest)
        self._read_at = now
        return self._seconds
