"""What other threads may read of the collector: immutable values that are replaced, so that the collector waits for no reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ...decide.core.effects import Show
from ...decide.core.report import Outcome

MAX_OVER, SHOWN_FOR = 16, 900.0
"""Runs that are over and still have metrics: at most this many, each for this many seconds."""

LOOK_BACK, STEP = 60.0, 5.0
"""Seconds over which the least headroom is taken, and the step in which it moves on."""

Lows: TypeAlias = tuple[tuple[float, float], ...]
"""For each of the last steps, the newest last: when it began, and the least headroom in it."""


class LoopCounts(NamedTuple):
    """What the collector's loop has counted since it began, and the bytes of batches that wait now: ``put_off`` in the backlog,
    ``unwritten`` for the disk."""

    messages: int = 0
    bytes: int = 0
    refused: int = 0
    put_off: int = 0
    unwritten: int = 0


class Gauged(NamedTuple):
    """A run as it was last shown, ``age`` seconds ago; ``headroom`` in powers of two, None where it is not known."""

    shown: Show
    age: float
    headroom: float | None


class Readout(NamedTuple):
    """All meters at one moment; ``age``: seconds since the collector's loop last turned."""

    runs: Sequence[Gauged] = ()
    counts: LoopCounts = LoopCounts()
    ended: Mapping[Outcome, int] = {}
    age: float = 0.0


class Meters:
    """Each method but ``read`` is called by one thread only: ``headroom`` by the writer's, the others by the loop's.

    Args:
        now: when the loop began. All times are seconds of one monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._shown: dict[str, tuple[Show, float]] = {}
        self._lows: dict[str, Lows] = {}
        self._counts = (LoopCounts(), now)
        self._ended: Mapping[Outcome, int] = {}

    def show(self, shown: Show, now: float) -> None:
        """Takes a run's standings, in place of those before."""
        self._shown[shown.run] = (shown, now)
        if shown.standing.over:
            outcome = shown.standing.outcome or Outcome.FINISHED
            self._ended = {**self._ended, outcome: self._ended.get(outcome, 0) + 1}
            self._forget_old_runs(now)

    def count(self, counts: LoopCounts, now: float) -> None:
        """Takes the loop's counts, once a turn."""
        self._counts = (counts, now)

    def headroom(self, run: str, doublings: float, now: float) -> None:
        """Takes the least headroom of some batches of a run, in powers of two."""
        if run in self._shown:
            self._lows[run] = with_low(self._lows.get(run, ()), doublings, now)

    def read(self, now: float) -> Readout:
        """Callable from any thread."""
        lows = self._lows.copy()
        counts, turned_at = self._counts
        runs = [
            Gauged(shown, now - at, least(lows.get(run, ()), now))
            for run, (shown, at) in self._shown.copy().items()
            if not shown.standing.over or now - at <= SHOWN_FOR
        ]
        return Readout(runs, counts, self._ended, max(0.0, now - turned_at))

    def _forget_old_runs(self, now: float) -> None:
        over = sorted((at, run) for run, (each, at) in self._shown.items() if each.standing.over)
        still_shown = {run for at, run in over[-MAX_OVER:] if now - at <= SHOWN_FOR}
        for _, run in over:
            if run not in still_shown:
                del self._shown[run]
        for run in self._lows.copy().keys() - self._shown.keys():
            del self._lows[run]


def with_low(lows: Lows, value: float, now: float) -> Lows:
    """``lows`` with one more value, and without steps before LOOK_BACK."""
    *before, last = lows or ((float("-inf"), 0.0),)
    if now - last[0] < STEP:
        return (*before, (last[0], min(last[1], value)))
    return (*[low for low in lows if now - low[0] <= LOOK_BACK], (now, value))


def least(lows: Lows, now: float) -> float | None:
    """The least value of the last LOOK_BACK seconds; without any, that of the last step."""
    recent = [value for at, value in lows if now - at <= LOOK_BACK] or [value for _, value in lows[-1:]]
    return min(recent, default=None)
