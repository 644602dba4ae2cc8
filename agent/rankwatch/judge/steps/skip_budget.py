"""How many steps may be left out. All ranks leave out the same steps, so each of them counts alike, without a message."""

from __future__ import annotations

from collections import deque

from ...shared.types.bad_step import OnBadStep


class SkipBudget:
    """At most ``allowed.most`` steps of the last ``allowed.of`` are left out. Steps are numbered as they come, from 0 on."""

    def __init__(self, allowed: OnBadStep) -> None:
        self._allowed = allowed
        self._spent: deque[int] = deque()

    def left(self, step: int) -> int:
        """How many steps may still be left out, from this one on."""
        while self._spent and self._spent[0] <= step - self._allowed.of:
            self._spent.popleft()
        return self._allowed.most - len(self._spent)

    def spend(self, step: int) -> bool:
        """Whether this step may be left out; then it counts."""
        if self.left(step) <= 0:
            return False
        self._spent.append(step)
        return True

    def __str__(self) -> str:
        return f"{self._allowed.most} of the last {self._allowed.of} steps were left out, as many as {self._allowed} allows"
