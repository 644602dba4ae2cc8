"""Trips and close-ups that go ahead of their rank's batches, and the acknowledgements that let a rank send more batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import makers
from desk import Desk, connected, peer
from rankwatch.shared.types import messages
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.frame import FrameTable
from rankwatch.shared.types.stream_limit import LEAST, WINDOW
from rankwatch.shared.types.trip import Cause
from rankwatch_monitor.decide.core.effects import Send
from rankwatch_monitor.decide.core.ledger import Received
from rankwatch_monitor.decide.core.options import WINDOWS, Options
from rankwatch_monitor.decide.core.rank import TURN_MARGIN, Rank
from rankwatch_monitor.decide.trip.verdict import Verdict

TABLE = FrameTable((makers.ROOT_LOSS,))
DIVERGING = [4.2, 3e2, 2.6e4, 4e6]


def life(losses: list[float], *, trips: bool, passed: bool) -> list[messages.Message]:
    """What a rank with these losses says after its HELLO."""
    said: list[messages.Message] = [messages.Table(TABLE)]
    said += [makers.loss_batch(number, loss) for number, loss in enumerate(losses)]
    end, seq = len(losses), len(losses) + 1
    if trips:
        return [*said, messages.Tripped(seq, makers.trip(at=(end, 0, 1), step=end))]
    return [*said, makers.beat(end + 9, 0, 0)] if passed else said


def going_ahead(message: messages.Message) -> messages.Message:
    assert isinstance(message, (messages.Tripped, messages.LookedCloser))
    return replace(message, seq=messages.AHEAD)


def bare(verdict: Verdict | None) -> Verdict | None:
    return verdict and replace(verdict, also=())


def rank_of(desk: Desk) -> Rank:
    """Rank 0."""
    return desk.run.ranks[0]


losses = st.sampled_from([DIVERGING, DIVERGING[:2], [1.0] * 6, [1.0] * 3]) | st.lists(st.floats(0.1, 1e6), max_size=6)
lives = st.builds(lambda of, trips, passed: life(of, trips=trips, passed=passed), losses, st.booleans(), st.booleans())


@settings(max_examples=150, derandomize=True)
@given(losses, st.lists(lives, max_size=3), st.data())
def test_the_verdict_is_the_same_wherever_the_trip_comes_among_the_batches_of_its_rank(
    own: list[float], others: list[list[messages.Message]], data: st.DataObject
) -> None:
    said = life(own, trips=True, passed=False)
    place = data.draw(st.integers(0, len(said) - 1))
    in_order, ahead = (Desk(Options(decision_window=100)) for _ in range(2))
    for desk, order in ((in_order, said), (ahead, [*said[:place], going_ahead(said[-1]), *said[place:]])):
        desk.connect(1 + len(others))
        for rank, of in enumerate(others, 1):
            desk.receive(rank, *of)
        desk.receive(0, *order)
        desk.wait(0.1)
    # Who tripped beside the culprit is known as far as it came before the verdict.
    assert bare(ahead.verdict) == bare(in_order.verdict)
    rows = [desk.run.report() for desk in (ahead, in_order)]
    assert rows[0].ranks == rows[1].ranks
    assert rows[0].frames_in_batch == rows[1].frames_in_batch
    for run in (in_order.records["train-0"], ahead.records["train-0"]):
        assert sum(entry.rank == 0 and isinstance(entry.fact, messages.Tripped) for entry in run) == 1
    for desk in (ahead, in_order):
        assert (rank_of(desk).seq, rank_of(desk).stored) == (len(said) - 1,) * 2


def test_the_report_waits_for_the_batches_before_the_trip_but_not_long() -> None:
    """What is printed must not be contradicted by what comes right after it."""
    for comes in (True, False):
        desk = connected(2)
        desk.receive(1, *life(DIVERGING, trips=False, passed=True))
        *batches, trip = life(DIVERGING, trips=True, passed=False)
        desk.receive(0, going_ahead(trip))
        desk.receive((0, 1), messages.Ack(0, abort=True))
        desk.wait(0.1)
        assert desk.reports == []
        if comes:
            desk.receive(0, *batches, trip)
        desk.wait(TURN_MARGIN)
        causes = [report.verdict.cause for report in desk.reports if report.verdict]
        assert causes == [Cause.DIVERGENCE if comes else Cause.OVERFLOW]


def test_a_divergence_is_found_when_the_batches_before_the_trip_are_here() -> None:
    desk = connected(2)
    desk.receive(1, *life(DIVERGING, trips=False, passed=True))
    *batches, trip = life(DIVERGING, trips=True, passed=False)
    assert isinstance(trip, messages.Tripped)
    desk.receive(0, going_ahead(trip))
    (abort,) = desk.sent(1, messages.Abort)  # which does not wait for the batches
    assert abort.rank == 0
    desk.receive(0, *batches)
    causes = [desk.verdict and desk.verdict.cause]
    desk.receive(0, trip)
    causes.append(desk.verdict and desk.verdict.cause)
    assert causes == [Cause.OVERFLOW, Cause.DIVERGENCE]


def test_batches_that_a_rank_dropped_before_its_trip_are_a_gap_although_the_trip_went_ahead() -> None:
    desk = connected(1)
    trip = messages.Tripped(8, makers.trip(at=(7, 0, 1)))
    desk.receive(0, messages.Table(makers.table()), messages.Batch(1, makers.summary(0)), going_ahead(trip))
    desk.receive(0, messages.Batch(7, makers.summary(6)), trip)
    (gap,) = desk.run.report().gaps
    assert (gap.first, gap.last) == (1, 5)


@pytest.mark.parametrize("comes_again", [False, True])
def test_a_closeup_that_goes_ahead_counts_at_once_and_once(comes_again: bool) -> None:
    desk = connected(1)
    trip, found = messages.Tripped(2, makers.trip()), messages.LookedCloser(3, makers.closeup())
    desk.receive(0, going_ahead(trip), going_ahead(found))
    assert isinstance(rank_of(desk).closeup, CloseUp)
    if comes_again:
        desk.receive(0, messages.Table(makers.table()), messages.Batch(1, makers.summary(0)), trip, found)
        desk.receive(0, makers.beat(0, 0, 1))
        assert desk.sent(0, messages.Ack)[-1] == messages.Ack(3, abort=False, handled=3)
    facts = [type(entry.fact) for entry in desk.records["train-0"]]
    assert [facts.count(kind) for kind in (messages.Tripped, messages.LookedCloser)] == [1, 1]


@pytest.mark.parametrize(
    "message", [messages.Bye(0, "finished", ""), messages.Off(0, "x"), messages.Noticed(0, makers.notice())]
)
def test_nothing_else_goes_ahead(message: messages.Message) -> None:
    desk = connected(1)
    desk.receive(0, message)
    rank = rank_of(desk)
    assert rank.is_running
    assert (rank.fault, rank.ahead, desk.run.report().notices) == ("", set(), ())


def test_a_rank_is_told_each_time_that_half_of_its_window_was_handled() -> None:
    desk = connected(1, window=10 * LEAST)
    assert desk.sent(0, messages.Welcome) == [messages.Welcome("train-0", 1.0, 2.0, 0, window=10 * LEAST)]
    desk.receive(0, messages.Table(makers.table()))
    told = list[int]()
    for seq in range(1, 12):
        effects = desk.handle(Received(peer(0), messages.Batch(seq, makers.summary(seq)), size=100))
        told += [seq for effect in effects if effect == Send(peer(0), messages.Ack(seq - 1, abort=False, handled=seq))]
        if seq == 7:
            desk.receive(0, makers.beat(7, 0, 0))  # the answer tells it as well
    assert told == [5]
    assert desk.sent(0, messages.Ack)[-1] == messages.Ack(7, abort=False, handled=7)


def test_what_is_sent_again_after_a_reconnect_opens_the_window_too() -> None:
    desk = connected(1, window=2 * LEAST)
    desk.receive(0, messages.Table(makers.table()), messages.Batch(9, makers.summary(9)))
    effects = desk.handle(Received(peer(0), messages.Batch(8, makers.summary(8)), size=100))
    assert effects == [Send(peer(0), messages.Ack(9, abort=False, handled=9))]


def test_the_ranks_of_a_large_world_share_the_windows() -> None:
    windows = [Options().for_world(size).window for size in (1, 64, 1024, 16_384)]
    assert windows == [WINDOW, WINDOW, LEAST, 1 << 10]
    assert all(size * Options().for_world(size).window <= WINDOWS for size in (1, 1024, 16_384))
