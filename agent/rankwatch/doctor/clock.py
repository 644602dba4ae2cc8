"""How far a rank's clock is from rank 0's, asked as NTP does. Four stamps: asked, heard, answered, received."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .finding import Finding, ok, warn

QUESTIONS = 5
FAR = 1.0
"""Seconds from which on logs of different hosts can no longer be laid side by side."""


class Stamps(NamedTuple):
    """``asked`` and ``received`` by the clock of the one who asks, ``heard`` and ``answered`` by the other's."""

    asked: float
    heard: float
    answered: float
    received: float

    @property
    def offset(self) -> float:
        """Seconds by which the asker's clock is ahead; true to half the delay."""
        return -((self.heard - self.asked) + (self.answered - self.received)) / 2

    @property
    def delay(self) -> float:
        return (self.received - self.asked) - (self.answered - self.heard)


def judge(exchanges: Iterable[Stamps]) -> Finding:
    """The exchange with the smallest delay tells most."""
    best = min(exchanges, key=lambda stamps: stamps.delay)
    ahead = "ahead of" if best.offset >= 0 else "behind"
    found = f"{abs(best.offset):.3f} s {ahead} rank 0's, within {max(best.delay / 2, 0.001):.3f} s"
    if abs(best.offset) > FAR:
        return warn("clock", found, "set the host's clock (chronyc tracking, timedatectl): times in logs do not compare")
    return ok("clock", found, offset=best.offset)
