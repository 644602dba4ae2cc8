"""The trips of a run: the election, its verdict, and what bears on it: how ranks count batches, and their losses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import Moment
from rankwatch.shared.types.trip import Trip
from rankwatch.shared.words.text import describe_culprit

from ..core.books import Books, Desk, Stop
from ..core.effects import Effect, SendAll
from ..core.journal import NO_RANK, Closed, Diverged, Entry, InTurn, Miscounted, Reached, Waited
from ..core.rank import Rank
from .divergence import LossHistories, blame_all
from .election import Election
from .skipped import count_steps, refusal
from .uneven import StepCounts
from .verdict import doubt, logical_time_of

_AHEAD: dict[str, type[messages.Sequenced]] = {kind.__name__: kind for kind in (messages.Tripped, messages.LookedCloser)}


@dataclass(slots=True)
class TripDesk(Desk):
    books: Books = field(repr=False)
    election: Election = field(init=False)
    losses: LossHistories = field(default_factory=LossHistories)
    counts: StepCounts = field(default_factory=StepCounts)
    _steps: set[int] = field(default_factory=set)
    """Those of the trips by which the run ends: of thousands of ranks, each trip asks for them."""
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self.election = Election(self.books.world_size, self.books.options.decision_window)

    @property
    def trips(self) -> int:
        """How many ranks tripped, so that the run ends."""
        return sum(rank.trip is not None for rank in self.books.ranks.values())

    # --- what ranks send ----------------------------------------------------------------------------------------------

    def ends_with(self, step: int) -> bool:
        """Whether a rank has tripped in this step, and did not leave it out."""
        return step in self._steps

    def expect(self, rank: Rank, trip: Trip, now: float, *, is_decided: bool, has_company: bool = False) -> None:
        """Before a trip is noted down: what it is judged by. ``is_decided``: whether it is known how the run ends.
        ``has_company``: trips of other ranks come with it."""
        if trip.position.batch >= 0 and not trip.position.eval:
            self.count(rank, trip.position.batch, trip.optimizer_step, now)
        if has_company or self._is_earliest(rank, trip, is_decided=is_decided):
            # Noted down alone: the ranks are there already, and the abort waits for this.
            self.books.note_down(now, moments_of(self.books.ranks.values()))

    def take(
        self, rank: Rank, trip: Trip, now: float, *, is_decided: bool, company: Collection[Rank] = ()
    ) -> Iterator[Effect]:
        """``company``: ranks that had left out this step; their trips take part now."""
        rank.take_trip(trip, now)
        yield self.books.note(describe_culprit(rank.name, trip))
        times = []
        for one in (rank, *company):
            if one.trip is not None:
                self.election.trips[one.number] = one.trip
                self._steps.add(one.trip.optimizer_step)
                times.append(logical_time_of(one.trip, one.hello.stage))
        at = min(times, key=attrgetter("order"))
        if not is_decided and self.election.is_lowered_by(at):
            asked = self.election.aim(at, self.books.ranks, now)
            yield SendAll([other.peer for other in asked], messages.Probe(at.passed))

    def take_turn(self, rank: Rank, message: messages.Sequenced, now: float) -> None:
        """A message that went ahead comes in its turn."""
        if message.seq > rank.seq:
            self.books.find(now, InTurn(message.seq, type(message).__name__), rank.number)
            self._look_for_divergence(now)

    def note_answer(self, rank: Rank) -> bool:
        """Whether the election stops waiting for this rank now."""
        is_answer = self.election.has_answer(rank)
        if is_answer:
            self.books.find(rank.heard_at, moments_of([rank]), rank.number)
        return is_answer

    def count(self, rank: Rank, batch: int, step: int, now: float) -> None:
        if uneven := self.counts.take(rank.number, rank.hello.stage, batch, step):
            self.books.find(now, Miscounted(uneven))

    def leave(self, rank: Rank) -> None:
        self.note_answer(rank)

    # --- as time passes -----------------------------------------------------------------------------------------------

    def look(self, now: float, *, ended: bool, before: Callable[[int], int]) -> Iterator[Effect | Stop]:
        """Holds the election, which is due.

        Args:
            ended: no rank can report anything any more.
            before: how many steps were left out before a step.
        """
        ranks = self.books.ranks
        self.books.verdict, reason = self.election.hold(ranks, now, final=ended, uneven=self.counts.uneven)
        if self.books.verdict is None:
            return
        if not ended:
            self.books.note_down(now, Waited())
        self._look_for_divergence(now)
        verdict, trip = self.books.verdict, self.books.verdict.trip
        who = verdict.who(ranks[verdict.tripped].name)
        text = f"{describe_culprit(who, trip)} ({verdict.cause.value}: {verdict.evidence})"
        refused = f"the step could not be left out: {why}" if (why := refusal(verdict)) else ""
        earlier = f"{count_steps(count)} before" if (count := before(trip.optimizer_step)) else ""
        text = "; ".join(filter(None, (text, refused, earlier)))
        yield self.books.note(f"first {trip.culprit.state.name.lower()}: {text}; {reason}", logging.ERROR)
        yield Stop(text, NO_RANK if verdict.rank is None else verdict.rank, trip.time)

    def is_heard(self, now: float) -> bool:
        """Whether the verdict's rank, and those that tripped alike, have told all, or are late."""
        verdict, ranks = self.books.verdict, self.books.ranks
        if verdict is None:
            return True
        return not (
            ranks[verdict.tripped].owes_turn(now) or any(ranks[one].owes_closeup(now) for one in verdict.tripped_alike)
        )

    # --- findings -----------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> None:
        verdict = self.books.verdict
        match entry.fact:
            case Reached() as reached:
                for place, number in enumerate(reached.ranks):
                    moment, rank = reached.moments[place], self.books.ranks[number]
                    if moment > rank.progress:  # in a replay: a rank's beats, which moved it, are not in the record
                        rank.advance(Moment(*moment), rank.phase)
                    rank.reported_batch = max(rank.reported_batch, reached.reported[place])
                    if reached.settled:
                        rank.settle(reached.settled[place], *reached.first_of_step[place])
                if entry.rank != NO_RANK and not reached.of:
                    self.election.take_answer(entry.rank)
            case InTurn(seq, kind):
                rank = self.books.ranks[entry.rank]
                if kind in _AHEAD and rank.is_news(seq, is_recorded=True):
                    rank.take_turn(_AHEAD[kind])
            case Miscounted(text):
                # A trip may go ahead of batches, and its verdict come before those that tell how its ranks count.
                self.counts.uneven = text
                if verdict is not None and not self._is_closed:
                    self.books.verdict = doubt(verdict, text)
            case Diverged(found):
                if verdict is not None and verdict.divergence is None:
                    self.books.verdict = blame_all(verdict, found)
            case Closed():
                self._is_closed = True

    def _is_earliest(self, rank: Rank, trip: Trip, *, is_decided: bool) -> bool:
        return not is_decided and self.election.is_lowered_by(logical_time_of(trip, rank.hello.stage))

    def _look_for_divergence(self, now: float) -> None:
        """Trips that went ahead of their ranks' batches are looked at when these are here, and with them all losses."""
        verdict, ranks = self.books.verdict, self.books.ranks
        if self._is_closed or verdict is None:
            return
        if any(
            messages.Tripped in rank.ahead and (rank.is_running or rank.number == verdict.tripped) for rank in ranks.values()
        ):
            return
        if verdict.divergence is None and (divergence := self.losses.find(verdict, ranks)):
            self.books.find(now, Diverged(divergence))


def moments_of(ranks: Collection[Rank]) -> Reached:
    numbers = tuple([rank.number for rank in ranks])
    return Reached(
        numbers,
        tuple([rank.progress for rank in ranks]),
        tuple([rank.reported_batch for rank in ranks]),
        tuple([rank.settled for rank in ranks]),
        tuple([rank.first_of_step for rank in ranks]),
    )
