"""A ledger on a fake clock, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import makers
from invariants import CheckedLedger
from rankwatch.shared import messages
from rankwatch_monitor.decide.effects import Effect, Publish, Send, SendAll
from rankwatch_monitor.decide.journal import Entry, JobEnded
from rankwatch_monitor.decide.ledger import Disconnected, Event, Ledger, Received, Stored, Tick
from rankwatch_monitor.decide.options import Options
from rankwatch_monitor.decide.report import Report
from rankwatch_monitor.decide.verdict import Verdict
from rankwatch_monitor.record.facts import row_after
from rankwatch_monitor.record.runs import RunRow
from rankwatch_monitor.serve.held import seqs_of

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

    def receive(self, rank: int, *messages: messages.Message) -> None:
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

    def disconnect(self, rank: int) -> None:
        self.handle(Disconnected(peer(rank)))

    def end(self, exit_code: int | None = 0) -> None:
        self.handle(JobEnded(exit_code))

    def take(self) -> list[Effect]:
        taken, self.effects = self.effects, []
        return taken

    def sent(self, rank: int, kind: type[messages.Message]) -> list[messages.Message]:
        return [
            e.message for e in self.effects if isinstance(e, Send) and e.peer == peer(rank) and isinstance(e.message, kind)
        ]

    def check_records(self) -> None:
        """Asserts that replaying each run's record gives the same run."""
        for name, run in self.ledger.runs.items():
            again = Ledger(self.options).restore(name, self.records[name], [], self.now)
            assert again.verdict == run.verdict
            told, told_again = run.report(), again.report()
            assert (told_again.outcome, told_again.reason) == (told.outcome, told.reason)
            assert told_again.closeup == told.closeup
            assert (told_again.desync, told_again.desync_unkept, told_again.compared) == (
                told.desync,
                told.desync_unkept,
                told.compared,
            )
            assert (told_again.stall, told_again.stacks) == (told.stall, told.stacks)
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
            assert row.batches == told_again.batches

    @property
    def reports(self) -> list[Report]:
        return [effect.report for effect in self.effects if isinstance(effect, Publish)]

    @property
    def verdict(self) -> Verdict | None:
        return next(iter(self.ledger.runs.values())).verdict
