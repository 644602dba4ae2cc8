"""Ranks that live on when the command that started them has failed or was killed. Pure, the clock passed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..core.rank import Rank, describe_several
from .saves import Holding

LAST_BEATS = 0.5
"""Seconds after the end of the command in which beats may still arrive that were sent before it."""

ABORT_MARGIN = 2.0
"""Seconds after a rank's grace in which its end is seen."""


@dataclass(slots=True)
class Orphans:
    """``lost_after`` and ``grace`` are in seconds: the silence after which a rank is lost, and from an abort to its end."""

    lost_after: float
    grace: float
    _ended_at: float | None = None
    """When the command ended."""

    def begin(self, now: float) -> None:
        self._ended_at = now

    def look(self, running: Iterable[Rank]) -> str:
        """What to say of ranks that beat after the command has ended, and so did not end with it; empty: there are none."""
        if self._ended_at is None:
            return ""
        since = self._ended_at + LAST_BEATS
        orphans = [rank for rank in running if rank.connected and rank.heard_at > since]
        return f"the command has ended, and {describe_several(orphans)} still training" if orphans else ""

    def are_awaited(self, running: Iterable[Rank], aborted_at: float | None, holding: Holding, now: float) -> bool:
        """Whether ranks may be heard yet; once they are aborted: whether they may be on their way to their end."""
        if self._ended_at is None:
            return False
        until = self._ended_at + LAST_BEATS + self.lost_after
        if aborted_at is not None:
            until = holding.free_at(aborted_at) + self.grace + ABORT_MARGIN
        return now < until and any(rank.connected for rank in running)
