"""How a run ends: one table of rules, and the function that applies the table to what happens. Pure, the clock passed in.

What is decided first is the outcome, except: after a trip the election alone decides; a rank that died explains why another
one failed; a signal that ends the whole job explains why ranks failed or were lost just before. Ranks that were absent are
added to the reason of a failure. ``ending_desk.py`` carries out the decisions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..core.journal import Decided
from ..core.report import End, Outcome

JUST_BEFORE = 2.0
"""Seconds: a signal that ends a whole job reaches the ranks and the collector at one moment, but in any order."""


EXCUSED = 30.0
"""Seconds after a signal in which ranks may fail because of it while others still end: as long as torchrun gives its ranks."""


class Incident(enum.Enum):
    """What happens to a run and bears on its end. Each comes with a text."""

    TRIPPED = enum.auto()
    """The election begins."""
    ELECTED = enum.auto()
    RANK_FAILED = enum.auto()
    RANKS_LOST = enum.auto()
    ORPHANED = enum.auto()
    """What started the ranks has ended, and they train on."""
    OUTLIVED = enum.auto()
    """Time has passed, and ranks run on."""
    RANK_DIED = enum.auto()
    """A lost rank had not acknowledged the abort."""
    RANKS_ABSENT = enum.auto()
    """The first rank to fail had waited for these."""
    RANK_RETURNED = enum.auto()
    """A lost rank has connected again."""
    DESYNCED = enum.auto()
    """Replicas that must be equal are not, and the options say that this ends the run."""
    BEYOND_HELP = enum.auto()
    """A step was left out, and this does not help."""
    STALLED = enum.auto()
    """And the options say that a stall ends the run."""
    SIBLING_STOPPED = enum.auto()
    """The run (the text) of another model of the same processes has stopped them."""
    RANK_STOPPED = enum.auto()
    """A rank ended by an abort that is not this run's."""
    LIMIT_REACHED = enum.auto()
    """A rank stopped after the batch that was asked for."""
    JOB_INTERRUPTED = enum.auto()
    """A signal (the text) is ending the job's command."""
    JOB_STOPPED = enum.auto()
    """The job's command has ended by that signal."""
    JOB_FAILED = enum.auto()
    """The job's command has ended with an exit code (the text) that no rank explains."""
    RELAUNCHED = enum.auto()
    """All ranks are silent and cut off, and a later start of the job has connected."""
    COLLECTOR_ENDED = enum.auto()
    """While ranks were running."""
    UNUSED = enum.auto()
    """No rank has trained the model, while each has trained another one."""
    ALL_ENDED = enum.auto()
    """No rank runs any more. The text names the rank that was lost first, if one was."""


class Situation(enum.Enum):
    """Of a run without an outcome."""

    OPEN = enum.auto()
    INTERRUPTED = enum.auto()
    """A signal is ending the job: ranks that fail or are lost now do so because of the signal."""
    ELECTION = enum.auto()


class Then(enum.Enum):
    """What follows from a decision."""

    END = enum.auto()
    """Nothing: the ranks have ended, or an abort is under way."""
    ABORT = enum.auto()
    """Every rank is sent an abort."""
    ABORT_OR_WAIVE = enum.auto()
    """Abort; with ``--on-lost wait`` the others run on instead, and this is the outcome once all have ended."""
    REOPEN = enum.auto()
    """The run has no outcome any more."""


class Rule(NamedTuple):
    """An incident, in one of these situations and where ``only`` holds, gives the outcome and the reason (a format).

    ``end`` is why it ended, where the outcome does not say so.
    """

    incident: Incident
    situations: frozenset[Situation | Outcome]
    outcome: Outcome | None
    reason: str
    then: Then = Then.END
    only: Callable[[Ending, str, float], object] = lambda e, text, now: True
    end: End | None = None

    @property
    def why(self) -> End:
        return self.end or _ENDS[self.outcome or Outcome.FINISHED]


_OPEN = frozenset({Situation.OPEN})
_INTERRUPTED = frozenset({Situation.INTERRUPTED})
_UNDER_WAY = _OPEN | _INTERRUPTED
_ELECTION = frozenset({Situation.ELECTION})
_UNDECIDED = frozenset(Situation)
_FAILED = frozenset({Outcome.FAILED})
_BY_A_RANK = frozenset({Outcome.FAILED, Outcome.LOST})
_DECIDED = frozenset(Outcome)

_ENDS = {
    Outcome.FINISHED: End.FINISHED,
    Outcome.ABORTED: End.SIGNAL,
    Outcome.FAILED: End.FAILED,
    Outcome.LOST: End.LOST,
    Outcome.STALLED: End.STALL,
}

_OF_SIBLING = "run {sibling} of the same processes was stopped"

_EXCUSABLE = {Incident.RANK_FAILED: Outcome.FAILED, Incident.RANKS_LOST: Outcome.LOST}

