"""How much one side may make the other one do: a token bucket. Pure: the time is passed in."""

from __future__ import annotations


class Allowance:
    """``rate`` per second, of which up to ``burst`` is saved. It may be overdrawn, by the last thing that was begun."""

    __slots__ = ("_at", "_burst", "_rate", "_saved")

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._saved = burst
        self._at = 0.0

    def left(self, now: float) -> float:
        """The share of the burst that is left, at most 1; below 0 it is overdrawn."""
        self._saved = min(self._burst, self._saved + self._rate * max(0.0, now - self._at))
        self._at = max(self._at, now)
        return self._saved / self._burst

    def has(self, now: float, amount: float = 1.0) -> bool:
        """Whether this much is there."""
        return self.left(now) * self._burst >= amount

    def spend(self, amount: float) -> None:
        self._saved -= amount

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Spends an amount if it is there; returns whether it was."""
        if not self.has(now, amount):
            return False
        self.spend(amount)
        return True
