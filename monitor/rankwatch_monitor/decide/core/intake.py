"""What the ranks of a run send, and how they come and go: each message goes to the desks that it concerns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rankwatch.shared.types import messages
from rankwatch.shared.types.notice import describe_notice
from rankwatch.shared.types.stream_limit import charge
from rankwatch.shared.types.tuning import NO_CHANGE
from rankwatch.shared.words.brief import is_of_a_collective, is_timeout

from ..ending.rules import Incident
from ..ending.silence import is_cut_off
from ..trip.skipped import is_left_out
from .effects import Effect, FollowProcess, PointLatest, Send
from .journal import NO_RANK, Aside, Died
from .rank import Rank
from .report import RankState

if TYPE_CHECKING:
    from .run import Run

_LEFT_BY = {"finished": RankState.FINISHED, "ended": RankState.ENDED, "failed": RankState.FAILED}
_LEFT_BY |= {"unused": RankState.FINISHED}
"""What a rank is after a BYE; after any other, ABORTED."""


class Intake:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.books, self.ranks = run.books, run.ranks
        self.batches, self.trips, self.skips, self.replicas, self.stalls, self.calls, self.ending = (
            run.batches, run.trips, run.skips, run.replicas, run.stalls, run.calls, run.ending,
        )  # fmt: skip

    # --- ranks come and go --------------------------------------------------------------------------------------------

    def welcome(self, hello: messages.Hello, peer: bytes, now: float) -> Iterator[Effect]:
        """A rank sent HELLO, for the first time or again after its connection broke."""
        run = self.run
        rank = self.ranks.get(hello.rank)
        if rank is None:
            self.books.note_down(now, hello, hello.rank)
            rank = self.ranks[hello.rank] = Rank(hello, peer, now, now)
            self._note_answers(rank)  # of a later stage: it can only be waiting for the batch that tripped
        elif rank.state is RankState.LOST:
            self.books.note_down(now, hello, hello.rank)
            rank.state = RankState.RUNNING
            yield self.books.note(f"{rank.name} is back")
            self.trips.election.expect(rank)
            self.skips.expect_again(rank)
            self.ending.happens(Incident.RANK_RETURNED, "", now)
            if not self.ending.is_decided:
                self.books.over = self.ending.is_published = False
        rank.peer, rank.is_over_budget = peer, False
        rank.hear(now)
        self.books.away.discard(rank.number)
        run.born_at = min(run.born_at, now - hello.age)
        if not run.is_own and hello.launch == run.options.launch:
            run.is_own = True
            yield PointLatest(run.id)
        if rank.is_running:
            self.books.running.add(rank.number)
            if rank.acknowledged_at is None:
                self.ending.abort.unacknowledged.add(rank.number)
        if run.all_tuning != NO_CHANGE:
            yield Send(peer, messages.Tune(run.id, run.all_tuning))  # before WELCOME: the rank's first batch obeys it
        folder = run.options.folder_of(run.id)
        known = run.options.heartbeat, run.options.decision_window, rank.stored
        rank.untold = 0
        yield Send(peer, messages.Welcome(run.id, *known, folder, run.options.host, run.options.window))
        yield FollowProcess(run.id, rank.number, hello.host, hello.pid, hello.incarnation)
        if self.ending.abort.message is not None:
            yield Send(peer, self.ending.abort.message)
            yield from self.ending.tell_how_long([rank], now)
        elif self.trips.election.target is not None:
            yield Send(peer, messages.Probe(self.trips.election.target.passed))
        elif (probe := self.skips.probe) is not None:
            yield Send(peer, messages.Probe(probe))

    def disconnected(self, number: int, peer: bytes, now: float) -> None:
        """A connection of the rank has ended. The rank may have another one, or reconnect: this alone decides nothing."""
        rank = self.ranks[number]
        if rank.peer == peer:
            rank.connected, rank.gone_at, rank.cut_off = False, now, is_cut_off(rank, now)
            if not rank.is_running:
                self.ending.holding.leave(rank)
            self.books.away.add(number)

    def exited(self, number: int, incarnation: str, how: str, now: float) -> None:
        """The process of this rank has ended. Whether the rank is lost, its silence decides: this alone says why."""
        rank = self.ranks.get(number)
        is_it = rank is not None and rank.hello.incarnation == incarnation and not rank.death
        if rank is not None and is_it and rank.state in (RankState.RUNNING, RankState.LOST):
            self.books.find(now, Died(how), number)

    # --- what ranks send ----------------------------------------------------------------------------------------------

    def receive(self, number: int, message: messages.Message, now: float, size: int = 0) -> Iterable[Effect]:
        """A rank sent a message of ``size`` bytes; 0: it is not counted."""
        rank = self.ranks[number]
        rank.hear(now)
        self.ending.silence.heard_at = now
        if rank.is_over_budget and isinstance(message, messages.Sequenced):
            return ()  # an acknowledgement of this one would be one of those before
        if isinstance(message, messages.Batch):
            effects = self.batches.take(rank, message, now)
            if message.calls:
                effects += self.calls.take(rank, message.calls, now, message.summary.batch)
            if self.skips.open or not self.ending.state.is_open:
                self._note_answers(rank)
                effects += self.run.conclude(now)
            return self._widen(rank, size, effects)
        if isinstance(message, messages.Fingerprinted):
            return self._widen(rank, size, self.replicas.take(rank, message))
        if isinstance(message, messages.Ack):
            return self._take_ack(rank, message, now)
        return self._take(rank, message, now, size)

    def stored(self, seqs: Mapping[int, int]) -> Iterator[Effect]:
        """The record has the messages of these ranks up to these sequence numbers."""
        self.batches.note_gaps()
        for number, seq in seqs.items():
            rank = self.ranks[number]
            # What came after the last message that is recorded needs no record.
            rank.stored = rank.seq if seq >= rank.recorded else max(rank.stored, seq)
            if rank.awaits_receipt and rank.stored >= rank.seq:
                rank.awaits_receipt = False
                yield Send(rank.peer, rank.receipt())

    def _widen(self, rank: Rank, size: int, effects: Iterable[Effect]) -> Iterable[Effect]:
        """Tells the rank, each time that half of its window was handled, so that it never waits for a heartbeat."""
        rank.untold += charge(size) if size else 0
        if 2 * rank.untold < self.books.options.window:
            return effects
        return (*effects, Send(rank.peer, rank.receipt()))

    def _take_ack(self, rank: Rank, ack: messages.Ack, now: float) -> Iterable[Effect]:
        """Only the last outstanding acknowledgement can settle the run; the others return early."""
        unacknowledged = self.ending.abort.unacknowledged
        if ack.abort and rank.acknowledged_at is None:
            self.books.note_down(now, ack, rank.number)
            rank.acknowledged_at = now
            unacknowledged.discard(rank.number)
        return () if unacknowledged else self.run.conclude(now)

    def _take_aside(self, rank: Rank, aside: tuple[str, ...], now: float) -> None:
        """What changes is a fact, and noted down."""
        if aside not in ((), rank.aside) and rank.may_say(sum(map(len, aside)), self.run.budget.words, now):
            self.books.find(now, Aside(aside), rank.number)

    def _take(self, rank: Rank, message: messages.Message, now: float, size: int) -> Iterator[Effect]:
        if isinstance(message, messages.Beat):
            rank.queued, rank.dropped, rank.departed = message.queued, message.dropped, message.departed
            rank.tell(message.moment, message.phase)
            self._take_aside(rank, message.aside, now)
            rank.memory.take(message.moment.batch, message.memory)
            rank.spent = message.spent if message.spent.batches else rank.spent
            self.run.pace.take(rank, message.cost, now)
            if message.first_of_step >= 0:
                rank.settle(message.settled, message.moment.step, message.first_of_step)
            if message.calls:
                yield from self.calls.take(rank, message.calls, now)
            yield from self.ending.take_beat(rank, message, now)
            if not self._note_answers(rank):  # a rank that answers an election soon hears how it ends
                yield Send(rank.peer, rank.receipt())
        elif isinstance(message, messages.Inspected):
            yield from self.stalls.take(rank, message, now)
        elif isinstance(message, messages.Recounted):
            yield from self.run.tell_calls(self.calls.answer(rank, message, now), now)
        elif isinstance(message, messages.Table):
            self.batches.tables.add(message.table, size)
        elif isinstance(message, messages.Fingerprints):
            if refusal := self.replicas.watch.take_table(rank.number, message.table):
                yield Send(rank.peer, messages.Error(refusal, "none"))
        elif isinstance(message, messages.Sequenced):
            if size and not rank.may_say(size, self.run.budget.words, now):
                rank.is_over_budget = True
                text = "this rank, or all ranks of its key, say more than is noted down: say HELLO, and repeat it"
                yield Send(rank.peer, messages.Error(text, "hello"))
                return
            yield from self._take_in_order(rank, message, now)
        else:
            yield Send(rank.peer, messages.Error(f"a rank does not send {type(message).__name__}", "none"))
            return
        self._note_answers(rank)
        yield from self.ending.look_for_holds(now)
        yield from self.run.conclude(now)

    def _take_in_order(self, rank: Rank, message: messages.Sequenced, now: float) -> Iterator[Effect]:
        """A TRIP or CLOSEUP may have gone ahead of the batches before it. It then counted, and is only acknowledged here."""
        kind = type(message)
        if message.seq == messages.AHEAD:
            if rank.lets_ahead(kind) and not self._is_skipped(rank, message):
                rank.ahead.add(kind)
                yield from self._take_sequenced(rank, message, now)
        elif kind in rank.ahead and not self._is_skipped(rank, message):
            self.trips.take_turn(rank, message, now)
        elif rank.is_news(message.seq, is_recorded=True):
            yield from self._take_sequenced(rank, message, now)

    def _note_answers(self, rank: Rank) -> bool:
        """Whether the election on how the run ends stops waiting for this rank now."""
        self.skips.note_answer(rank)
        return self.trips.note_answer(rank)

    def _is_skipped(self, rank: Rank, message: messages.Sequenced) -> bool:
        """Whether it is of a step that was left out. Such a message never counts before its turn: no abort waits for it."""
        if isinstance(message, messages.Tripped):
            return is_left_out(message.trip) and not self.trips.ends_with(message.trip.optimizer_step)
        return isinstance(message, messages.LookedCloser) and rank.skipped is not None and message.seq != messages.AHEAD

    def _expect_trip(self, rank: Rank, message: messages.Tripped, now: float, *, is_decided: bool) -> None:
        if self._is_skipped(rank, message):
            self.skips.expect(rank, message.trip, now)
            return
        has_company = not is_decided and self.skips.is_on(message.trip.optimizer_step)
        self.trips.expect(rank, message.trip, now, is_decided=is_decided, has_company=has_company)

    def _take_trip(self, rank: Rank, message: messages.Tripped, now: float, *, is_decided: bool) -> Iterator[Effect]:
        trip = message.trip
        if self._is_skipped(rank, message):
            yield from self.skips.take(rank, trip, now)
            return
        if message.seq != messages.AHEAD:
            rank.skipped = None
        if rank.trip is not None:
            return
        company = []
        for number, other, closeup, due in () if is_decided else self.skips.give_up(trip.optimizer_step):
            if number != rank.number:
                self.ranks[number].take_over(other, closeup, due)
                company.append(self.ranks[number])
        yield from self.trips.take(rank, trip, now, is_decided=is_decided, company=company)
        if not is_decided:
            self.ending.happens(Incident.TRIPPED, "", now)

    def _end(self, rank: Rank, bye: messages.Bye, now: float) -> Iterator[Effect]:
        """A rank has ended. If it failed in a collective, the others say what they have called before an abort ends them."""
        culprit = NO_RANK
        if bye.outcome == "failed" and is_of_a_collective(bye.text):
            has_waited = is_timeout(bye.text)
            culprit = self.calls.culprit_of(rank.number, has_waited=has_waited)
            yield from self.calls.press([rank.number], now, has_waited=has_waited)
        yield from self.ending.take(rank, bye, culprit, now)

    def _take_sequenced(self, rank: Rank, message: messages.Sequenced, now: float) -> Iterator[Effect]:
        is_decided = self.ending.is_decided
        if isinstance(message, messages.Tripped):
            self._expect_trip(rank, message, now, is_decided=is_decided)
        self.books.note_down(now, message, rank.number)
        if isinstance(message, messages.Noticed):
            self.run.pace.take_notice(rank.number, message.notice)
            is_new = self.run.notices.take(rank.number, message.notice)
            if is_new and not self.replicas.byproducts.take(message.notice.kind, now):
                yield self.books.warn(f"{rank.name}: {describe_notice(message.notice)}")
            return
        rank.awaits_receipt = True
        if isinstance(message, messages.Off):
            if not rank.fault:
                yield self.books.warn(f"the watch of {rank.name} {message.text}; it trains on unwatched")
            rank.fault = message.text
            self.replicas.leave(rank)
            self.calls.forget(rank)
        elif isinstance(message, messages.Bye):
            rank.farewell, rank.farewell_at = message.text, message.at
            rank.is_unused = message.outcome == "unused"
            rank.tell(message.moment, rank.phase)
            if rank.settled is not None:
                rank.settle(message.moment, *rank.first_of_step)
            state = _LEFT_BY.get(message.outcome, RankState.ABORTED)
            self.books.leave(rank, RankState.ABORTED if message.is_interrupted else state)
            yield from self._end(rank, message, now)
        elif isinstance(message, messages.LookedCloser):
            if self._is_skipped(rank, message):
                self.skips.take_closeup(rank, message.closeup)
            else:
                rank.take_closeup(message.closeup)
        elif isinstance(message, messages.Tripped):
            yield from self._take_trip(rank, message, now, is_decided=is_decided)
