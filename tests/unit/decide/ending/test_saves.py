"""Which stopped rank stays, and until when: the table, and any order of what may happen to the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import makers
from desk import Desk, connected, peer
from rankwatch.shared.types import messages
from rankwatch.tell.departure import Leave
from rankwatch_monitor.decide.core.effects import Send
from rankwatch_monitor.decide.core.ledger import Disconnected, Received, Tick
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.rank import Rank
from rankwatch_monitor.decide.core.report import RankState
from rankwatch_monitor.decide.ending.saves import GO, Holding

GRACE, LIMIT, LOST_AFTER = 10.0, 30.0, 3.0


@pytest.mark.parametrize("state", list(RankState))
@pytest.mark.parametrize(
    ("is_held", "others_run", "of_a_running_one", "of_a_closed_one"),
    [
        (True, True, 100 + LIMIT, 100 + LIMIT + GRACE),
        (True, False, 100 + LIMIT, 100 + LIMIT + GRACE),
        (False, True, GO, 100 + GRACE),
        (False, False, GO, GO),
    ],
)
def test_the_table(
    state: RankState, is_held: bool, others_run: bool, of_a_running_one: float, of_a_closed_one: float
) -> None:
    holding = Holding(LIMIT, GRACE)
    holding.begin(100.0)
    holding.take(Rank(makers.hello(1, 2), b"1", 0.0), holds=is_held)
    rank = Rank(makers.hello(0, 2), b"0", 0.0, state=state)
    due = {RankState.RUNNING: of_a_running_one, RankState.ABORTED: of_a_closed_one, RankState.FAILED: of_a_closed_one}
    assert holding.stays_until(rank, 105.0, others_run=others_run) == due.get(state, GO)


def test_a_rank_that_has_closed_stays_until_all_others_have() -> None:
    desk = connected(3, abort_grace=GRACE)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.receive((1, 2), makers.beat(0, 0, 1))
    desk.receive(0, messages.Bye(2, "aborted", ""))
    assert desk.sent(0, messages.Stay) == [messages.Stay(GRACE)]
    desk.wait(4)
    desk.receive(1, messages.Bye(1, "aborted", ""))
    assert [stay.seconds for stay in desk.sent(1, messages.Stay)] == [pytest.approx(GRACE - 4)]
    desk.take()
    desk.receive(2, messages.Bye(1, "aborted", ""))
    assert [desk.sent(rank, messages.Stay) for rank in range(3)] == [[messages.Stay(0.0)]] * 2 + [[]]


def test_a_lost_rank_is_not_waited_for() -> None:
    desk = connected(2, abort_grace=GRACE)
    desk.receive(0, messages.Bye(1, "failed", "ValueError: no data"))
    desk.disconnect(1)
    desk.wait(LOST_AFTER + 0.5)
    assert [stay.seconds for stay in desk.sent(0, messages.Stay)] == [GRACE, 0.0]


def test_ranks_that_stop_after_their_last_batch_stay_for_each_other() -> None:
    desk = connected(2, abort_grace=GRACE)
    desk.receive(0, messages.Bye(1, "limit", "stopped after batch 3"))
    assert desk.sent(0, messages.Stay) == [messages.Stay(GRACE)]
    desk.receive(1, messages.Bye(1, "limit", "stopped after batch 3"))
    assert desk.sent(0, messages.Stay)[1:] == [messages.Stay(0.0)]


@pytest.mark.parametrize("outcome", ["failed", "finished"])
def test_nobody_stays_for_ranks_that_train_on(outcome: str) -> None:
    desk = connected(2, abort_on_lost=False)
    desk.receive(0, messages.Bye(1, outcome, ""))
    assert desk.sent(0, messages.Stay) == []


def test_a_thread_may_hold_when_the_watch_of_its_rank_is_closed() -> None:
    desk = connected(2, abort_grace=GRACE, hold_limit=LIMIT)
    desk.receive(1, makers.beat(0, 0, 1))
    desk.receive(0, replace(makers.beat(0, 0, 1), holds=True), messages.Tripped(1, makers.trip()))
    desk.receive((0, 1), messages.Bye(2, "aborted", ""))
    assert [stay.seconds for stay in desk.sent(1, messages.Stay)] == [LIMIT, LIMIT + GRACE]
    desk.take()
    desk.receive(0, makers.beat(0, 0, 1))
    assert [desk.sent(rank, messages.Stay) for rank in range(2)] == [[messages.Stay(0.0)]] * 2


def test_of_a_hold_that_is_over_its_limit_nobody_waits_for_the_end() -> None:
    holding = Holding(LIMIT, GRACE)
    holding.begin(100.0)
    saving = Rank(makers.hello(1, 2), b"1", 0.0)
    holding.take(saving, holds=True)
    saving.hear(100.0 + LIMIT + 5.0)
    holding.take(saving, holds=False)
    closed = Rank(makers.hello(0, 2), b"0", 0.0, state=RankState.ABORTED)
    assert holding.stays_until(closed, 100.0 + LIMIT + 5.0, others_run=True) == 100.0 + LIMIT + GRACE


def test_a_rank_whose_process_has_ended_holds_nothing() -> None:
    desk = connected(2, abort_grace=GRACE, hold_limit=LIMIT)
    desk.receive(1, makers.beat(0, 0, 1))
    desk.receive(0, replace(makers.beat(0, 0, 1), holds=True), messages.Tripped(1, makers.trip()))
    desk.receive((0, 1), messages.Bye(2, "aborted", ""))
    desk.disconnect(0)
    desk.wait(0.5)
    assert desk.sent(1, messages.Stay)[-1] == messages.Stay(0.0)


# --- any order ------------------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """A rank as the collector sees it, with the agent's own decision when it may leave."""

    number: int
    leave: Leave = field(default_factory=Leave)
    connection: int = 0
    """Numbers its connections; -1: it has none."""
    seq: int = 0
    stopped_at: float = GO
    has_closed: bool = False
    holds: bool = False
    has_ended: bool = False
    lost_at: float = GO
    """When it became unable to reach the collector."""

    @property
    def is_stopped(self) -> bool:
        return self.stopped_at > GO

    @property
    def peer(self) -> bytes:
        return b"%d-%d" % (self.number, self.connection) if self.connection else peer(self.number)


