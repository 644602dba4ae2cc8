"""What ends a run: ranks that are lost, hold, stall or outlive their command, the election, the abort, and the last report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankwatch.shared.types import messages
from rankwatch.shared.words.text import describe_culprit, name_spans

from ..ending.absent import absent_for, describe_absent, first_failed
from ..ending.rules import Incident, Situation, decide
from ..ending.silence import describe_lost
from ..replicas.desync_text import describe_desync
from ..replicas.own_notices import desync_of
from ..stalls.stacks import Unanswered
from ..stalls.stall import StallNews
from ..trip.verdict import logical_time_of
from .effects import Alert, Effect, Note, Publish, Trouble
from .journal import NO_RANK, Closed, Desynced, Diverged, Left, NoStack, Stood, Waited
from .rank import Rank, describe_first_lost
from .report import Outcome, RankRows, RankState
from .run_state import RunState


@dataclass(slots=True)
class RunEnd(RunState):
    """See the module."""

    # --- as time passes -----------------------------------------------------------------------------------------------

    def _look_for_lost(self, now: float) -> Iterator[Effect]:
        found = self._silence.look([self.ranks[number] for number in self._running], now)
        for text in found.notes:
            yield Note(f"run {self.id}: {text}")
        for rank in found.dead:
            self._lose(rank, now)
        if self.successor and found.cut_off and len(found.cut_off) == len(self._running):
            self._give_up(found.cut_off, now)
        lost = [rank for rank in found.dead if rank.state is RankState.LOST]
        if lost:
            text = describe_lost(lost, self.options.lost_after)
            yield Note(f"run {self.id}: {text}")
            yield from self._abort_upon(Incident.RANKS_LOST, text, now)

    def _look_for_holds(self, now: float) -> Iterator[Effect]:
        yield from self._named(self._holding.look(self.ranks, now))

    def _look_for_deaf(self, now: float) -> Iterator[Effect]:
        yield from self._named(self._abort.end_deaf(self.ranks, self._holding, now))

    def _named(self, effects: Iterator[Effect]) -> Iterator[Effect]:
        """With the run's id in front of each note."""
        for effect in effects:
            yield Note(f"run {self.id}: {effect.text}") if isinstance(effect, Note) else effect

    def _look_who_lives_on(self, now: float) -> Iterator[Effect]:
        if self._running:
            yield from self._abort_upon(Incident.OUTLIVED, "", now)
        if self._abort.message is None and (text := self._orphans.look(self.ranks[number] for number in self._running)):
            yield Note(f"run {self.id}: {text}")
            yield from self._abort_upon(Incident.ORPHANED, text, now)

    def _look_for_stall(self, now: float, *, ended: bool = False) -> Iterator[Effect]:
        news = self._stalls.look(self.ranks, self._running, now) if self._ending.is_open else StallNews()
        for text in news.notes:
            yield Note(f"run {self.id}: {text}")
        if news.is_other:
            self._find(now, Stood(news.stall))
        silent: dict[str, list[int]] = {}
        for effect in self._stacks.look(self.ranks, now, ended=ended):
            if isinstance(effect, Unanswered):
                self._find(now, NoStack(effect.why), effect.rank)
                silent.setdefault(effect.why, []).append(effect.rank)
            else:
                yield effect
        for why, ranks in silent.items():
            yield Note(f"run {self.id}: {name_spans(ranks)} gave no stack: {why}")
        if news.began and self.options.abort_on_stall:
            yield from self._abort_upon(Incident.STALLED, news.began, now)
        elif news.began:
            yield Alert(Trouble.STALL, news.began, self.report())

    def _take_stack(self, rank: Rank, answer: messages.Inspected, now: float) -> Iterator[Effect]:
        if self._stacks.expects(rank.number, answer):
            self._note_down(now, answer, rank.number)
            self._stacks.take(rank.number, answer)
            yield Note("\n    ".join([f"run {self.id}: {rank.name} is in {answer.waits or 'its threads'}", *answer.lines]))

    def _look_who_is_waited_for(self, now: float) -> Iterator[Effect]:
        before, self._noted_waiting = self._noted_waiting, self.waiting
        if self._noted_waiting != before:
            yield self._show(now)
            if self._noted_waiting:
                yield Note(f"run {self.id}: {self._noted_waiting}")

    def _tell_desync(self, now: float) -> Iterator[Effect]:
        entries, origins = self._replicas.take_news()
        if entries:
            self._find(now, Desynced(entries, self._replicas.findings.unkept))
            self._note_compared(now, at_once=True)
        of_ranks = desync_of(self._notices.all(), self.world_size, self._locate)
        told: list[str] = []
        for found in (*(tuple(one.noted.values()) for one in origins), *self._byproducts.origins(of_ranks)):
            text = describe_desync(found, self.world_size)
            told.append(text)
            yield Note(f"run {self.id}: {text}")
            if self.options.abort_on_desync and any(one.is_split for one in found):
                culprit = found[0].ranks[0] if len(found[0].ranks) == 1 else NO_RANK
                yield from self._abort_upon(Incident.DESYNCED, text, now, culprit)
        if told and self._ending.decided is None:
            more = f" (and {len(told) - 1} more)" if told[1:] else ""
            yield Alert(Trouble.DESYNC, f"{told[0]}{more}", self.report())

    def _give_up(self, ranks: Sequence[Rank], now: float) -> None:
        """The job was started anew: nobody waits for these ranks."""
        text = describe_lost(ranks, self.options.lost_after)
        self._happens(Incident.RELAUNCHED, f"{text}; then run {self.successor} of the same job began", now)
        for rank in ranks:
            self._lose(rank, now)

    def _lose(self, rank: Rank, now: float) -> None:
        state = RankState.LOST if rank.acknowledged_at is None else RankState.ABORTED
        self._find(now, Left(state), rank.number)
        if state is RankState.LOST:
            how = f": {rank.death}" if rank.death else ""
            self._happens(Incident.RANK_DIED, f"{rank.name} was lost{how}; {rank.last_seen}", now)

    # --- the election -------------------------------------------------------------------------------------------------

    def _is_earliest(self, message: messages.Tripped, rank: Rank) -> bool:
        at = logical_time_of(message.trip, rank.hello.stage)
        return self._ending.decided is None and self._election.is_lowered_by(at)

    def _elect(self, now: float, *, ended: bool) -> Iterator[Effect]:
        if not self._election.is_due(now) and not ended:
            return
        self.verdict, reason = self._election.hold(self.ranks, now, final=ended, uneven=self._counts.uneven)
        if self.verdict is None:
            return
        if not ended:
            self._note_down(now, Waited())
        self._look_for_divergence(now)
        verdict, trip = self.verdict, self.verdict.trip
        who = verdict.who(self.ranks[verdict.tripped].name)
        text = f"{describe_culprit(who, trip)} ({verdict.cause.value}: {verdict.evidence})"
        yield Note(f"run {self.id}: first {trip.culprit.state.name.lower()}: {text}; {reason}")
        culprit = NO_RANK if verdict.rank is None else verdict.rank
        yield from self._abort_upon(Incident.ELECTED, text, now, culprit, trip.time)

    def _look_for_divergence(self, now: float) -> None:
        """Trips that went ahead of their ranks' batches are looked at when these are here, and with them all losses."""
        if self.over or self.verdict is None:
            return
        tripped = self.verdict.tripped
        if any(
            messages.Tripped in rank.ahead and (rank.is_running or rank.number == tripped) for rank in self.ranks.values()
        ):
            return
        if self.verdict.divergence is None and (divergence := self._losses.find(self.verdict, self.ranks)):
            self._find(now, Diverged(divergence))

    def _look_for_absent(self, now: float) -> None:
        """Once, before the report: the ranks that the first one to fail had waited for may be heard of after its failure."""
        if self._ending.outcome is Outcome.FAILED:
            ranks = RankRows({number: rank.row() for number, rank in self.ranks.items()}, self.world_size)
            first = first_failed(ranks)
            if first is not None and (text := describe_absent(absent_for(first, ranks))):
                self._happens(Incident.RANKS_ABSENT, text, now)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _happens(self, incident: Incident, text: str, now: float) -> bool:
        """Whether this incident decides how the run ends."""
        before = self._ending
        self._ending = decide(before, incident, text, now, abort_on_lost=self.options.abort_on_lost)
        decided = self._ending.decided
        if decided is None or decided is before.decided:
            return False
        self._find(now, decided)
        return True

    def _abort_upon(
        self, incident: Incident, reason: str, now: float, culprit: int = NO_RANK, tripped_at: float = 0.0
    ) -> Iterator[Effect]:
        """The ranks that still run must not wait in a collective for one that does not."""
        if self._happens(incident, reason, now):
            self._abort.message = self._make_abort(reason, culprit, tripped_at)  # the fact does not say whom it is about
            yield self._abort.send(self.ranks, now)
            yield from self._look_for_holds(now)
            yield from self._holding.keep(self.ranks.values(), now)

    def _conclude(self, now: float, *, ended: bool = False) -> Iterator[Effect]:
        """Decides, publishes and closes, as soon as each can be done. ``ended``: no rank can report anything any more."""
        if self.over:
            return
        if ended or self._have_all_ended(now):
            self._replicas.end()
            yield from self._tell_desync(now)
        if self._ending.situation is Situation.ELECTION:
            yield from self._elect(now, ended=ended)
        if self._ending.decided is not None and not self._published and (ended or self._is_settled(now)):
            self._published = True
            self._look_for_absent(now)
            yield from self._tell_desync(now)
            self._note_compared(now, at_once=True)
            yield Publish(self.report(), news=True)
        if ended or self._have_all_ended(now):
            yield from self._look_for_stall(now, ended=True)
            self._happens(Incident.ALL_ENDED, describe_first_lost(self.ranks.values()), now)
            if not self._published:
                self._look_for_absent(now)
            self._note_compared(now, at_once=True)
            self._note_gaps()
            is_news = not self._published
            self._find(now, Closed())
            yield self._show(now)
            yield Publish(self.report(), news=is_news)
