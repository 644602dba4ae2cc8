"""Steps that were left out: what is known of each, in words, and when leaving out no longer helps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.trip import Trip
from rankwatch.shared.words.text import name_spans

from .began import TripOrigin
from .verdict import Verdict

MOST_OF_OPERATOR = 3
"""The step at which one operator of one line is bad for this time ends the run: a loader meets a bad file, a fault stays."""

MOST_OF_MACHINE = 2
"""As above, of faults of one machine that did not recur: one may be a cosmic ray."""

MOST_KEPT = 256
"""Steps that are told one by one: the last ones. Each has the last frames of its trip."""

MOST_PLACES = 1024
"""Operators and machines that are remembered."""

TOLD = 8
"""Steps that a sentence names."""

StepKey: TypeAlias = tuple[int, int]
"""An optimizer step, and which bad step it is of those with this number: a step that a loss scaler leaves out is not counted."""


def is_left_out(trip: Trip) -> bool:
    """Whether the step of this trip was left out, and the rank trains on."""
    return trip.left_out is not None and not trip.left_out.refused


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that was left out, with the verdict on what was bad in it. ``closeup`` and ``origin``: as those of a report.

    ``restored`` are the buffers that were put back, and ``budget_left`` is how many steps may still be left out, of ``most`` in
    ``of`` steps. ``frames_in_batch``: of the culprit's batch; None: not known. ``stops``: why leaving it out does not help, so
    that it ends the run; empty: the run goes on.
    """

    step: int
    verdict: Verdict
    closeup: CloseUp | None = None
    restored: tuple[str, ...] = ()
    budget_left: int = 0
    most: int = 0
    of: int = 0
    frames_in_batch: int | None = None
    stops: str = ""
    origin: TripOrigin | None = None

    @property
    def batch(self) -> int:
        return self.verdict.trip.position.batch

    @property
    def brief(self) -> str:
        """``batch 14 (rank 1, layers.2: overflow)``."""
        verdict, spec = self.verdict, self.verdict.trip.frame.spec
        who = f"rank {verdict.tripped}"
        if verdict.rank is None or verdict.alike:
            who = name_spans(verdict.alike) if verdict.alike else "all ranks"
        return f"batch {self.batch} ({who}, {spec.module or spec.module_class}: {verdict.cause.value})"

    @property
    def left(self) -> str:
        """``1 more of 3 in 128 steps may be left out``."""
        return f"{self.budget_left or 'no'} more of {self.most} in {self.of} steps may be left out" if self.of else ""


def count_steps(count: int) -> str:
    """``2 steps were left out``."""
    return f"{count} step{'s were' if count != 1 else ' was'} left out"


def refusal(verdict: Verdict) -> str:
    """Why its step could not be left out; empty: that was not tried."""
    told = [trip.left_out.refused for _, trip in verdict.all_tripped if trip.left_out is not None]
    return next(filter(None, told), "")


def tell_all(skipped: Sequence[SkippedStep], count: int) -> str:
    """``2 steps were left out: batch 14 (...), batch 20 (...)``; of ``count`` steps these are the last. Empty without any."""
    if not count:
        return ""
    shown = skipped[-TOLD:]
    more = f"{count - len(shown)} before, and " if count > len(shown) else ""
    return f"{count_steps(count)}: {more}{', '.join(one.brief for one in shown)}"


def left_of(trips: Sequence[Trip]) -> tuple[tuple[str, ...], int, int, int]:
    """What the ranks say of one step that was left out: the buffers that were put back, and the budget."""
    told = [trip.left_out for trip in trips if trip.left_out is not None]
    restored = tuple(dict.fromkeys(name for one in told for name in one.restored))
    least = min(told, key=lambda one: one.budget_left)
    return restored, least.budget_left, least.most, least.of


@dataclass(slots=True)
class Repeats:
    """Which operators and machines were bad before, in which steps."""

    _of_operators: BoundedDict[tuple[str, ...], list[int]] = field(default_factory=lambda: BoundedDict(MOST_PLACES))
    _of_machines: BoundedDict[tuple[str, ...], list[int]] = field(default_factory=lambda: BoundedDict(MOST_PLACES))

    def take(self, one: SkippedStep, machine: tuple[str, str]) -> None:
        """``machine``: host and GPU of its rank."""
        for places, key in ((self._of_operators, _operator_of(one)), (self._of_machines, _machine_of(one, machine))):
            if key:
                places[key] = [*places.pop(key, [])[-TOLD:], one.step]

    def why_not(self, one: SkippedStep, machine: tuple[str, str]) -> str:
        """Why leaving out steps does not help, by this step and those taken before; empty: it may."""
        operator, same = _operator_of(one), _machine_of(one, machine)
        steps = [*self._of_operators.get(operator, []), one.step]
        if operator and len(steps) >= MOST_OF_OPERATOR:
            module, title, where = operator
            at = f"at {where}" if where else f"in {module or 'the model'}"
            return f"{title} {at} for the {_ordinal(len(steps))} time: steps {_list(steps)} were left out"
        steps = [*self._of_machines.get(same, []), one.step]
        if same and one.closeup is not None and len(steps) >= MOST_OF_MACHINE:
            times = f"for the {_ordinal(len(steps))} time on {one.closeup.machine or machine[0]}"
            return f"a fault that did not recur, {times}: steps {_list(steps)} were left out; train without this machine"
        return ""


def _operator_of(one: SkippedStep) -> tuple[str, ...]:
    """The module, the operator and the line that made the bad number; empty: not known."""
    trip = one.verdict.trip
    operator = (one.closeup.operator if one.closeup is not None else None) or trip.operator
    if operator is None:
        return ()
    source = operator.source
    where = f"{source.file}:{source.line}" if source is not None else ""
    return operator.module or trip.frame.spec.module, operator.title, where


def _machine_of(one: SkippedStep, machine: tuple[str, str]) -> tuple[str, ...]:
    """The machine on which a fault did not recur; empty: there is no such fault of a single rank."""
    verdict, closeup = one.verdict, one.closeup
    is_single = verdict.rank is not None and not verdict.alike and not verdict.trip.unfound
    return machine if closeup is not None and closeup.of and not closeup.recurred and is_single else ()


def _list(steps: Sequence[int]) -> str:
    return f"{', '.join(map(str, steps[:-1]))} and {steps[-1]}"


def _ordinal(count: int) -> str:
    return {2: "second", 3: "third"}.get(count, f"{count}th")
