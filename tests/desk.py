"""A ledger on a fake clock, and everything it wanted done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import makers
from rankwatch import wire
from rankwatch_monitor.effects import Effect, Publish, Send
from rankwatch_monitor.ledger import Disconnected, JobEnded, Ledger, Received, Tick
from rankwatch_monitor.report.data import Report
from rankwatch_monitor.run import Options
from rankwatch_monitor.verdict import Verdict


def peer(rank: int) -> bytes:
    return b"peer-%d" % rank


@dataclass
class Desk:
    """A ledger, its clock, and everything it wanted done."""

    options: Options = field(default_factory=Options)
    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.options)

    def receive(self, rank: int, *messages: wire.Message) -> None:
        for message in messages:
            self.effects += self.ledger.handle(Received(peer(rank), message), self.now)

    def connect(self, world_size: int, ranks: Sequence[int] | None = None) -> None:
        for rank in range(world_size) if ranks is None else ranks:
            self.receive(rank, makers.hello(rank, world_size))

    def wait(self, seconds: float) -> None:
        """Lets time pass, in the collector's steps."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.05)
            self.effects += self.ledger.handle(Tick(), self.now)

    def disconnect(self, rank: int) -> None:
        self.effects += self.ledger.handle(Disconnected(peer(rank)), self.now)

    def end(self, exit_code: int | None = 0) -> None:
        self.effects += self.ledger.handle(JobEnded(exit_code), self.now)

    def take(self) -> list[Effect]:
        taken, self.effects = self.effects, []
        return taken

    def sent(self, rank: int, kind: type[wire.Message]) -> list[wire.Message]:
        return [
            e.message for e in self.effects if isinstance(e, Send) and e.peer == peer(rank) and isinstance(e.message, kind)
        ]

    @property
    def reports(self) -> list[Report]:
        return [effect.report for effect in self.effects if isinstance(effect, Publish)]

    @property
    def verdict(self) -> Verdict | None:
        return next(iter(self.ledger.runs.values())).verdict
