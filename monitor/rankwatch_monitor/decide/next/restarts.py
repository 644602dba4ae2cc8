"""Whether ``rankwatch run --max-restarts`` starts its command again. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from rankwatch.shared.types.action import RESTARTS, Action

from ..core.report import End, Report
from .next_action import Advice, next_action

ALIKE = 3
"""So many ends in a row in one place show that it does not end there by chance. After two, it may be."""

ABOUT = 1
"""Batches: where a rank was when it was killed is known by its last beat. Which rank is lost first may be chance, too."""


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
    _places: tuple[int, ...] = ()
    """After how many batches it ended."""

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
        if advice.action in RESTARTS and self._ends_where_it_did(report.batches):
            times = f"it ended there {ALIKE} times in a row, after {report.batches} batches: a restart repeats it"
            advice = Advice(Action.STOP, f"{advice.reason}; but {times}")
        said = f"{advice.action.value}: {advice.reason}"
        if advice.action not in RESTARTS:
            return Next(False, f"not started again, {said}")
        if self.count >= self.most:
            return Next(False, f"not started again, as it was {_times(self.count)} already; {said}")
        self.count += 1
        here = _HERE.format(", ".join(advice.hosts)) if advice.action is Action.RESTART_ELSEWHERE else ""
        return Next(True, f"started again ({self.count} of {self.most}), {said}{here}", advice)

    def _ends_where_it_did(self, batches: int) -> bool:
        self._places = (*self._places, batches)[-ALIKE:]
        return len(self._places) == ALIKE and max(self._places) - min(self._places) <= ABOUT


_HERE = "; the same command starts here, which leaves out {0} only if it heeds RANKWATCH_HOSTS"


def _decisive(ended: Collection[Report]) -> tuple[Advice | None, Report]:
    """What is against a restart decides. A run that ended because of another one says nothing."""
    told = [(next_action(report), report) for report in ended if report.end is not End.SIBLING]
    told = told or [(next_action(report), report) for report in ended]
    return min(told, key=lambda one: one[0] is None or one[0].action in RESTARTS) if told else (None, next(iter(ended)))


def _times(count: int) -> str:
    return f"{count} time{'s' * (count != 1)}"
