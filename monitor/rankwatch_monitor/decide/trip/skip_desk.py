"""The steps that a run's ranks left out: an election on each, held over the trips of its optimizer step, while the run goes on.

A rank sends such a trip once it is known that the step is left out, and trains on. So several elections may be under way. Once
the verdict's rank has told all, the step is told to people, or ends the run, where leaving out steps does not help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.types import messages
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.frame import Moment
from rankwatch.shared.types.trip import Trip
from rankwatch.shared.words.text import describe_culprit

from ..core.books import Books, Desk, Stop, Worry
from ..core.effects import Effect, SendAll, Trouble
from ..core.journal import NO_RANK, Entry, Reached, Skipped, Waited
from ..core.rank import CLOSEUP_MARGIN, Rank
from .divergence import blame_all, origin_of
from .election import Election
from .skipped import MOST_KEPT, Repeats, SkippedStep, StepKey, left_of, tell_all
from .trip_desk import TripDesk, moments_of
from .verdict import Verdict, logical_time_of

MOST_OPEN = 64
"""Elections on such steps at a time: for a further one, the oldest is held at once. No rank is so far ahead of another."""

MOST_ALSO = 64
"""Other ranks' trips that are kept with a step."""


@dataclass(slots=True)
class Ballot:
    """The trips of a step that was left out. ``closeups``, and until when one may come, are by rank."""

    election: Election
    closeups: dict[int, CloseUp] = field(default_factory=dict)
    due: dict[int, float] = field(default_factory=dict)
    verdict: Verdict | None = None

    def is_heard(self, rank: Rank, now: float) -> bool:
        """Whether the verdict's rank has told all, or is late."""
        return rank.number in self.closeups or not rank.is_running or now >= self.due.get(rank.number, now)


