"""What a rank spools comes to the record once, whatever happens to the connection, the disk and the collector.

The real spool, outbox and ledger, with a network that loses what is under way, a disk that lags, and collectors that are
killed and resume from what was stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

import makers
from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.stream_limit import LEAST
from rankwatch.tell.outbox import Outbox
from rankwatch.tell.spool import Spool
from rankwatch_monitor.decide.core.effects import Effect, Send, SendAll
from rankwatch_monitor.decide.core.journal import Entry, Progress, Trained
from rankwatch_monitor.decide.core.ledger import Ledger, Received, Stored
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.serve.files.unwritten import seqs_of

RUN = "train-0"


class Stream:
    """One rank of two, and its collector."""

    def __init__(self, seed: int, trips: int) -> None:
        self.random = Random(seed)
        self.options = Options(window=self.random.choice([1, LEAST, 2 * LEAST, 4 * LEAST]), decision_window=1e6)
        self.ledger = Ledger(self.options)
        self.now = 0.0
        self.journal: list[Entry] = []
        self.stored = 0
        self.spool = Spool()
        self.outbox = Outbox(self.spool)
        self.connections = 0
        self.is_online = False
        self.up: list[messages.Message] = [makers.hello(0, 2)]
        self.down: list[messages.Message] = []
        self.batches = self.trips = self.closeups = 0
        self.most_trips = trips
        self._perform(self.ledger.handle(Received(b"other", makers.hello(1, 2)), 0.0))

    @property
    def peer(self) -> bytes:
        return b"rank 0, connection %d" % self.connections

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if (isinstance(effect, Send) and effect.peer == self.peer) or (
                isinstance(effect, SendAll) and self.peer in effect.peers
            ):
                self.down.append(effect.message)
        self.journal += [entry for _, entries in self.ledger.take_journals() for entry in entries]

    def train(self) -> None:
        self.batches += 1
        self.spool.append(lambda seq: messages.Batch(seq, makers.summary(seq)), makers.table())

    def trip(self) -> None:
        if self.trips < self.most_trips:
            self.trips += 1
            self.spool.append(lambda seq: messages.Tripped(seq, makers.trip(at=(seq, 0, 1))))
            if self.random.random() < 0.5:
                self.closeups += 1
                self.spool.append(lambda seq: messages.LookedCloser(seq, makers.closeup()))

    def send(self) -> None:
        if self.is_online:
            self.outbox.send(self._send)

    def _send(self, message: messages.Message) -> int:
        if self.random.random() < 0.1:  # the socket is full
            return 0
        self.up.append(message)
        return len(wire.encode(message))

    def beat(self) -> None:
        if self.is_online:
            self.up.append(makers.beat(0, 0, 0))

    def arrive(self) -> None:
        if self.up:
            message = self.up.pop(0)
            self._perform(self.ledger.handle(Received(self.peer, message, size=len(wire.encode(message))), self.now))

    def answer(self) -> None:
        if not self.down:
            return
        message = self.down.pop(0)
        if isinstance(message, messages.Welcome):
            self.outbox.renew(message)
            self.is_online = True
        elif isinstance(message, messages.Ack):
            self.outbox.take_ack(message)
        elif isinstance(message, messages.Error) and message.remedy == "hello":
            self.is_online = False
            self.up.append(makers.hello(0, 2))

    def store(self, most: int = 3) -> None:
        new = self.journal[self.stored : self.stored + most]
        self.stored += len(new)
        if new:
            self._perform(self.ledger.handle(Stored(RUN, seqs_of(new)), self.now))

    def reconnect(self) -> None:
        self.connections += 1
        self.up, self.down, self.is_online = [makers.hello(0, 2)], [], False

    def resume(self) -> None:
        """The collector is killed: what was not stored is lost."""
        if self.stored < 3:
            return
        self.journal = self.journal[: self.stored]
        trained = [(rank, fact) for _, rank, fact in self.journal if isinstance(fact, Trained)]
        progress = [
            Progress(rank, seq, summary.batch, summary.optimizer_step, summary.first_frame, len(table.specs), 0.0)
            for rank, (seq, summary, table) in trained
        ]
        self.ledger = Ledger(self.options)
        self.ledger.restore(RUN, self.journal, progress, self.now)
        self.ledger.take_journals()
        self.reconnect()

    def settle(self) -> None:
        for turn in range(400):
            while self.up:
                self.arrive()
            while self.down:
                self.answer()
            self.store(1000)
            self.send()
            if not turn % 3:
                self.beat()
            if not (len(self.spool) or self.up or self.down):
                return


CHANCES = dict(train=25, trip=7, send=18, arrive=20, answer=15, store=5, reconnect=3, resume=2, beat=5)


@pytest.mark.parametrize("trips", [1, 3])
def test_all_that_was_spooled_is_recorded_once(trips: int) -> None:
    for seed in range(400):
        stream = Stream(seed, trips)
        names = stream.random.choices(list(CHANCES), list(CHANCES.values()), k=stream.random.randint(5, 60))
        for name in ["arrive", "answer", *names]:
            stream.now += 0.01
            getattr(stream, name)()
        stream.settle()
        facts = [entry.fact for entry in stream.journal if entry.rank == 0]
        numbers = [fact.seq for fact in facts if isinstance(fact, Trained)]
        rank = stream.ledger.runs[RUN].ranks[0]
        assert len(stream.spool) == 0, seed
        assert numbers == sorted(set(numbers)), seed
        assert len(numbers) == stream.batches, seed
        assert sum(isinstance(fact, messages.Tripped) for fact in facts) == stream.trips, seed
        assert sum(isinstance(fact, messages.LookedCloser) for fact in facts) == stream.closeups, seed
        assert (rank.trip is not None, rank.closeup is not None) == (stream.trips > 0, stream.closeups > 0), seed
        assert (rank.ahead, rank.missed) == (set(), 0), seed
