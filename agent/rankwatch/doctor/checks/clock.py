"""The offset between a rank's clock and rank 0's, measured as NTP does, from four timestamps of one exchange."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..result import CheckResult, ok, warn

QUESTIONS = 5
FAR = 1.0
"""Seconds of offset above which the times in the logs of two hosts cannot be compared."""


class Stamps(NamedTuple):
    """The rank's clock gives ``asked`` and ``received``, rank 0's gives ``heard`` and ``answered``."""

    asked: float
    heard: float
    answered: float
    received: float

    @property
    def offset(self) -> float:
        """Seconds by which the rank's clock is ahead of rank 0's; the error is at most half the delay."""
        return -((self.heard - self.asked) + (self.answered - self.received)) / 2

    @property
    def delay(self) -> float:
        return (self.received - self.asked) - (self.answered - self.heard)


def judge(exchanges: Iterable[Stamps]) -> CheckResult:
    """Judges the exchange with the smallest delay, because its offset is the most exact."""
    best = min(exchanges, key=lambda stamps: stamps.delay)
    ahead = "ahead of" if best.offset >= 0 else "behind"
    found = f"{abs(best.offset):.3f} s {ahead} rank 0's, within {max(best.delay / 2, 0.001):.3f} s"
    if abs(best.offset) > FAR:
        return warn("clock", found, "set the host's clock (chronyc tracking, timedatectl): times in logs do not compare")
    return ok("clock", found, offset=best.offset)
