"""One run, from its first HELLO to the end of its last rank: a state machine without input or output, the clock passed in.

It is made of desks, each of which decides one part: batches, trips, replicas, stalls, collectives and the end. What comes in
goes to the desks that it concerns: messages, the passing of time, what happens to the job. All desks write into the same
books, among them the journal, from which ``replay`` makes the run again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rankwatch.shared.types import messages
from rankwatch.shared.types.tuning import Tuning

from ..calls.calls_desk import CallsDesk
from ..ending.doubts import DoubtDesk
from ..ending.ending_desk import EndingDesk
from ..ending.judgement import Doubt
from ..ending.rules import Incident, Situation
from ..ending.silence import CUT_OFF
from ..keys.budget import Budget
from ..keys.tables import FrameTables
from ..pace.pace_desk import PaceDesk
from ..replicas.replica_desk import ReplicaDesk
from ..stalls.stall_desk import StallDesk
from ..trip.skip_desk import SkipDesk
from ..trip.trip_desk import TripDesk
from ..trip.verdict import Verdict
from .batch_desk import BatchDesk
from .books import Books, Stop, Worry
from .effects import Alert, Effect, Publish, SendAll, Show, Trouble
from .fact import Finding, OwnFact
from .intake import Intake
from .journal import Closed, Entry, JobEnded, JobInterrupted, Opened, Progress, Trained, Waited
from .notices import Notices
from .options import Options
from .rank import Rank
from .report import Outcome, Report
from .told import report_of, show_of

NOBODY = b""
"""The peer of a rank that has yet to connect to this collector."""


@dataclass(slots=True)
class Run:
    """See the module."""

    id: str
    opened: Opened
    options: Options
    budget: Budget = field(default_factory=Budget, repr=False)
    """Of the key by which the run was begun."""
    books: Books = field(init=False)
    batches: BatchDesk = field(init=False)
    trips: TripDesk = field(init=False)
    skips: SkipDesk = field(init=False)
    replicas: ReplicaDesk = field(init=False)
    stalls: StallDesk = field(init=False)
    calls: CallsDesk = field(init=False)
    pace: PaceDesk = field(init=False)
    ending: EndingDesk = field(init=False)
    doubts: DoubtDesk = field(init=False)
    intake: Intake = field(init=False, repr=False)
    notices: Notices = field(default_factory=Notices)
    world_size: int = field(init=False)
    ranks: dict[int, Rank] = field(init=False, repr=False)
    tuning: Tuning = field(init=False)
    """All changes of the ranks' options so far."""
    born_at: float = float("inf")
    """When the oldest of its processes started."""
    successor: str = field(default="", repr=False)
    """A run of the same job that began later; empty: none is known."""
    later: Run | None = field(default=None, repr=False)
    """The run of the launch after this one, that has an id in common with it: a rank that lives on may be of that one."""
    has_told_siblings: bool = field(default=False, repr=False)
    """Whether the runs of other models of its processes know that it has stopped them."""
    is_own: bool = False
    """Whether a rank of it was started by the command that this collector was started for, if it was started for one."""
    ticked_at: float = field(default=float("-inf"), repr=False)
    """When time passed for it last."""
    _looked_at: float = float("-inf")
    _shown_at: float = float("-inf")
    _noted_waiting: str = ""
    """``waiting`` as it was last noted."""

    def __post_init__(self) -> None:
        self.world_size = self.opened.world_size
        self.options = self.options.for_world(self.world_size)
        self.tuning = Tuning(every=self.options.every)
        self.is_own = not self.options.launch
        books = self.books = Books(self.id, self.world_size, self.options)
        self.ranks = books.ranks
        self.trips = TripDesk(books)
        self.skips = SkipDesk(books, self.trips)
        self.batches = BatchDesk(books, self.trips, FrameTables(self.budget.tables))
        self.replicas = ReplicaDesk(books, self.budget, self.notices)
        self.stalls = StallDesk(books)
        self.calls = CallsDesk(books)
        self.pace = PaceDesk(books)
        self.ending = EndingDesk(books)
        self.doubts = DoubtDesk(books)
        books.desks = (
            self.batches, self.replicas, self.stalls, self.calls, self.ending, self.trips, self.skips, self.pace, self.doubts,
        )  # fmt: skip
        self.intake = Intake(self)
        books.note_down(0.0, self.opened)

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether all ranks have ended, and nothing more is expected."""
        return self.books.over

    @property
    def verdict(self) -> Verdict | None:
        return self.books.verdict

    @property
    def all_tuning(self) -> Tuning:
        """What ranks are told: all changes of their options, and which batches they measure in full by their budget."""
        return self.tuning if self.tuning.every is not None else self.tuning.then(self.pace.tuning)

    @property
    def is_deserted(self) -> bool:
        """Whether no rank of it is connected."""
        return not any(rank.connected for rank in self.ranks.values())

    @property
    def has_trained(self) -> bool:
        """Whether a rank of it has reported a batch."""
        return self.batch >= 0

    @property
    def waiting(self) -> str:
        """Which ranks the election waits for; empty when it waits for none."""
        return self.trips.election.waiting if self.ending.state.situation is Situation.ELECTION else ""

    @property
    def stops_siblings(self) -> bool:
        """Whether what ended it ends its processes: then the runs of their other models end because of it."""
        ending = self.ending.state
        return ending.aborts and ending.outcome in (Outcome.ABORTED, Outcome.STALLED) and not ending.is_by_sibling

    @property
    def is_open(self) -> bool:
        """Whether it goes on, as far as is known."""
        return self.ending.state.is_open and not self.over

    @property
    def batch(self) -> int:
        """The last batch that a rank has reported; -1: none."""
        return max((rank.last_batch for rank in self.ranks.values()), default=-1)

    def was_decided_before(self, now: float) -> bool:
        """Whether it was known, at this time, how the run ends."""
        return self.ending.is_decided and self.ending.state.decided_at < now

    def lost_one_before(self, now: float) -> bool:
        """Whether one of its ranks had gone at this time, its work undone: its launch is over."""
        away = chain((self.ranks[number] for number in self.books.away), self.ending.silence.quiet)
        return any(rank.is_gone_since(now, self.options.lost_after) for rank in away)

    def may_leave(self, number: int) -> bool:
        """Whether this rank may be of a later launch: it runs, and has reported nothing."""
        rank = self.ranks[number]
        return rank.is_running and not (self.ending.is_decided or rank.seq or rank.trip)

    def report(self) -> Report:
        return report_of(self)

    def take_journal(self) -> list[Entry]:
        """The entries since the last call, to be recorded."""
        taken, self.books.journal = self.books.journal, []
        return taken

    # --- what happens to it -------------------------------------------------------------------------------------------

    def desert(self, now: float) -> Iterator[Effect]:
        """None of its ranks is waited for any more."""
        self.ending.lose_all([self.ranks[number] for number in self.books.running], now)
        yield from self.conclude(now, ended=True)

    def tune(self, tuning: Tuning, now: float) -> SendAll:
        """Changes options of the ranks: connected ranks are sent the change now, the others when they connect."""
        self.books.note_down(now, messages.Tune(self.id, tuning))
        self.tuning = self.tuning.then(tuning)
        return self._send_tuning()

    def _send_tuning(self) -> SendAll:
        listening = [rank.peer for rank in self.ranks.values() if rank.is_running and rank.connected]
        return SendAll(listening, messages.Tune(self.id, self.all_tuning))

    def interrupt_job(self, event: JobInterrupted, now: float) -> Iterator[Effect]:
        """A signal is ending the job's command."""
        self.books.note_down(now, event)
        yield from self.ending.interrupt(event.signal, now)

    def hear_of_sibling(self, run: str, now: float) -> None:
        """The run of another model of the same processes has stopped them."""
        self.ending.happens(Incident.SIBLING_STOPPED, run, now)

    def judged(self, reasons: Sequence[Doubt], batches: int, now: float) -> Iterator[Effect]:
        """The numbers of its first batches give these reasons against it."""
        if self.is_open:
            yield from self.doubts.take(reasons, batches, now)

    def command_ended(self, now: float) -> None:
        """The command has failed or was killed: the ranks that still beat are to be stopped."""
        self.ending.orphans.begin(now)

    def end_job(self, end: JobEnded, now: float) -> Iterator[Effect]:
        """The processes of the job have ended (exit code None: the collector is being ended)."""
        self.books.note_down(now, end)
        self.ending.end_job(end, now)
        yield from self.conclude(now, ended=True)

    # --- as time passes -----------------------------------------------------------------------------------------------

    def tick(self, now: float) -> Iterator[Effect]:
        """Time has passed."""
        self.ticked_at = now
        if now - self._looked_at >= self.options.heartbeat / 4:
            self._looked_at = now
            yield from self.ending.look(now, self.successor)
            yield from self._look_for_stall(now)
            yield from self._look_who_is_waited_for(now)
            if self.pace.look(now, is_given=self.tuning.every is not None):
                yield self._send_tuning()
            if self.ending.state.is_open:
                yield from self.stalls.look_who_is_waited_for(now)
        if self.replicas.is_due(now):
            yield from self._tell_desync(now)
        self.replicas.note_compared(now)
        if now - self._shown_at >= self.options.heartbeat:
            yield self._show(now)
        if self.ending.abort.is_due(now):
            yield self.ending.abort.send(self.ranks, now)
        yield from self.conclude(now)

    def conclude(self, now: float, *, ended: bool = False) -> Iterator[Effect]:
        """Decides, publishes and closes, as soon as each can be done. ``ended``: no rank can report anything any more."""
        if self.over:
            return
        if ended or self.ending.have_all_ended(now):
            self.replicas.watch.end()
            yield from self._tell_desync(now)
        if self.ending.state.situation is Situation.ELECTION and (ended or self.trips.election.is_due(now)):
            told = self.trips.look(now, ended=ended, before=self.skips.before)
            yield from self._carry_out(told, Incident.ELECTED, now)
        if self.skips.open:
            yield from self._look_for_skips(now, ended=ended or self.ending.have_all_ended(now))
        if self.ending.is_decided and not self.ending.is_published and (ended or self._is_settled(now)):
            self.ending.is_published = True
            yield from self._look_at_calls(now, ended=True)
            self.ending.look_for_absent(now, self.calls.explain)
            yield from self._look_for_skips(now, ended=True)
            yield from self._tell_desync(now)
            self.replicas.note_compared(now, at_once=True)
            yield from self.ending.tell()
            yield Publish(self.report(), news=True)
        if ended or self.ending.have_all_ended(now):
            yield from self._look_for_stall(now, ended=True)
            is_news = not self.ending.is_published
            self.ending.close(now, self.calls.explain)
            self.replicas.note_compared(now, at_once=True)
            self.batches.end(self.ranks.values())
            self.books.find(now, Closed())
            yield self._show(now)
            if self.ending.is_unused:
                yield self.books.note(f"dropped: {self.ending.state.reason}")
            else:
                yield from self.ending.tell()
                yield Publish(self.report(), news=is_news)

    def _is_settled(self, now: float) -> bool:
        """Whether the report can be printed: the abort is answered, and the ranks asked have told all, or are late."""
        if self.ending.abort.message is None:
            return self.ending.have_all_ended(now)
        is_answered = self.ending.abort.is_answered(now) and self.trips.is_heard(now)
        return is_answered and not (self.stalls.stacks.are_awaited(now) or self.calls.are_awaited)

    def _look_for_stall(self, now: float, *, ended: bool = False) -> Iterator[Effect]:
        yield from self._look_at_calls(now, ended=ended)
        is_open, is_awaited = self.ending.state.is_open, self.calls.are_awaited
        told = self.stalls.look(now, self.calls.explain, is_awaited, is_open=is_open, ended=ended)
        yield from self._carry_out(told, Incident.STALLED, now)

    def _look_at_calls(self, now: float, *, ended: bool) -> Iterator[Effect]:
        stalls = self.stalls
        yield from self.tell_calls(self.calls.look(now, stalls.watch.stall, stalls.stacks, ended=ended), now)

    def tell_calls(self, told: Iterable[Effect | Worry], now: float) -> Iterator[Effect]:
        """What the desk of collectives tells. It stops no rank."""
        yield from self._carry_out(told, Incident.STALLED, now)

    def _look_for_skips(self, now: float, *, ended: bool) -> Iterator[Effect]:
        is_open = self.ending.state.is_open
        told = self.skips.look(now, ended=ended, is_open=is_open, differ=self.replicas.describe_split)
        yield from self._carry_out(told, Incident.BEYOND_HELP, now)

    def _tell_desync(self, now: float) -> Iterator[Effect]:
        yield from self._carry_out(self.replicas.look(now), Incident.DESYNCED, now)

    def _carry_out(self, told: Iterable[Effect | Stop | Worry], incident: Incident, now: float) -> Iterator[Effect]:
        """What a desk tells, with what follows from it: for which incident it stops the ranks."""
        for one in told:
            if isinstance(one, Stop):
                yield from self.ending.stop(incident, one, now)
            elif not isinstance(one, Worry):
                yield one
            elif not self.ending.is_decided:
                if one.trouble is Trouble.DESYNC:
                    self.pace.take_odd("the replicas came apart")
                yield Alert(one.trouble, one.text, self.report())

    def _look_who_is_waited_for(self, now: float) -> Iterator[Effect]:
        before, self._noted_waiting = self._noted_waiting, self.waiting
        if self._noted_waiting != before:
            yield self._show(now)
            if self._noted_waiting:
                yield self.books.note(self._noted_waiting)

    def _show(self, now: float) -> Show:
        self._shown_at = now
        return show_of(self, now)

    # --- from the record ----------------------------------------------------------------------------------------------

    def replay(self, entry: Entry) -> None:
        """Takes a recorded fact. Its effects were carried out before; what was decided upon it is recorded too."""
        now, number, fact = entry
        effects: Iterable[Effect] = ()
        if isinstance(fact, Finding):
            self.books.apply(entry)
        elif isinstance(fact, JobInterrupted):
            effects = self.interrupt_job(fact, now)
        elif isinstance(fact, JobEnded):
            effects = self.end_job(fact, now)
        elif isinstance(fact, Waited):
            effects = self.conclude(now)
        elif isinstance(fact, messages.Hello):
            effects = self.intake.welcome(fact, NOBODY, now)
        elif isinstance(fact, messages.Tune):
            self.tune(fact.tuning, now)
        elif not isinstance(fact, (OwnFact, Trained)):  # of batches, ``resume`` is told
            effects = self.intake.receive(number, fact, now)
        deque(effects, maxlen=0)
        self.books.journal.clear()

    def resume(self, progress: Iterable[Progress], now: float) -> None:
        """After a replay: the ranks have yet to reconnect, as if this collector had been cut off from all of them.

        Args:
            progress: the last parts of batches of each rank, in the order in which they came.
        """
        for number, seq, batch, step, first_frame, frames, loss in progress:
            self.ranks[number].seq = max(self.ranks[number].seq, seq)
            self.ranks[number].take(batch, step, first_frame, frames, loss)
        self.ending.silence.deaf_at = now
        self.replicas.watch.resume()
        self.pace.forget()
        for number, rank in self.ranks.items():
            rank.stored, rank.missed = rank.seq, 0
            rank.connected, rank.quiet, rank.cut_off = False, CUT_OFF, True
            rank.heard_at = rank.moved_at = rank.gone_at = now
            if rank.is_running and rank.acknowledged_at is None:
                self.ending.abort.unacknowledged.add(number)
