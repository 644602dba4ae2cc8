"""The abort over a fake clock: it reaches every rank, and the report waits for the acknowledgements."""

from __future__ import annotations

from dataclasses import replace

import pytest

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.effects import EndProcess, Note, Publish, Send
from rankwatch_monitor.decide.core.ledger import Received
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.rank import Rank
from rankwatch_monitor.decide.core.report import Outcome, RankState
from rankwatch_monitor.decide.ending.abort import DEAF_MARGIN, AbortDelivery


def test_abort_goes_to_every_rank_and_is_repeated_until_it_is_acknowledged() -> None:
    desk = connected(2, abort_repeat=0.5)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.receive(1, makers.beat(0, 0, 1))
    (abort,) = desk.sent(0, messages.Abort)
    assert (abort.rank, abort.time, abort.grace) == (0, 1000.0, 10.0)
    assert desk.sent(1, messages.Abort) == [abort]
    desk.receive(0, messages.Ack(1, abort=True))
    desk.take()
    desk.wait(1.1)
    assert desk.sent(0, messages.Abort) == []
    assert desk.sent(1, messages.Abort) == [abort, abort]
    desk.receive(1, messages.Bye(1, "aborted", ""))
    desk.take()
    desk.wait(1.1)
    assert desk.sent(1, messages.Abort) == []


def test_an_acknowledgement_of_messages_is_none_of_the_abort() -> None:
    desk = connected(1, abort_repeat=0.5)
    desk.receive(0, messages.Tripped(1, makers.trip()), messages.Ack(1, abort=False))
    assert desk.reports == []
    desk.take()
    desk.wait(0.6)
    assert len(desk.sent(0, messages.Abort)) == 1  # still to be acknowledged
    desk.receive(0, messages.Ack(1, abort=True))
    assert len(desk.reports) == 1


def test_a_rank_that_comes_late_is_told_at_once() -> None:
    desk = connected(2, ranks=[0], decision_window=0.1)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.wait(0.2)
    desk.connect(2, ranks=[1])
    assert len(desk.sent(1, messages.Abort)) == 1


def test_a_rank_that_does_not_hear_the_abort_is_ended_after_the_grace() -> None:
    desk = connected(3, abort_grace=5.0, decision_window=2.0)
    desk.receive(0, messages.Tripped(1, makers.trip()), messages.Ack(1, abort=True))
    desk.receive(2, makers.beat(0, 0, 1), messages.Ack(1, abort=True))
    desk.wait(2.0 + 5.0 + DEAF_MARGIN / 2)  # it may yet end by itself
    assert not desk.asked(EndProcess)
    desk.wait(DEAF_MARGIN)
    (ended,) = desk.asked(EndProcess)
    hello = makers.hello(1, 3)
    assert ended == EndProcess(hello.host, hello.pid, hello.incarnation)


def test_a_rank_that_was_heard_lately_or_is_gone_is_not_ended() -> None:
    desk = connected(3, abort_grace=5.0)
    desk.receive(0, messages.Tripped(1, makers.trip()), messages.Ack(1, abort=True))
    desk.disconnect(2)
    desk.keep_hearing(1, makers.beat(0, 0, 0), times=10, every=4.0)
    assert not desk.asked(EndProcess)


def test_a_rank_that_is_cut_off_as_all_are_is_not_ended_for_not_hearing_the_abort() -> None:
    desk = connected(1, abort_grace=8.0)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.wait(5.0)
    desk.disconnect(0)
    desk.wait(60.0)
    assert (desk.run.ranks[0].state, desk.asked(EndProcess)) == (RankState.RUNNING, [])


def test_a_rank_that_may_hold_work_is_not_ended_before_that_is_over() -> None:
    desk = connected(2, abort_grace=1.0, hold_limit=30.0)
    desk.receive(1, replace(makers.beat(0, 0, 0), holds=True))
    desk.receive(0, messages.Tripped(1, makers.trip()), messages.Ack(1, abort=True))
    desk.wait(29.0)
    assert not desk.asked(EndProcess)
    desk.wait(10.0)
    assert [effect.pid for effect in desk.asked(EndProcess)] == [makers.hello(1, 2).pid]


def test_the_report_is_published_once_all_have_acknowledged_and_again_at_the_end() -> None:
    desk = connected(2)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.receive(1, makers.beat(0, 0, 1))
    assert desk.reports == []
    desk.now += 0.25
    desk.receive((0, 1), messages.Ack(1, abort=True))
    (report,) = desk.reports
    assert (report.outcome, report.acknowledged_in) == (Outcome.ABORTED, 0.25)
    desk.end(exit_code=1)
    last = desk.reports[-1]
    assert [row.state for row in last.ranks] == [RankState.ABORTED] * 2
    assert [e.news for e in desk.asked(Publish)] == [True, False]
    assert desk.ledger.is_idle


def test_the_report_does_not_wait_for_ever_for_an_acknowledgement() -> None:
    desk = connected(1, acknowledge_window=1.0)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.wait(1.1)
    assert len(desk.reports) == 1
    assert not desk.reports[0].ranks[0].acknowledged


