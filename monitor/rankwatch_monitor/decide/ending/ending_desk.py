"""The end of a run: ranks that are lost, save, or outlive their command, how the run ends, and the abort."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rankwatch.shared.types import messages
from rankwatch.shared.words.brief import brief, is_of_a_collective
from rankwatch.shared.words.text import describe_culprit

from ..calls.differs import Explain
from ..core.books import Books, Desk, Stop
from ..core.effects import Effect, Note
from ..core.journal import Closed, Decided, Entry, JobEnded, Left, Skipped
from ..core.rank import Rank, describe_first_lost, first_to_die
from ..core.report import Outcome, RankRows, RankState
from .abort import AbortDelivery
from .absent import absent_for, describe_absent, first_aborted, first_failed
from .memory import describe_memory
from .orphans import Orphans
from .rules import Ending, Incident, decide
from .saves import Holding
from .silence import Silence

UNUSED = "no backward ever reached this model, while another one of its processes was trained"

MOST_SAID = 320
"""Characters of a reason that each rank says; and torchrun says it again: who, and what it called otherwise, with its line.
The report has all."""


@dataclass(slots=True)
class EndingDesk(Desk):
    """``is_published``: whether a report was printed."""

    books: Books = field(repr=False)
    state: Ending = field(default_factory=Ending)
    abort: AbortDelivery = field(init=False)
    holding: Holding = field(init=False)
    silence: Silence = field(init=False)
    orphans: Orphans = field(init=False)
    is_published: bool = False
    _has_told: bool = False
    _all_ended_at: float | None = None

    def __post_init__(self) -> None:
        options = self.books.options
        self.abort = AbortDelivery(options.abort_repeat, options.acknowledge_window)
        self.holding = Holding(options.hold_limit, options.abort_grace)
        unseen_after = max(options.unseen_after, options.lost_after)
        self.silence = Silence(options.lost_after, unseen_after, options.cut_off_after, options.return_window)
        self.orphans = Orphans(options.lost_after, options.abort_grace)

    @property
    def is_decided(self) -> bool:
        return self.state.decided is not None

    @property
    def is_unused(self) -> bool:
        """Whether the run was none of a training: nothing is reported of it."""
        return self.state.reason == UNUSED

    # --- what happens -------------------------------------------------------------------------------------------------

    def happens(self, incident: Incident, text: str, now: float) -> bool:
        """Whether this incident decides how the run ends."""
        before = self.state.decided
        self.state = decide(self.state, incident, text, now, abort_on_lost=self.books.options.abort_on_lost)
        decided = self.state.decided
        if decided is None or decided is before:
            return False
        self.books.find(now, decided)
        return True

    def stop(self, incident: Incident, stop: Stop, now: float) -> Iterator[Effect]:
        """If this decides how the run ends: the ranks that still run must not wait in a collective for one that does not."""
        if self.happens(incident, stop.reason, now):
            yield from self.tell()
            self.abort.message = self._make_abort(stop)  # the fact does not say whom it is about
            yield self.abort.send(self.books.ranks, now)
            yield from self.look_for_holds(now)
            yield from self.tell_how_long(self.books.ranks.values(), now)

    def tell(self) -> Iterator[Effect]:
        """Once: that the run has failed. Of a verdict, and of a stall, more was told already."""
        if self.state.outcome in (Outcome.FAILED, Outcome.LOST) and not self._has_told:
            self._has_told = True
            yield self.books.note(f"{self.state.outcome}: {self.state.reason}", logging.ERROR)

    def take_beat(self, rank: Rank, beat: messages.Beat, now: float) -> Iterable[Effect]:
        """It mostly has no effect, so no generator is made for it."""
        self.holding.take(rank, holds=beat.holds)
        if not (beat.orphaned and rank.is_running):
            return ()
        text = f"the torchrun that started {rank.name} has ended, and the rank trained on"
        return self.stop(Incident.ORPHANED, Stop(text), now)

    def take(self, rank: Rank, bye: messages.Bye, culprit: int, now: float) -> Iterator[Effect]:
        """A rank has said goodbye, and has left. ``culprit``: the rank for which it waited in vain, if it is known."""
        if bye.is_interrupted:
            self.happens(Incident.JOB_INTERRUPTED, "SIGINT", now)
        if bye.outcome == "failed":
            text = f"{rank.name} failed: {brief(bye.text, bye.at)}"
            yield from self.stop(Incident.RANK_FAILED, Stop(text, culprit), now)
        elif bye.outcome == "limit":
            self.happens(Incident.LIMIT_REACHED, bye.text, now)
            if not self.holding.has_begun:  # each rank stops by itself
                self.holding.begin(now)
        elif bye.outcome not in ("finished", "ended", "unused"):
            yield from self.stop(Incident.RANK_STOPPED, Stop(""), now)
        yield from self.tell_how_long([rank], now)

    def end_job(self, end: JobEnded, now: float) -> None:
        running = [self.books.ranks[number] for number in self.books.running]
        if end.interrupted and self.happens(Incident.JOB_STOPPED, end.interrupted, now):
            for rank in running:
                self.books.leave(rank, RankState.ABORTED)
            running = []
        if end.exit_code is None:
            if running:
                self.happens(Incident.COLLECTOR_ENDED, "", now)
            return
        # The first to die took the others along.
        self.lose_all(sorted(running, key=first_to_die), now, is_well=end.exit_code == 0)
        if end.exit_code and not running and any(rank.state is RankState.ENDED for rank in self.books.ranks.values()):
            self.happens(Incident.JOB_FAILED, str(end.exit_code), now)

    def lose_all(self, ranks: Iterable[Rank], now: float, *, is_well: bool = False) -> None:
        """``is_well``: their command has ended well. An owner may have killed them as their work was done."""
        ranks = list(ranks)
        done = [rank.number for rank in ranks if self._is_done(rank, is_well=is_well)]
        for rank in ranks:
            state = RankState.LOST if rank.acknowledged_at is None else RankState.ABORTED
            state = RankState.ENDED if rank.number in done else state
            self._count_out(rank, state, now)
            if state is RankState.LOST:
                how = f": {rank.death}" if rank.death else ""
                self.happens(Incident.RANK_DIED, f"{rank.name} was lost{how}; {rank.end}", now)

    def _count_out(self, rank: Rank, state: RankState, now: float) -> None:
        is_lost = state is RankState.LOST
        memory = describe_memory(rank.memory, rank.device_memory) if is_lost else ""
        leaked = is_lost and (rank.memory.leaks or rank.device_memory.leaks)
        self.books.find(now, Left(state, memory, leaked), rank.number)

    def interrupt(self, signal: str, now: float) -> Iterator[Effect]:
        """The job is being ended. By SLURM, say, upon a node that failed: ranks that were silent before will not come back."""
        lost = self.silence.unseen if self.state.is_open and self.books.options.abort_on_lost else []
        for rank in lost:
            self._count_out(rank, RankState.LOST, now)
        if lost:
            yield from self.stop(Incident.RANKS_LOST, Stop(self.silence.describe_lost(lost, now)), now)
        else:
            self.happens(Incident.JOB_INTERRUPTED, signal, now)

    def _is_done(self, rank: Rank, *, is_well: bool) -> bool:
        """Whether a rank that has ended without a word had done its work: no rank has come further, and it had said goodbye to
        the others. Where its command ended well, its last beat may be older than its last step."""
        all_ranks = self.books.ranks.values()
        if not self.state.is_open or any(one.furthest_batch != rank.furthest_batch for one in all_ranks):
            return False
        has_failed = any(one.state in (RankState.FAILED, RankState.LOST) for one in all_ranks)
        has_left = rank.departed and rank.phase == "idle"
        return rank.furthest_batch >= 0 and not has_failed and (is_well or has_left)

    def leave(self, rank: Rank) -> None:
        self.abort.unacknowledged.discard(rank.number)
        self.holding.leave(rank)

    # --- as time passes -----------------------------------------------------------------------------------------------

    def look(self, now: float, successor: str) -> Iterator[Effect]:
        """``successor``: a run of the same job that began later; empty: none is known."""
        yield from self._look_for_lost(now, successor)
        yield from self._look_who_lives_on(now)
        yield from self.look_for_holds(now)
        yield from self.tell_how_long(self.books.ranks.values(), now)
        yield from self._named(self.abort.end_deaf(self.books.ranks, self.holding, now))

    def look_for_holds(self, now: float) -> Iterator[Effect]:
        yield from self._named(self.holding.look(self.books.ranks, now, others_run=bool(self.books.running)))

    def tell_how_long(self, ranks: Iterable[Rank], now: float) -> Iterator[Effect]:
        """Tells these ranks how long they stay, where that is news."""
        yield from self.holding.tell(ranks, now, others_run=bool(self.books.running))

    def awaits_orphans(self, now: float) -> bool:
        """Whether ranks may live on after the command, and be stopped yet."""
        running = (self.books.ranks[number] for number in self.books.running)
        aborted_at = None if self.abort.message is None else self.state.decided_at
        return not self.books.over and self.orphans.are_awaited(running, aborted_at, self.holding, now)

    def have_all_ended(self, now: float) -> bool:
        options = self.books.options
        if self.books.running or options.expects_job_end:
            self._all_ended_at = None
            return False
        if self._all_ended_at is None:
            self._all_ended_at = now
        # Ranks that have never connected may still be starting.
        return len(self.books.ranks) == self.books.world_size or now - self._all_ended_at > options.lost_after

    def look_for_absent(self, now: float, explain: Explain) -> None:
        """Once, before the report: the ranks that the first one to fail had waited for may be heard of after its failure.

        ``explain``: why ranks waited, as far as the collectives say.
        """
        find = {Outcome.FAILED: first_failed, Outcome.LOST: first_aborted}.get(self.state.outcome or Outcome.FINISHED)
        ranks = RankRows({number: rank.row() for number, rank in self.books.ranks.items()}, self.books.world_size)
        first = None if find is None else find(ranks)
        if first is None:
            return
        found = explain([first.rank]) if is_of_a_collective(first.farewell) else None
        text = found.text if found is not None else describe_absent(absent_for(first, ranks), first)
        if text:
            self.happens(Incident.RANKS_ABSENT, text, now)

    def close(self, now: float, explain: Explain) -> None:
        """All ranks have ended: how the run has, if that is not decided yet."""
        if all(rank.is_unused for rank in self.books.ranks.values()):
            self.happens(Incident.UNUSED, UNUSED, now)
        self.happens(Incident.ALL_ENDED, describe_first_lost(self.books.ranks.values()), now)
        if not self.is_published:
            self.look_for_absent(now, explain)

    # --- findings -----------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> None:
        match entry.fact:
            case Decided() as decided:
                self.state = self.state.decide_as(decided, entry.now)
                abort = self._make_abort(Stop(decided.reason))
                if decided.abort and (self.abort.message is None or self.abort.message.reason != abort.reason):
                    self.abort.begin(abort, entry.now)
                    self.holding.begin(entry.now)
            case Skipped(so_far=so_far):
                self.state = replace(self.state, left_out=so_far)
            case Closed():
                self.books.over = self.is_published = True

    def _look_for_lost(self, now: float, successor: str) -> Iterator[Effect]:
        books = self.books
        running = [books.ranks[number] for number in books.running]
        found = self.silence.look(running, now, is_open=self.state.is_open)
        yield from map(books.note, found.notes)
        self.lose_all(found.dead, now)
        if successor and found.cut_off and len(found.cut_off) == len(books.running):
            self._give_up(found.cut_off, now, successor)
        lost = [rank for rank in found.dead if rank.state is RankState.LOST]
        if lost:
            text = self.silence.describe_lost(lost, now)
            if not self.state.is_open or not books.options.abort_on_lost:
                yield books.warn(text)
            yield from self.stop(Incident.RANKS_LOST, Stop(text), now)

    def _look_who_lives_on(self, now: float) -> Iterator[Effect]:
        books = self.books
        if books.running:
            yield from self.stop(Incident.OUTLIVED, Stop(""), now)
        if self.abort.message is None and (text := self.orphans.look(books.ranks[number] for number in books.running)):
            yield books.warn(text)
            yield from self.stop(Incident.ORPHANED, Stop(text), now)

    def _give_up(self, ranks: Sequence[Rank], now: float, successor: str) -> None:
        """The job was started anew: nobody waits for these ranks."""
        text = self.silence.describe_lost(ranks, now)
        self.happens(Incident.RELAUNCHED, f"{text}; then run {successor} of the same job began", now)
        self.lose_all(ranks, now)

    def _make_abort(self, stop: Stop) -> messages.Abort:
        options, verdict = self.books.options, self.books.verdict
        abort = messages.Abort(
            _in_short(stop.reason), stop.culprit, stop.tripped_at, options.abort_grace, options.hold_limit
        )
        if verdict is None:
            return abort
        trip = verdict.trip
        clause = f"{describe_culprit(verdict.who(self.books.ranks[verdict.tripped].name), trip)} ({verdict.cause.value})"
        module, batch = trip.frame.spec.module, trip.position.batch
        return replace(abort, reason=clause, batch=batch, module=module, cause=verdict.cause.value)

    def _named(self, effects: Iterator[Effect]) -> Iterator[Effect]:
        """With the run's id in front of each note."""
        for effect in effects:
            yield self.books.note(effect.text, effect.level) if isinstance(effect, Note) else effect


def _in_short(reason: str) -> str:
    """The first clauses of a reason: who, and where it stands."""
    first, *rest = reason.split("; ")
    for clause in rest:
        if len(first) + len(clause) > MOST_SAID:
            break
        first = f"{first}; {clause}"
    return first
