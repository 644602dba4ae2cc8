"""One run, from its first HELLO to the end of its last rank: a state machine without input or output, the clock passed in.

A rank is lost when its connection has ended and it was silent for ``lost_after`` seconds. A trip begins an election
(``election.py``). ``ending.py`` decides how the run ends. An abort that was decided is sent to every rank, and sent again
until the rank acknowledges it or is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import NO_LOSS
from rankwatch.shared.types.notice import describe_notice
from rankwatch.shared.types.stream_limit import charge
from rankwatch.shared.types.tuning import NO_CHANGE, Tuning
from rankwatch.shared.words.brief import brief
from rankwatch.shared.words.text import describe_culprit

from ..ending.rules import Incident
from ..ending.silence import CUT_OFF, is_cut_off
from ..trip.verdict import logical_time_of
from .effects import Effect, FollowProcess, Note, PointLatest, RecordTrace, Send, SendAll
from .fact import Finding, OwnFact
from .gaps import Gap
from .journal import (
    Died,
    Entry,
    InTurn,
    JobEnded,
    JobInterrupted,
    Progress,
    Trained,
    Waited,
)
from .rank import Rank, first_to_die
from .report import Outcome, RankState
from .run_end import RunEnd
from .run_state import moments_of

NOBODY = b""
"""The peer of a rank that has yet to connect to this collector."""


@dataclass(slots=True)
class Run(RunEnd):
    """See the module."""

    # --- events -------------------------------------------------------------------------------------------------------

    def welcome(self, hello: messages.Hello, peer: bytes, now: float) -> Iterator[Effect]:
        """A rank sent HELLO, for the first time or again after its connection broke."""
        rank = self.ranks.get(hello.rank)
        if rank is None:
            self._note_down(now, hello, hello.rank)
            rank = self.ranks[hello.rank] = Rank(hello, peer, now, now)
            self._note_answer(rank)  # of a later stage: it can only be waiting for the batch that tripped
        elif rank.state is RankState.LOST:
            self._note_down(now, hello, hello.rank)
            rank.state = RankState.RUNNING
            yield Note(f"run {self.id}: {rank.name} is back")
            self._election.expect(rank)
            self._happens(Incident.RANK_RETURNED, "", now)
            if self._ending.decided is None:
                self.over = self._published = False
        rank.peer, rank.is_over_budget = peer, False
        rank.hear(now)
        self.born_at = min(self.born_at, now - hello.age)
        if not self.is_own and hello.launch == self.options.launch:
            self.is_own = True
            yield PointLatest(self.id)
        if rank.is_running:
            self._running.add(rank.number)
            if rank.acknowledged_at is None:
                self._abort.unacknowledged.add(rank.number)
        if self.tuning != NO_CHANGE:
            yield Send(peer, messages.Tune(self.id, self.tuning))  # before WELCOME: the rank's first batch obeys it
        folder = f"{self.options.runs_dir}/{self.id}" if self.options.runs_dir else ""
        known = self.options.heartbeat, self.options.decision_window, rank.stored
        rank.untold = 0
        yield Send(peer, messages.Welcome(self.id, *known, folder, self.options.host, self.options.window))
        yield FollowProcess(self.id, rank.number, hello.host, hello.pid, hello.incarnation)
        if self._abort.message is not None:
            yield Send(peer, self._abort.message)
        elif self._election.target is not None:
            yield Send(peer, messages.Probe(self._election.target.moment))

    def receive(self, number: int, message: messages.Message, now: float, size: int = 0) -> Iterable[Effect]:
        """A rank sent a message of ``size`` bytes; 0: it is not counted."""
        rank = self.ranks[number]
        rank.hear(now)
        self._silence.heard_at = now
        if rank.is_over_budget and isinstance(message, messages.Sequenced):
            return ()  # an acknowledgement of this one would be one of those before
        if isinstance(message, messages.Batch):
            return self._widen(rank, size, self._take_batch(rank, message, now))
        if isinstance(message, messages.Fingerprinted):
            return self._widen(rank, size, self._take_fingerprint(rank, message))
        if isinstance(message, messages.Ack):
            return self._take_ack(rank, message, now)
        return self._take(rank, message, now, size)

    def stored(self, seqs: Mapping[int, int]) -> Iterator[Effect]:
        """The record has the messages of these ranks up to these sequence numbers."""
        self._note_gaps()
        for number, seq in seqs.items():
            rank = self.ranks[number]
            # What came after the last message that is recorded needs no record.
            rank.stored = rank.seq if seq >= rank.recorded else max(rank.stored, seq)
            if rank.awaits_receipt and rank.stored >= rank.seq:
                rank.awaits_receipt = False
                yield Send(rank.peer, rank.receipt())

    def miss(self, gaps: Iterable[Gap]) -> None:
        """These batches will never be on record."""
        self._gaps.take(gaps)

    def disconnected(self, number: int, peer: bytes, now: float) -> None:
        """A connection of the rank has ended. The rank may have another one, or reconnect: this alone decides nothing."""
        rank = self.ranks[number]
        if rank.peer == peer:
            rank.connected, rank.gone_at, rank.cut_off = False, now, is_cut_off(rank, now)

    def exited(self, number: int, incarnation: str, how: str, now: float) -> None:
        """The process of this rank has ended. Whether the rank is lost, its silence decides: this alone says why."""
        rank = self.ranks.get(number)
        is_it = rank is not None and rank.hello.incarnation == incarnation and not rank.death
        if rank is not None and is_it and rank.state in (RankState.RUNNING, RankState.LOST):
            self._find(now, Died(how), number)

    @property
    def is_deserted(self) -> bool:
        """Whether no rank of it is connected."""
        return not any(rank.connected for rank in self.ranks.values())

    @property
    def has_trained(self) -> bool:
        """Whether a rank of it has reported a batch."""
        return any(rank.last_batch >= 0 for rank in self.ranks.values())

    def desert(self, now: float) -> Iterator[Effect]:
        """None of its ranks is waited for any more."""
        for number in list(self._running):
            self._lose(self.ranks[number], now)
        yield from self._conclude(now, ended=True)

    def tune(self, tuning: Tuning, now: float) -> SendAll:
        """Changes options of the ranks: connected ranks are sent the change now, the others when they connect."""
        self._note_down(now, messages.Tune(self.id, tuning))
        self.tuning = self.tuning.then(tuning)
        listening = [rank.peer for rank in self.ranks.values() if rank.is_running and rank.connected]
        return SendAll(listening, messages.Tune(self.id, self.tuning))

    def was_decided_before(self, now: float) -> bool:
        """Whether it was known, at this time, how the run ends."""
        return self._ending.decided is not None and self._ending.decided_at < now

    def interrupt_job(self, event: JobInterrupted, now: float) -> None:
        """A signal is ending the job's command."""
        self._note_down(now, event)
        self._happens(Incident.JOB_INTERRUPTED, event.signal, now)

    @property
    def stops_siblings(self) -> bool:
        """Whether what ended it ends its processes: then the runs of their other models end because of it."""
        return self._ending.aborts and self._ending.outcome in (Outcome.ABORTED, Outcome.STALLED)

    def hear_of_sibling(self, run: str, now: float) -> None:
        """The run of another model of the same processes has stopped them."""
        self._happens(Incident.SIBLING_STOPPED, run, now)

    def command_ended(self, now: float) -> None:
        """The command has failed or was killed: the ranks that still beat are to be stopped."""
        self._orphans.begin(now)

    def awaits_orphans(self, now: float) -> bool:
        """Whether ranks may live on after the command, and be stopped yet."""
        running = (self.ranks[number] for number in self._running)
        aborted_at = None if self._abort.message is None else self._ending.decided_at
        return not self.over and self._orphans.are_awaited(running, aborted_at, self._holding, now)

    def end_job(self, end: JobEnded, now: float) -> Iterator[Effect]:
        """The processes of the job have ended (exit code None: the collector is being ended)."""
        self._note_down(now, end)
        if end.interrupted and self._happens(Incident.JOB_STOPPED, end.interrupted, now):
            for number in list(self._running):
                self._leave(self.ranks[number], RankState.ABORTED)
        if end.exit_code is None:
            if self._running:
                self._happens(Incident.COLLECTOR_ENDED, "", now)
        else:
            # The first to die took the others along.
            vanished = sorted((self.ranks[number] for number in self._running), key=first_to_die)
            for rank in vanished:
                self._lose(rank, now)
            if end.exit_code and not vanished and any(rank.state is RankState.ENDED for rank in self.ranks.values()):
                self._happens(Incident.JOB_FAILED, str(end.exit_code), now)
        yield from self._conclude(now, ended=True)

    def tick(self, now: float) -> Iterator[Effect]:
        """Time has passed."""
        self.ticked_at = now
        if now - self._looked_at >= self.options.heartbeat / 4:
            self._looked_at = now
            yield from self._look_for_lost(now)
            yield from self._look_who_lives_on(now)
            yield from self._look_for_holds(now)
            yield from self._holding.keep(self.ranks.values(), now)
            yield from self._look_for_deaf(now)
            yield from self._look_for_stall(now)
            yield from self._look_who_is_waited_for(now)
        if self._replicas.is_due(now) or self._byproducts.is_due(now):
            yield from self._tell_desync(now)
        self._note_compared(now)
        if now - self._shown_at >= self.options.heartbeat:
            yield self._show(now)
        if self._abort.is_due(now):
            yield self._abort.send(self.ranks, now)
        yield from self._conclude(now)

    # --- from the record ----------------------------------------------------------------------------------------------

    def replay(self, entry: Entry) -> None:
        """Takes a recorded fact. Its effects were carried out before; what was decided upon it is recorded too."""
        now, number, fact = entry
        effects: Iterable[Effect] = ()
        if isinstance(fact, Finding):
            self.apply(entry)
        elif isinstance(fact, JobInterrupted):
            self.interrupt_job(fact, now)
        elif isinstance(fact, JobEnded):
            effects = self.end_job(fact, now)
        elif isinstance(fact, Waited):
            effects = self._conclude(now)
        elif isinstance(fact, messages.Hello):
            effects = self.welcome(fact, NOBODY, now)
        elif isinstance(fact, messages.Tune):
            self.tune(fact.tuning, now)
        elif not isinstance(fact, (OwnFact, Trained)):  # of batches, ``resume`` is told
            effects = self.receive(number, fact, now)
        deque(effects, maxlen=0)
        self.journal.clear()

    def resume(self, progress: Iterable[Progress], now: float) -> None:
        """After a replay: the ranks have yet to reconnect, as if this collector had been cut off from all of them.

        Args:
            progress: the last parts of batches of each rank, in the order in which they came.
        """
        for number, seq, batch, step, first_frame, frames, loss in progress:
            self.ranks[number].seq = max(self.ranks[number].seq, seq)
            self.ranks[number].take(batch, step, first_frame, frames, loss)
        self._silence.deaf_at = now
        self._replicas.resume()
        for number, rank in self.ranks.items():
            rank.stored, rank.missed = rank.seq, 0
            rank.connected, rank.quiet, rank.cut_off = False, CUT_OFF, True
            rank.heard_at = rank.moved_at = rank.gone_at = now
            if rank.is_running and rank.acknowledged_at is None:
                self._abort.unacknowledged.add(number)

    # --- messages of a rank -------------------------------------------------------------------------------------------

    def _take(self, rank: Rank, message: messages.Message, now: float, size: int) -> Iterator[Effect]:
        if isinstance(message, messages.Beat):
            rank.queued, rank.dropped = message.queued, message.dropped
            rank.advance(message.moment, message.phase)
            self._holding.take(rank, holds=message.holds and rank.is_running)
            if message.orphaned and rank.is_running:
                text = f"the torchrun that started {rank.name} has ended, and the rank trained on"
                yield from self._abort_upon(Incident.ORPHANED, text, now)
            if not self._note_answer(rank):  # a rank that answers an election soon hears how it ends
                yield Send(rank.peer, rank.receipt())
        elif isinstance(message, messages.Inspected):
            yield from self._take_stack(rank, message, now)
        elif isinstance(message, messages.Table):
            self.tables.add(message.table, size)
        elif isinstance(message, messages.Fingerprints):
            if refusal := self._replicas.take_table(rank.number, message.table):
                yield Send(rank.peer, messages.Error(refusal, "none"))
        elif isinstance(message, messages.Sequenced):
            if size and not rank.may_say(size, self.budget.words, now):
                rank.is_over_budget = True
                text = "this rank, or all ranks of its key, say more than is noted down: say HELLO, and repeat it"
                yield Send(rank.peer, messages.Error(text, "hello"))
                return
            yield from self._take_in_order(rank, message, now)
        else:
            yield Send(rank.peer, messages.Error(f"a rank does not send {type(message).__name__}", "none"))
            return
        self._note_answer(rank)
        yield from self._look_for_holds(now)
        yield from self._conclude(now)

    def _take_ack(self, rank: Rank, ack: messages.Ack, now: float) -> Iterable[Effect]:
        """Only the last outstanding acknowledgement can settle the run; the others return early."""
        if ack.abort and rank.acknowledged_at is None:
            self._note_down(now, ack, rank.number)
            rank.acknowledged_at = now
            self._abort.unacknowledged.discard(rank.number)
        return () if self._abort.unacknowledged else self._conclude(now)

    def _take_in_order(self, rank: Rank, message: messages.Sequenced, now: float) -> Iterator[Effect]:
        """A TRIP or CLOSEUP may have gone ahead of the batches before it. It then counted, and is only acknowledged here."""
        kind = type(message)
        if message.seq == messages.AHEAD:
            if rank.lets_ahead(kind):
                rank.ahead.add(kind)
                yield from self._take_sequenced(rank, message, now)
        elif kind not in rank.ahead:
            if rank.is_news(message.seq, is_recorded=True):
                yield from self._take_sequenced(rank, message, now)
        elif message.seq > rank.seq:
            self._find(now, InTurn(message.seq, kind.__name__), rank.number)
            self._look_for_divergence(now)

    def _take_sequenced(self, rank: Rank, message: messages.Sequenced, now: float) -> Iterator[Effect]:
        if isinstance(message, messages.Tripped):
            trip = message.trip
            if trip.position.batch >= 0 and not trip.position.eval:
                self._count(rank, trip.position.batch, trip.optimizer_step, now)
            if self._is_earliest(message, rank):
                self._find(now, moments_of(self.ranks.values()))
        self._note_down(now, message, rank.number)
        if isinstance(message, messages.Noticed):
            is_new = self._notices.take(rank.number, message.notice)
            if is_new and not self._byproducts.take(message.notice.kind, now):
                yield Note(f"run {self.id}: {rank.name}: {describe_notice(message.notice)}")
            return
        rank.awaits_receipt = True
        if isinstance(message, messages.Off):
            if not rank.fault:
                yield Note(f"run {self.id}: the watch of {rank.name} {message.text}; it trains on unwatched")
            rank.fault = message.text
            self._replicas.leave(rank.number)
        elif isinstance(message, messages.Bye):
            yield from self._take_leave(rank, message, now)
        elif isinstance(message, messages.LookedCloser):
            rank.take_closeup(message.closeup)
        elif isinstance(message, messages.Tripped) and rank.trip is None:
            yield from self._take_trip(rank, message, now)

    def _take_trip(self, rank: Rank, message: messages.Tripped, now: float) -> Iterator[Effect]:
        rank.take_trip(message.trip, now)
        self._trips += 1
        yield Note(f"run {self.id}: {describe_culprit(rank.name, message.trip)}")
        if self._is_earliest(message, rank):
            self._happens(Incident.TRIPPED, "", now)
            at = logical_time_of(message.trip, rank.hello.stage)
            asked = self._election.aim(at, self.ranks, now)
            yield SendAll([other.peer for other in asked], messages.Probe(at.moment))

    def _widen(self, rank: Rank, size: int, effects: Iterable[Effect]) -> Iterable[Effect]:
        """Tells the rank, each time that half of its window was handled, so that it never waits for a heartbeat."""
        rank.untold += charge(size) if size else 0
        if 2 * rank.untold < self.options.window:
            return effects
        return (*effects, Send(rank.peer, rank.receipt()))

    def _take_batch(self, rank: Rank, message: messages.Batch, now: float) -> Iterable[Effect]:
        """By far the most frequent message. It mostly has no effect, so no generator is made for it."""
        summary = message.summary
        table = self.tables.get(summary.table_id)
        if table is None:
            # The batch is not taken: after the new HELLO the rank sends it again, and its table before it.
            text = f"the frame table of batch {summary.batch} is not known here"
            return (Send(rank.peer, messages.Error(text, "hello")),)
        effects: list[Effect] = []
        if rank.is_news(message.seq, is_recorded=True):
            self.tables.use(table.id)
            if summary.fits(table):
                self.journal.append(Entry(now, rank.hello.rank, Trained(message.seq, summary, table)))
                self._note_missed(rank, summary.batch)
                loss = summary.loss(table) if table.losses else NO_LOSS
                is_next = summary.batch > rank.last_batch
                rank.take(summary.batch, summary.optimizer_step, summary.first_frame, len(table.specs), loss)
                self._losses.take(rank.number, summary, table)
                if is_next:
                    self._count(rank, summary.batch, summary.optimizer_step, now)
                if summary.traced:
                    effects.append(RecordTrace(self.id, rank.number, summary, table))
            else:
                text = f"batch {summary.batch} does not fit its frame table"
                effects.append(Send(rank.peer, messages.Error(text, "none")))
        if not self._ending.is_open:
            self._note_answer(rank)
            effects += self._conclude(now)
        return effects

    def _take_fingerprint(self, rank: Rank, message: messages.Fingerprinted) -> Iterable[Effect]:
        """As frequent as batches, and never recorded: what is found is."""
        fingerprint = message.fingerprint
        if not self._replicas.knows(rank.number, fingerprint.table_id):
            text = f"the table of the fingerprint of step {fingerprint.step} is not known here"
            return (Send(rank.peer, messages.Error(text, "hello")),)
        if not rank.is_news(message.seq, is_recorded=False):
            return ()
        refusal = self._replicas.take(rank.number, rank.hello.stage, fingerprint)
        return (Send(rank.peer, messages.Error(refusal, "none")),) if refusal else ()

    def _take_leave(self, rank: Rank, bye: messages.Bye, now: float) -> Iterator[Effect]:
        rank.farewell = bye.text
        rank.advance(bye.moment, rank.phase)
        if bye.outcome in ("finished", "ended"):
            self._leave(rank, RankState(bye.outcome))
        elif bye.outcome == "failed":
            self._leave(rank, RankState.FAILED)
            yield from self._abort_upon(Incident.RANK_FAILED, f"{rank.name} failed: {brief(bye.text)}", now)
        else:
            self._leave(rank, RankState.ABORTED)
            if bye.outcome == "limit":
                self._happens(Incident.LIMIT_REACHED, bye.text, now)
            else:
                yield from self._abort_upon(Incident.RANK_STOPPED, "", now)
        if bye.outcome in ("failed", "aborted"):
            yield from self._holding.keep([rank], now)
