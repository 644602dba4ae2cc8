"""Whether ``rankwatch run --max-restarts`` starts its command again. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from rankwatch.shared.types.action import RESTARTS, Action

from ..core.report import End, RankState, Report
from .next_action import Advice, next_action

ALIKE = 3
"""So many ends in a row in one way show that it does not end so by chance. After two, it may be."""

ABOUT = 1
"""Batches: where a rank was when it was killed is known by its last beat."""


class Way(NamedTuple):
    """How a run ended: which ranks were the first, and after how many batches."""

    end: End
    ranks: tuple[int, ...]
    batches: int

    def is_like(self, other: Way) -> bool:
        return self[:2] == other[:2] and abs(self.batches - other.batches) <= ABOUT


class Next(NamedTuple):
    """Whether the command starts again, upon which advice, and why or why not; empty: there is nothing to say."""

    again: bool
    text: str = ""
    advice: Advice | None = None


@dataclass(slots=True)
class Restarts:
    """At most ``most`` restarts, of which there were ``count``."""

    most: int
    count: int = 0
    _ways: tuple[Way, ...] = ()

    def after(self, code: int, signal: str, ended: Collection[Report]) -> Next:
        """The command has ended with this exit code.

        Args:
            signal: a signal that this process was sent; empty: none.
            ended: the last run of each of its models.
        """
        if not code or not self.most:
            return Next(False)
        if signal:
            return Next(False, f"not started again: {signal} has stopped it")
        if not ended:
            return Next(False, "not started again: no rank connected, so nothing says that a restart would help")
        advice, report = _decisive(ended)
        if advice is None:
            return Next(False, f"not started again: the run finished, and then the command ended with exit code {code}")
        if advice.action in RESTARTS and self._ends_like_before(report):
            times = f"it ended in this way {ALIKE} times in a row, after {report.batches} batches: a restart repeats it"
            advice = Advice(Action.STOP, f"{advice.reason}; but {times}")
        said = f"{advice.action.value}: {advice.reason}"
        if advice.action not in RESTARTS:
            return Next(False, f"not started again, {said}")
        if self.count >= self.most:
            return Next(False, f"not started again, as it was {_times(self.count)} already; {said}")
        self.count += 1
        here = _HERE.format(", ".join(advice.hosts)) if advice.action is Action.RESTART_ELSEWHERE else ""
        return Next(True, f"restart {self.count} of {self.most}, {said}{here}", advice)

    def _ends_like_before(self, report: Report) -> bool:
        way = Way(report.end, _first_ranks(report), report.batches)
        self._ways = (*self._ways, way)[-ALIKE:]
        return len(self._ways) == ALIKE and all(one.is_like(way) for one in self._ways)


_HERE = "; the same command starts here, which leaves out {0} only if it heeds RANKWATCH_HOSTS"


def _decisive(ended: Collection[Report]) -> tuple[Advice | None, Report]:
    """What is against a restart decides. A run that ended because of another one says nothing."""
    told = [(next_action(report), report) for report in ended if report.end is not End.SIBLING]
    told = told or [(next_action(report), report) for report in ended]
    return min(told, key=lambda one: one[0] is None or one[0].action in RESTARTS) if told else (None, next(iter(ended)))


def _first_ranks(report: Report) -> tuple[int, ...]:
    if report.end is End.STALL and report.stall is not None:
        return report.stall.ranks
    gone = [row for row in report.ranks if row.state in (RankState.LOST, RankState.FAILED)]
    return tuple(row.rank for row in sorted(gone, key=lambda row: row.left)[:1])


def _times(count: int) -> str:
    return f"{count} time{'s' * (count != 1)}"