# The first rule that holds decides; where none holds, nothing changes.
RULES = (
    Rule(Incident.ELECTED, _ELECTION, Outcome.ABORTED, "{text}", Then.ABORT, end=End.VERDICT),
    Rule(
        Incident.RANK_STOPPED, _OPEN, Outcome.ABORTED, _OF_SIBLING, Then.ABORT, only=lambda e, text, now: e.sibling,
        end=End.SIBLING,
    ),
    *(
        Rule(
            incident, _OPEN, Outcome.ABORTED, _OF_SIBLING, Then.ABORT, only=lambda e, text, now: e.follows_sibling(now),
            end=End.SIBLING,
        )
        for incident in (Incident.RANK_FAILED, Incident.RANKS_LOST)
    ),
    Rule(Incident.RANK_FAILED, _OPEN, Outcome.FAILED, "{text}", Then.ABORT_OR_WAIVE),
    Rule(Incident.RANKS_LOST, _OPEN, Outcome.LOST, "{text}", Then.ABORT_OR_WAIVE),
    # A signal that not all ranks have obeyed: the others must not wait for ever for those that have.
    Rule(
        Incident.OUTLIVED, _INTERRUPTED, Outcome.FAILED, "{excused}", Then.ABORT_OR_WAIVE,
        only=lambda e, text, now: e.is_outlived(Outcome.FAILED, now),
    ),
    Rule(
        Incident.OUTLIVED, _INTERRUPTED, Outcome.LOST, "{excused}", Then.ABORT_OR_WAIVE,
        only=lambda e, text, now: e.is_outlived(Outcome.LOST, now),
    ),
    Rule(Incident.ORPHANED, _OPEN, Outcome.LOST, "{text}", Then.ABORT),
    Rule(Incident.ORPHANED, _INTERRUPTED, Outcome.ABORTED, "stopped by {signal}", Then.ABORT),
    Rule(Incident.DESYNCED, _UNDER_WAY, Outcome.ABORTED, "{text}", Then.ABORT, end=End.DESYNC),
    Rule(Incident.BEYOND_HELP, _UNDER_WAY, Outcome.ABORTED, "{text}", Then.ABORT, end=End.VERDICT),
    Rule(Incident.STALLED, _UNDER_WAY, Outcome.STALLED, "{text}", Then.ABORT),
    Rule(Incident.JOB_STOPPED, _UNDER_WAY, Outcome.ABORTED, "stopped by {text}"),
    Rule(
        Incident.JOB_FAILED, _OPEN, Outcome.ABORTED, _OF_SIBLING, only=lambda e, text, now: e.follows_sibling(now),
        end=End.SIBLING,
    ),
    Rule(Incident.JOB_FAILED, _UNDER_WAY, Outcome.FAILED, "the command ended with exit code {text}", end=End.COMMAND),
    # Not an abort: if the network was cut, and its ranks return, they belong to another job of this name, and train on.
    Rule(Incident.RELAUNCHED, _UNDER_WAY, Outcome.LOST, "{text}", end=End.RELAUNCHED),
    Rule(
        Incident.COLLECTOR_ENDED, _UNDER_WAY, Outcome.LOST, "the collector was ended while the run went on",
        end=End.UNWATCHED,
    ),
    # These replace an earlier decision. The rank that died is the cause: another one failed because of it.
    Rule(Incident.RANK_DIED, _FAILED, Outcome.LOST, "{text}; then {reason}"),
    Rule(Incident.RANKS_ABSENT, _FAILED, Outcome.FAILED, "{reason}; {text}"),
    Rule(Incident.RANKS_ABSENT, frozenset({Outcome.LOST}), Outcome.LOST, "{reason}; {text}"),
    Rule(
        Incident.JOB_INTERRUPTED, _BY_A_RANK, Outcome.ABORTED, "stopped by {text}; just before, {reason}",
        only=lambda e, text, now: now - e.decided_at <= JUST_BEFORE,
    ),
    # The network was cut, and the ranks never noticed.
    Rule(
        Incident.RANK_RETURNED, _DECIDED, None, "", Then.REOPEN,
        only=lambda e, text, now: not e.aborts and not e.is_tripped,
    ),
    Rule(Incident.UNUSED, _OPEN, Outcome.FINISHED, "{text}"),
    # All ranks have ended, and nothing is decided.
    Rule(Incident.ALL_ENDED, _UNDECIDED, Outcome.ABORTED, "{limit}", only=lambda e, text, now: e.limit, end=End.LIMIT),
    Rule(Incident.ALL_ENDED, _UNDECIDED, Outcome.FAILED, "{waived}", only=lambda e, text, now: e.waives(Outcome.FAILED)),
    Rule(
        Incident.ALL_ENDED, _UNDECIDED, Outcome.LOST, "{waived}",
        only=lambda e, text, now: e.waives(Outcome.LOST) and text,
    ),
    Rule(
        Incident.ALL_ENDED, _OPEN, Outcome.ABORTED, _OF_SIBLING,
        only=lambda e, text, now: text and e.follows_sibling(now), end=End.SIBLING,
    ),
    # Ranks that obeyed the signal have not finished, however they said goodbye.
    Rule(Incident.ALL_ENDED, _INTERRUPTED, Outcome.ABORTED, "stopped by {signal}"),
    Rule(Incident.ALL_ENDED, _UNDECIDED, Outcome.LOST, "{text}", only=lambda e, text, now: text),
    Rule(Incident.ALL_ENDED, _UNDECIDED, Outcome.FINISHED, "{left_out}"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ends, as far as that is decided, and what has happened that bears on its end."""

    decided: Decided | None = None
    decided_at: float = float("-inf")
    aborts: bool = False
    """Whether an abort was ever decided: it is not taken back."""
    is_tripped: bool = False
    signal: str = ""
    """The signal that is ending the job."""
    signal_at: float = float("-inf")
    excused: Decided | None = None
    """The first failure or loss after the signal: it may be the signal's doing."""
    sibling: str = ""
    """The run of another model of the same processes that has stopped them."""
    sibling_at: float = float("-inf")
    limit: str = ""
    """Why a rank stopped after the batch that was asked for."""
    waived: Decided | None = None
    """The first failure or loss that did not stop the others."""
    left_out: str = ""
    """Which steps were left out."""

    @property
    def outcome(self) -> Outcome | None:
        return None if self.decided is None else self.decided.outcome

    @property
    def reason(self) -> str:
        return "" if self.decided is None else self.decided.reason

    @property
    def situation(self) -> Situation | Outcome:
        if self.decided is not None:
            return self.decided.outcome
        if self.is_tripped:
            return Situation.ELECTION
        return Situation.INTERRUPTED if self.signal else Situation.OPEN

    @property
    def is_open(self) -> bool:
        """Whether something else than an election can still decide how the run ends."""
        return self.decided is None and not self.is_tripped

    def waives(self, outcome: Outcome) -> bool:
        return self.waived is not None and self.waived.outcome is outcome

    def is_outlived(self, outcome: Outcome, now: float) -> bool:
        is_meant = self.excused is not None and self.excused.outcome is outcome
        return is_meant and self.waived is None and now - self.signal_at > EXCUSED

    def follows_sibling(self, now: float) -> bool:
        """Whether what ranks do now follows from the abort of the other run."""
        return bool(self.sibling) and now - self.sibling_at <= EXCUSED

    @property
    def is_by_sibling(self) -> bool:
        """Whether the run was itself only stopped because of the other one."""
        return bool(self.sibling) and self.reason == _OF_SIBLING.format(sibling=self.sibling)

    def decide_as(self, decided: Decided, now: float) -> Ending:
        return replace(self, decided=decided, decided_at=now, aborts=self.aborts or decided.abort)


def decide(ending: Ending, incident: Incident, text: str, now: float, *, abort_on_lost: bool) -> Ending:
    """How the run ends after this incident; ``decided`` is the same object where the incident decides nothing."""
    ending = _note(ending, incident, text, now)
    rule = next((rule for rule in RULES if _holds(rule, ending, incident, text, now)), None)
    if rule is None:
        return ending
    if rule.outcome is None:
        return replace(ending, decided=None, waived=None)
    waived = ending.waived.reason if ending.waived is not None else ""
    excused = ending.excused.reason if ending.excused is not None else ""
    reason = rule.reason.format(
        text=text,
        reason=ending.reason,
        limit=ending.limit,
        left_out=ending.left_out,
        waived=waived,
        excused=excused,
        signal=ending.signal,
        sibling=ending.sibling,
    )
    if rule.then is Then.ABORT_OR_WAIVE and not abort_on_lost:
        return replace(ending, waived=ending.waived or Decided(rule.outcome, reason, False, rule.why))
    return ending.decide_as(Decided(rule.outcome, reason, rule.then is not Then.END, rule.why), now)


def _note(ending: Ending, incident: Incident, text: str, now: float) -> Ending:
    if incident is Incident.TRIPPED:
        return replace(ending, is_tripped=True)
    if incident is Incident.JOB_INTERRUPTED:
        return replace(ending, signal=text, signal_at=now)
    if incident is Incident.SIBLING_STOPPED:
        return replace(ending, sibling=text, sibling_at=now)
    if incident in _EXCUSABLE and ending.signal:
        return replace(ending, excused=ending.excused or Decided(_EXCUSABLE[incident], text, False))
    return replace(ending, limit=text) if incident is Incident.LIMIT_REACHED else ending


def _holds(rule: Rule, ending: Ending, incident: Incident, text: str, now: float) -> bool:
    return rule.incident is incident and ending.situation in rule.situations and bool(rule.only(ending, text, now))
