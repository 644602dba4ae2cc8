"""What the collector's threads let others read: immutable values that are replaced, so that nobody waits for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ...decide.effects import Show
from ...decide.report import Outcome

KEPT_OVER, KEPT_FOR = 16, 900.0
"""So many runs that are over are still told of, each for so many seconds."""

LOOK_BACK, STEP = 60.0, 5.0
"""Seconds over which the worst headroom is told, and in which steps."""

Lows: TypeAlias = tuple[tuple[float, float], ...]
"""The least headroom of each of the last steps of time, the newest last; each with when it began."""


class LoopCounts(NamedTuple):
    """What the collector's loop has counted since it began, and what waits now: ``put_off`` for the loop, ``unwritten`` for
    the disk, both bytes of batches."""

    messages: int = 0
    bytes: int = 0
    refused: int = 0
    put_off: int = 0
    unwritten: int = 0


class Gauged(NamedTuple):
    """A run as it was last shown, so many seconds ago; ``headroom`` in doublings, None where it is not known."""

    shown: Show
    age: float
    headroom: float | None


class Readout(NamedTuple):
    """Everything at one moment; ``age`` is seconds since the collector's loop last turned."""

    runs: Sequence[Gauged] = ()
    counts: LoopCounts = LoopCounts()
    ended: Mapping[Outcome, int] = {}
    age: float = 0.0


class Meters:
    """Each method but ``read`` is called by one thread only: ``headroom`` by the recorder's, the others by the loop's.

    Args:
        now: when the loop began. All times are seconds of the one clock.
    """

    def __init__(self, now: float) -> None:
        self._shown: dict[str, tuple[Show, float]] = {}
        self._lows: dict[str, Lows] = {}
        self._counts = (LoopCounts(), now)
        self._ended: Mapping[Outcome, int] = {}

    def show(self, shown: Show, now: float) -> None:
        """Takes what there is to know of a run, in place of what was shown of it before."""
        self._shown[shown.run] = (shown, now)
        if shown.standing.over:
            outcome = shown.standing.outcome or Outcome.FINISHED
            self._ended = {**self._ended, outcome: self._ended.get(outcome, 0) + 1}
            self._forget_old_runs(now)

    def count(self, counts: LoopCounts, now: float) -> None:
        """Takes the loop's counts, at each of its turns."""
        self._counts = (counts, now)

    def headroom(self, run: str, doublings: float, now: float) -> None:
        """Takes the least headroom of some batches of a run."""
        if run in self._shown:
            self._lows[run] = with_low(self._lows.get(run, ()), doublings, now)

    def read(self, now: float) -> Readout:
        """Callable from any thread."""
        lows = self._lows.copy()
        counts, turned_at = self._counts
        runs = [
            Gauged(shown, now - at, least(lows.get(run, ()), now))
            for run, (shown, at) in self._shown.copy().items()
            if not shown.standing.over or now - at <= KEPT_FOR
        ]
        return Readout(runs, counts, self._ended, max(0.0, now - turned_at))

    def _forget_old_runs(self, now: float) -> None:
        over = sorted((at, run) for run, (each, at) in self._shown.items() if each.standing.over)
        kept = {run for at, run in over[-KEPT_OVER:] if now - at <= KEPT_FOR}
        for _, run in over:
            if run not in kept:
                del self._shown[run]
        for run in self._lows.copy().keys() - self._shown.keys():
            del self._lows[run]


def with_low(lows: Lows, value: float, now: float) -> Lows:
    """``lows`` with one more value; of what is too old to matter only the newest is kept, should nothing else come."""
    *before, last = lows or ((float("-inf"), 0.0),)
    if now - last[0] < STEP:
        return (*before, (last[0], min(last[1], value)))
    return (*[low for low in lows if now - low[0] <= LOOK_BACK], (now, value))


def least(lows: Lows, now: float) -> float | None:
    """The least of the last LOOK_BACK seconds, or of the last step in which there was any."""
    recent = [value for at, value in lows if now - at <= LOOK_BACK] or [value for _, value in lows[-1:]]
    return min(recent, default=None)