def test_the_culprit_is_the_first_to_get_the_abort() -> None:
    ranks = {number: Rank(makers.hello(number, 4), b"%d" % number, 0.0, 0.0) for number in range(4)}
    delivery = AbortDelivery(repeat=0.5, window=3.0, unacknowledged={0, 1, 2, 3})
    delivery.begin(messages.Abort("inf", 2, 0.0, 10.0), now=0.0)
    assert [int(peer) for peer in delivery.send(ranks, now=0.0).peers] == [2, 0, 1, 3]
    delivery.unacknowledged.discard(2)
    assert [int(peer) for peer in delivery.send(ranks, now=0.5).peers] == [0, 1, 3]


@pytest.mark.parametrize(
    ("size", "seconds"), [(2, (1.0, 2.0, 3.0, 0.5)), (8192, (4.0, 2.0, 3.0, 1.0)), (16384, (8.0, 4.0, 4.0, 2.0))]
)
def test_very_many_ranks_beat_more_slowly_and_have_longer_to_answer(size: int, seconds: tuple[float, ...]) -> None:
    options = Options().for_world(size)
    assert (options.heartbeat, options.decision_window, options.acknowledge_window, options.abort_repeat) == seconds


def test_no_rank_ends_before_the_last_hold_does() -> None:
    """Those that are through would end by themselves, and one that waits in a collective by its deadline."""
    desk = connected(4, hold_limit=300)
    desk.receive(1, replace(makers.beat(0, 0, 1), holds=True))
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.receive((2, 3), makers.beat(0, 0, 1))
    assert Note("run train-0: rank 1 of 4 (node0, local rank 1) is saving: the abort waits up to 300 s") in desk.effects
    for rank in range(4):
        assert desk.sent(rank, messages.Stay) == [messages.Stay(300.0)]
    desk.take()
    desk.wait(1)
    desk.receive((0, 2), messages.Ack(1, abort=True), messages.Bye(2, "aborted", ""))
    assert desk.sent(0, messages.Stay) == [messages.Stay(309.0)]
    desk.take()
    desk.receive(1, makers.beat(0, 0, 1))
    for rank in range(4):  # the grace begins; ranks 0 and 2 have closed
        assert desk.sent(rank, messages.Stay) == [messages.Stay(0.0 if rank in (1, 3) else 10.0)]


def test_a_rank_that_fails_while_another_one_saves_stays() -> None:
    desk = connected(2, hold_limit=300)
    desk.receive(1, replace(makers.beat(0, 0, 1), holds=True))
    desk.receive(0, messages.Bye(1, "failed", "ValueError: no data"))
    assert desk.sent(0, messages.Stay) == [messages.Stay(310.0)]  # the limit, and the grace


def test_ranks_that_no_end_of_another_one_can_cut_are_not_told_to_stay() -> None:
    desk = connected(4, hold_limit=300)
    desk.receive(2, messages.Bye(1, "finished", ""))
    desk.receive(3, messages.Bye(1, "ended", ""))
    desk.receive(1, replace(makers.beat(0, 0, 1), holds=True))
    desk.receive(0, messages.Bye(1, "failed", "ValueError: no data"))
    assert [len(desk.sent(rank, messages.Stay)) for rank in range(4)] == [1, 1, 0, 0]


def test_a_rank_that_connects_anew_while_another_one_saves_is_told_again() -> None:
    desk = connected(2, hold_limit=300)
    desk.receive(1, replace(makers.beat(0, 0, 1), holds=True))
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.take()
    desk.handle(Received(b"anew", makers.hello(0, 2)))
    desk.wait(0.25)
    assert [type(e.message) for e in desk.asked(Send) if e.peer == b"anew"][-1] is messages.Stay


def test_a_collector_that_was_restarted_waits_for_a_hold_too() -> None:
    """Also if time alone has decided, and no message of a rank."""
    first = connected(3, hold_limit=300)
    first.receive((0, 1), makers.beat(0, 0, 1))
    first.disconnect(2)
    first.keep_hearing((0, 1), makers.beat(0, 0, 1), times=4, every=1.0)
    assert first.run.report().outcome is Outcome.LOST
    desk = Desk(first.options, now=first.now, records=dict(first.records))
    desk.ledger.restore("train-0", first.records["train-0"], [], desk.now)
    desk.connect(3, (0, 1))
    desk.receive(1, replace(makers.beat(0, 0, 1), holds=True))
    desk.wait(0.5)
    assert 290 < desk.sent(0, messages.Stay)[0].seconds < 300


def test_a_hold_is_waited_for_up_to_the_limit_and_is_no_loss() -> None:
    desk = connected(2, hold_limit=5)
    desk.receive(1, replace(makers.beat(0, 0, 1), holds=True))
    desk.receive(0, messages.Tripped(1, makers.trip()), messages.Bye(2, "aborted", ""))
    desk.wait(4.9)
    assert desk.sent(0, messages.Stay) == [messages.Stay(5.0), messages.Stay(15.0)]
    desk.take()
    desk.wait(9.9)
    assert desk.sent(0, messages.Stay) == []
    desk.wait(0.5)
    assert desk.sent(0, messages.Stay) == [messages.Stay(0.0)]
    assert desk.run.ranks[1].is_running
