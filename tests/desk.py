"""A ledger on a fake clock, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import strategies as st

import makers
from invariants import CheckedLedger
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.effects import Effect, Note, Publish, Send, SendAll
from rankwatch_monitor.decide.core.journal import Entry, JobEnded
from rankwatch_monitor.decide.core.ledger import Disconnected, Event, Ledger, Received, Stored, Tick
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.report import Report
from rankwatch_monitor.decide.core.run import Run
from rankwatch_monitor.decide.trip.verdict import Verdict
from rankwatch_monitor.record.facts import row_after
from rankwatch_monitor.record.runs import RunRow
from rankwatch_monitor.serve.files.unwritten import seqs_of

M = TypeVar("M", bound=messages.Message)
E = TypeVar("E", bound=Effect)

DESKS: list[Desk] = []
"""The desks of the running test."""


def peer(rank: int) -> bytes:
    return b"peer-%d" % rank


def _each(effect: Effect) -> list[Effect]:
    return [Send(to, effect.message) for to in effect.peers] if isinstance(effect, SendAll) else [effect]


@dataclass
class Desk:
    """A ledger, its clock, and all the effects that it asked for."""

    options: Options = field(default_factory=Options)
    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)
    records: dict[str, list[Entry]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = CheckedLedger(self.options)
        DESKS.append(self)

    def receive(self, ranks: int | Iterable[int], *messages: messages.Message) -> None:
        """A rank sends these messages, or each of several ranks does."""
        for rank in [ranks] if isinstance(ranks, int) else ranks:
            for message in messages:
                self.handle(Received(peer(rank), message))

    def handle(self, event: Event) -> list[Effect]:
        """The effects of an event. Journal entries are recorded at once."""
        effects = [one for effect in self.ledger.handle(event, self.now) for one in _each(effect)]
        self.effects += effects
        for run, entries in self.ledger.take_journals():
            self.records.setdefault(run, []).extend(entries)
            self.handle(Stored(run, seqs_of(entries)))
        return effects

    def connect(self, world_size: int, ranks: Sequence[int] | None = None) -> None:
        for rank in range(world_size) if ranks is None else ranks:
            self.receive(rank, makers.hello(rank, world_size))

    def wait(self, seconds: float) -> None:
        """Advances the clock in the collector's steps."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.05)
            self.handle(Tick())

    def keep_hearing(self, ranks: int | Iterable[int], message: messages.Message, *, times: int, every: float) -> None:
        """Time passes, and these ranks send the message again and again."""
        for _ in range(times):
            self.wait(every)
            self.receive(ranks, message)

    def disconnect(self, rank: int) -> None:
        self.handle(Disconnected(peer(rank)))

    def leave(self, rank: int, outcome: str, text: str = "") -> None:
        self.receive(rank, messages.Bye(2, outcome, text))
        self.disconnect(rank)

    def end(self, exit_code: int | None = 0) -> None:
        self.handle(JobEnded(exit_code))

    def answers(self, event: Received) -> list[messages.Message]:
        """What the peer is sent upon its message."""
        return [effect.message for effect in self.handle(event) if isinstance(effect, Send) and effect.peer == event.peer]

    def receive_mixed(self, queues: dict[int, list[messages.Message]], data: st.DataObject) -> None:
        """Each rank sends its messages in their order; those of several ranks come in any order, and at any time."""
        while any(queues.values()):
            rank = data.draw(st.sampled_from([rank for rank, queue in queues.items() if queue]))
            self.receive(rank, queues[rank].pop(0))
            if data.draw(st.booleans()):
                self.now += data.draw(st.floats(0, 0.5))
                self.handle(Tick())

    def take(self) -> list[Effect]:
        taken, self.effects = self.effects, []
        return taken

    def sent(self, rank: int, kind: type[M]) -> list[M]:
        sent = [effect.message for effect in self.asked(Send) if effect.peer == peer(rank)]
        return [message for message in sent if isinstance(message, kind)]

    def asked(self, kind: type[E]) -> list[E]:
        """The effects of one kind that the ledger asked for."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def check_records(self) -> None:
        """Asserts that replaying each run's record gives the same run."""
        for name, run in self.ledger.runs.items():
            again = Ledger(self.options).restore(name, self.records[name], [], self.now)
            assert again.verdict == run.verdict
            told, told_again = run.report(), again.report()
            assert (told_again.outcome, told_again.reason, told_again.end) == (told.outcome, told.reason, told.end)
            assert told_again.closeup == told.closeup
            assert (again.skips.told, again.skips.count) == (run.skips.told, run.skips.count)
            assert told_again.why_not_skipped == told.why_not_skipped
            assert (told_again.desync, told_again.desync_unkept, told_again.compared) == (
                told.desync,
                told.desync_unkept,
                told.compared,
            )
            assert (told_again.stall, told_again.stacks) == (told.stall, told.stacks)
            assert (told_again.collectives, told_again.collectives_unkept) == (told.collectives, told.collectives_unkept)
            assert told_again.gaps == told.gaps or not run.over
            assert told_again.stops_ranks == told.stops_ranks
            assert [row.state for row in told_again.ranks] == [row.state for row in told.ranks]
            assert (again.over, again.tuning) == (run.over, run.tuning)
            row = RunRow("")
            for entry in self.records[name]:
                row = row_after(row, entry.fact)
            assert (row.is_over, row.reason) == (run.over, told.reason)  # a list of runs shows these without a replay
            assert row.outcome == told.outcome or not run.over
            assert row.stalled == told.stalled
            assert bool(row.skipped) == bool(told.skipped)
            assert row.batches == told_again.batches

    @property
    def reports(self) -> list[Report]:
        return [effect.report for effect in self.asked(Publish)]

    @property
    def notes(self) -> list[str]:
        return [effect.text for effect in self.asked(Note)]

    @property
    def run(self) -> Run:
        """The only run."""
        (run,) = self.ledger.runs.values()
        return run

    @property
    def verdict(self) -> Verdict | None:
        return next(iter(self.ledger.runs.values())).verdict

    @property
    def decided(self) -> Verdict:
        """The verdict, where there must be one."""
        assert self.verdict is not None
        return self.verdict


def connected(world_size: int, ranks: Sequence[int] | None = None, **options: Any) -> Desk:
    """A desk with these options, to which all ranks of a world have connected, or the given ones."""
    desk = Desk(Options(**options))
    desk.connect(world_size, ranks)
    return desk