class Story:
    """A run of ranks that are stopped, hold, close, end, and lose their connections, in any order. At each moment it is checked
    that no rank leaves while another one may save, and that none stays longer than the grace, which holds put off."""

    def __init__(self, size: int) -> None:
        self.desk = Desk(Options(abort_grace=GRACE, hold_limit=LIMIT))
        self.desk.connect(size)
        self.ranks = [Process(number) for number in range(size)]
        self.stopped_at = self.held_at = GO
        self._pass_on()

    def send(self, rank: Process, *sent: messages.Message) -> None:
        for message in sent if rank.connection >= 0 else ():
            self.desk.handle(Received(rank.peer, message))
        self._pass_on()

    def beat(self, rank: Process) -> None:
        self.send(rank, replace(makers.beat(0, 0, 1), holds=rank.holds))

    def trip(self, rank: Process) -> None:
        if not (rank.has_closed or rank.is_stopped or rank.has_ended) and rank.connection >= 0:
            rank.seq += 1
            self.send(rank, messages.Tripped(rank.seq, makers.trip()))

    def hold(self, rank: Process) -> None:
        if not (rank.has_closed or rank.has_ended) and rank.connection >= 0:
            rank.holds = not rank.holds
            self.beat(rank)

    def close(self, rank: Process) -> None:
        if rank.has_closed or rank.has_ended:
            return
        rank.has_closed, rank.seq = True, rank.seq + 1
        is_heard = rank.connection >= 0
        self.send(rank, messages.Bye(rank.seq, "aborted" if rank.is_stopped else "finished", ""))
        if not rank.is_stopped:
            self._end(rank)
        elif is_heard:
            rank.leave.hear_nothing()

    def die(self, rank: Process) -> None:
        self._end(rank)

    def cut(self, rank: Process) -> None:
        """Its connection is lost; later it may be there again."""
        if rank.has_ended:
            return
        if rank.connection >= 0:
            self.desk.handle(Disconnected(rank.peer))
            rank.connection, rank.lost_at = -rank.connection - 1, self.desk.now
            rank.leave.lose(self.desk.now)
        elif self.desk.now - rank.lost_at < LOST_AFTER - 1:
            rank.connection = -rank.connection
            self.send(rank, makers.hello(rank.number, len(self.ranks)))
            self.beat(rank)

    def wait(self, seconds: float) -> None:
        end = self.desk.now + seconds
        while self.desk.now < end:
            self.desk.now += 0.25
            for rank in self.ranks:
                if not rank.has_ended:
                    self.beat(rank)
            self.desk.handle(Tick())
            self._pass_on()

    def may_save(self, rank: Process, now: float) -> bool:
        """As far as the collector can know: with an open watch, or, until the limit, where a thread holds."""
        holds = rank.holds and now < self.stopped_at + LIMIT
        return not rank.has_ended and rank.connection >= 0 and (not rank.has_closed or holds)

    def _end(self, rank: Process) -> None:
        if not rank.has_ended:
            rank.has_ended, rank.holds = True, False
            if rank.connection >= 0:
                self.desk.handle(Disconnected(rank.peer))
            self._pass_on()

    def _pass_on(self) -> None:
        """What the collector sends reaches the ranks that are connected; those that may leave do."""
        by_peer = {rank.peer: rank for rank in self.ranks if rank.connection >= 0 and not rank.has_ended}
        now = self.desk.now
        for effect in self.desk.take():
            rank = by_peer.get(effect.peer) if isinstance(effect, Send) else None
            if rank is None or not isinstance(effect, Send):
                continue
            if isinstance(effect.message, messages.Abort) and not rank.is_stopped:
                rank.stopped_at = now
                self.stopped_at = now if self.stopped_at == GO else self.stopped_at
                rank.leave.stop(effect.message.grace, now)
            elif isinstance(effect.message, messages.Stay):
                rank.leave.tell(effect.message.seconds, now)
        # A rank that cannot be reached is lost after a while, as of when it was heard: so is what it held.
        if any(rank.holds and rank.connection >= 0 for rank in self.ranks) and self.stopped_at > GO:
            self.held_at = min(now, self.stopped_at + LIMIT)
        for rank in self.ranks:
            if rank.has_closed and rank.is_stopped and not rank.has_ended:
                self._look(rank, now)

    def _look(self, rank: Process, now: float) -> None:
        over = max(self.stopped_at, self.held_at) + GRACE
        if rank.leave.left(now):
            assert now <= max(over, rank.stopped_at + GRACE) + LOST_AFTER, f"rank {rank.number} stays past the grace"
            return
        seen = [other for other in self.ranks if other is not rank and self.may_save(other, now)]
        if rank.connection >= 0:  # one that nobody can tell leaves when the grace is over
            assert not seen or now >= over - 0.3, f"rank {rank.number} leaves while {seen[0].number} may save"
        self._end(rank)


STEPS: list[Callable[[Story, Process], None]] = [Story.trip, Story.hold, Story.close, Story.close, Story.die, Story.cut]


STEP = st.tuples(st.sampled_from(STEPS), st.integers(0, 3), st.sampled_from([0, 0.25, 1, 4, 12]))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.lists(STEP, max_size=12))
def test_no_rank_leaves_while_another_one_may_save_and_none_stays_past_the_grace(
    size: int, steps: list[tuple[Callable[[Story, Process], None], int, float]]
) -> None:
    story = Story(size)
    for step, number, seconds in steps:
        step(story, story.ranks[number % size])
        story.wait(seconds)
    story.wait(LIMIT + GRACE + LOST_AFTER + 1)
    assert all(rank.has_ended for rank in story.ranks if rank.has_closed and rank.is_stopped)