@dataclass(slots=True)
class SkipDesk(Desk):
    """``trips``: knows how ranks count, and their losses."""

    books: Books = field(repr=False)
    trips: TripDesk = field(repr=False)
    open: dict[StepKey, Ballot] = field(default_factory=dict)
    told: dict[StepKey, SkippedStep] = field(default_factory=dict)
    """The last ones whose verdict is final, in the order in which these were found."""
    count: int = 0
    """How many these are in all."""
    stops: str = ""
    """Why leaving out steps did not help, so that the run is stopped."""
    repeats: Repeats = field(default_factory=Repeats)
    _tripped: BoundedDict[StepKey, set[int]] = field(default_factory=lambda: BoundedDict(MOST_OPEN))
    """The ranks whose trips of a step are here: of the last steps."""
    _oldest: int = -1
    """The last step that is too old to be told."""

    # --- what ranks send ----------------------------------------------------------------------------------------------

    def take(self, rank: Rank, trip: Trip, now: float) -> Iterator[Effect]:
        """A rank has left out a step."""
        key = rank.skipped = self._key_of(rank, trip)
        self.trips.losses.left_out[trip.optimizer_step] = None
        rank.last_batch = max(rank.last_batch, trip.position.batch)
        yield self.books.note(f"{describe_culprit(rank.name, trip)}: its step was left out")
        if key[0] <= self._oldest:
            return
        if key not in self._tripped:
            self._tripped[key] = set()
        self._tripped[key].add(rank.number)
        if key in self.told:
            return
        ballot = self.open.get(key)
        if ballot is None:
            ballot = self.open[key] = Ballot(Election(self.books.world_size, self.books.options.decision_window))
        ballot.election.trips[rank.number] = trip
        if trip.has_closeup:
            ballot.due[rank.number] = now + trip.closeup_within + CLOSEUP_MARGIN
        if ballot.verdict is None:
            at = logical_time_of(trip, rank.hello.stage)
            if ballot.election.is_lowered_by(at):
                asked = ballot.election.aim(at, self.books.ranks, now)
                yield SendAll([other.peer for other in asked], messages.Probe(at.passed))

    def expect(self, rank: Rank, trip: Trip, now: float) -> None:
        """Before such a trip is noted down: what it is judged by."""
        if trip.position.batch >= 0 and not trip.position.eval:
            self.trips.count(rank, trip.position.batch, trip.optimizer_step, now)
        key = self._key_of(rank, trip)
        if key in self.told or key[0] <= self._oldest:
            return
        ballot = self.open.get(key)
        if ballot is None or ballot.election.is_lowered_by(logical_time_of(trip, rank.hello.stage)):
            self.books.note_down(now, moments_of(self.books.ranks.values()))

    def take_closeup(self, rank: Rank, closeup: CloseUp) -> None:
        """Of the step that the rank left out last. One that is late is still told with its step."""
        key = rank.skipped
        assert key is not None
        if (ballot := self.open.get(key)) is not None:
            ballot.closeups.setdefault(rank.number, closeup)
        elif (one := self.told.get(key)) is not None and one.verdict.tripped == rank.number and one.closeup is None:
            self.told[key] = replace(one, closeup=closeup)

    def note_answer(self, rank: Rank) -> None:
        """Elections that stop waiting for this rank now."""
        for key, ballot in self.open.items():
            if ballot.verdict is None and ballot.election.has_answer(rank):
                self.books.find(rank.heard_at, replace(moments_of([rank]), of=key), rank.number)

    def expect_again(self, rank: Rank) -> None:
        """A lost rank has connected again."""
        for ballot in self.open.values():
            ballot.election.expect(rank)

    def give_up(self, step: int) -> Iterator[tuple[int, Trip, CloseUp | None, float]]:
        """A rank did not leave out this step, so that it ends the run: what was said of it, by rank."""
        for verdict, closeup in [(one.verdict, one.closeup) for one in self.told.values() if one.step == step]:
            for number, trip in verdict.all_tripped:
                yield number, trip, closeup if number == verdict.tripped else None, float("-inf")
        for key in [key for key in self.open if key[0] == step]:
            ballot = self.open.pop(key)
            for number, trip in ballot.election.trips.items():
                if self.books.ranks[number].skipped == key:
                    self.books.ranks[number].skipped = None
                yield number, trip, ballot.closeups.get(number), ballot.due.get(number, float("-inf"))

    def leave(self, rank: Rank) -> None:
        self.note_answer(rank)

    # --- as time passes -----------------------------------------------------------------------------------------------

    @property
    def probe(self) -> Moment | None:
        """What a rank that connects is asked to pass."""
        targets = [ballot.election.target for ballot in self.open.values() if ballot.verdict is None]
        return next((target.passed for target in reversed(targets) if target is not None), None)

    def before(self, step: int) -> int:
        """How many steps were left out before this one."""
        return self.count - sum(other >= step for other, _ in self.told) + sum(other < step for other, _ in self.open)

    def is_on(self, step: int) -> bool:
        """Whether ranks have said that they left out this step."""
        return any(other == step for other, _ in (*self.open, *self.told))

    def look(self, now: float, *, ended: bool, is_open: bool, differ: Callable[[], str]) -> Iterator[Effect | Stop | Worry]:
        """Holds the elections that are due, and tells what is known by now.

        Args:
            ended: no rank can report anything any more.
            is_open: it is not known how the run ends.
            differ: says since when replicas differ; empty: they do not.
        """
        surplus = len(self.open) - MOST_OPEN
        for place, (key, ballot) in enumerate(list(self.open.items())):
            final = ended or place < surplus
            is_due = ballot.verdict is None and (final or ballot.election.is_due(now))
            if is_due and self._hold(ballot, now, final=final) and not ended:
                self.books.note_down(now, Waited())
            if ballot.verdict is not None and (final or ballot.is_heard(self.books.ranks[ballot.verdict.tripped], now)):
                yield from self._tell(key, ballot.verdict, now, differ() if is_open and not ended else None)

    def _hold(self, ballot: Ballot, now: float, *, final: bool) -> bool:
        uneven = self.trips.counts.uneven
        ballot.verdict, _ = ballot.election.hold(self.books.ranks, now, final=final, uneven=uneven)
        return ballot.verdict is not None

    def _tell(self, key: StepKey, verdict: Verdict, now: float, differ: str | None) -> Iterator[Effect | Stop | Worry]:
        """``differ``: None, if this cannot end the run any more."""
        found = self.trips.losses.find(verdict, self.books.ranks)
        one = self._made_of(key, verdict if found is None else blame_all(verdict, found))
        stops = "" if differ is None else self.repeats.why_not(one, self.books.locate(one.verdict.tripped))
        stops = stops or (f"{differ}, and leaving out a step does not mend that" if differ else "")
        verdict, trip = one.verdict, one.verdict.trip
        who = verdict.who(self.books.ranks[verdict.tripped].name)
        what = f"{describe_culprit(who, trip)} ({verdict.cause.value}: {verdict.evidence})"
        restored = f"; put back: {', '.join(one.restored)}" if one.restored else ""
        text = "; ".join(filter(None, (f"optimizer step {one.step} was left out: {what}{restored}", one.left)))
        so_far = tell_all([*self.told.values(), one], self.count + 1)
        self.books.find(now, Skipped(*key, text, so_far, stops, found))
        yield self.books.warn(f"{text}; {stops}" if stops else text)
        yield Worry(Trouble.SKIP, text)
        if stops:
            yield Stop(f"{what}; {stops}", NO_RANK if verdict.rank is None else verdict.rank, trip.time)

    # --- findings -----------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> None:
        match entry.fact:
            case Reached(of=of) if of:
                if (ballot := self.open.get((of[0], of[1]))) is not None:
                    ballot.election.take_answer(entry.rank)
            case Skipped() as skipped:
                self._apply(skipped, entry.now)

    def _apply(self, skipped: Skipped, now: float) -> None:
        key = skipped.step, skipped.nth
        if skipped.found is not None and (known := self.told.get(key)) is not None and known.verdict.divergence is None:
            verdict = blame_all(known.verdict, skipped.found)  # in a replay: the losses are no facts
            self.told[key] = replace(known, verdict=verdict, origin=origin_of(verdict))
        ballot = self.open.get(key)
        if ballot is None or not (ballot.verdict is not None or self._hold(ballot, now, final=True)):
            return
        assert ballot.verdict is not None
        verdict = ballot.verdict if skipped.found is None else blame_all(ballot.verdict, skipped.found)
        one = replace(self._made_of(key, verdict), stops=skipped.stops)
        self.repeats.take(one, self.books.locate(verdict.tripped))
        del self.open[key]
        self.told[key] = one
        self.count += 1
        if len(self.told) > MOST_KEPT:
            oldest = next(iter(self.told))
            del self.told[oldest]
            self._oldest = max(self._oldest, oldest[0])
        if skipped.stops and self.books.verdict is None:
            self.stops, self.books.verdict = skipped.stops, verdict
            self.books.ranks[verdict.tripped].take_over(verdict.trip, one.closeup, float("-inf"))

    def _made_of(self, key: StepKey, verdict: Verdict) -> SkippedStep:
        """Of other ranks' trips, the first ones are kept, with their last frame: there may be thousands."""
        ballot = self.open[key]
        closeup = ballot.closeups.get(verdict.tripped)
        also = tuple((number, replace(trip, frames=trip.frames[-1:])) for number, trip in verdict.also[:MOST_ALSO])
        left = left_of([trip for _, trip in verdict.all_tripped])
        return SkippedStep(key[0], replace(verdict, also=also), closeup, *left, origin=origin_of(verdict))

    def _key_of(self, rank: Rank, trip: Trip) -> StepKey:
        """The first step of this number of which the rank has not told yet: a loss scaler's are not counted."""
        step = trip.optimizer_step
        nth = 0
        while rank.number in self._tripped.get((step, nth), ()):
            nth += 1
        return step, nth
