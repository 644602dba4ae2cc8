"""Ranks that fail, die, fall silent or are cut off, over a fake clock."""

from __future__ import annotations

import pytest

import makers
from desk import Desk, connected
from rankwatch.shared.link import sockets
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.journal import NO_RANK, Entry, JobInterrupted, Left, Opened
from rankwatch_monitor.decide.core.ledger import Disconnected, Ledger, RankExited, Received
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.report import Outcome, RankState
from rankwatch_monitor.decide.ending.silence import CUT_SEEN_AFTER
from rankwatch_monitor.decide.trip.verdict import Certainty


def test_a_failed_rank_stops_the_others_and_is_the_reason() -> None:
    desk = connected(2)
    desk.receive(0, messages.Bye(1, "failed", "KeyError: 'x'"))
    (abort,) = desk.sent(1, messages.Abort)
    assert (abort.rank, "rank 0 of 2" in abort.reason, "KeyError: 'x'" in abort.reason) == (-1, True, True)
    desk.receive(1, messages.Ack(0, abort=True))
    desk.end(exit_code=1)
    assert (desk.reports[-1].outcome, desk.verdict) == (Outcome.FAILED, None)
    assert [row.state for row in desk.reports[-1].ranks] == [RankState.FAILED, RankState.ABORTED]


def test_a_disconnected_rank_is_lost_after_three_silent_heartbeats() -> None:
    desk = connected(2, heartbeat=1.0)
    desk.receive(1, makers.beat(7, 0, 3, phase="backward"))
    desk.receive(0, makers.beat(8, 0, 0))
    desk.disconnect(1)
    desk.keep_hearing(0, makers.beat(8, 0, 0), times=4, every=0.7)
    assert desk.sent(0, messages.Abort) == []
    desk.wait(0.5)
    desk.receive(0, makers.beat(8, 0, 0))
    (abort,) = desk.sent(0, messages.Abort)
    assert "rank 1 of 2 (node0, local rank 1) was lost" in abort.reason
    assert "last seen in batch 7, frame 3, phase backward" in abort.reason
    desk.end(exit_code=1)
    assert desk.reports[-1].outcome is Outcome.LOST


def test_the_end_of_an_earlier_connection_says_nothing() -> None:
    """A rank that hears nothing makes another connection, and ends the earlier one once it is welcome."""
    desk = connected(1)
    desk.handle(Received(b"again", makers.hello()))
    desk.disconnect(0)
    assert desk.run.ranks[0].connected
    desk.handle(Disconnected(b"again"))
    desk.wait(10)
    assert desk.run.ranks[0].state is RankState.LOST


def test_of_ranks_that_died_one_after_another_the_first_is_named_whoever_was_heard_last() -> None:
    """As under torchrun: one rank dies, and torchrun ends the others."""
    desk = connected(2)
    desk.wait(0.4)
    desk.receive(1, makers.beat(3, 0, 1))
    desk.disconnect(1)
    desk.wait(0.1)
    desk.disconnect(0)
    desk.wait(10)
    assert desk.reports[-1].outcome is Outcome.LOST
    assert "rank 1 of 2" in desk.reports[-1].reason
    assert desk.reports[-1].reason.endswith("; after it rank 0")


def test_a_silent_rank_whose_connection_stands_is_told_of_and_left_alone() -> None:
    desk = connected(1, heartbeat=1.0)
    desk.wait(60)
    assert sum("is silent, but still connected" in note for note in desk.notes) == 1
    assert (desk.sent(0, messages.Abort), desk.reports) == ([], [])
    desk.receive(0, makers.beat(0, 0, 1))
    desk.wait(60)
    assert sum("is silent, but still connected" in note for note in desk.notes) == 2


def test_many_silent_ranks_are_told_of_in_one_line() -> None:
    desk = connected(64, heartbeat=1.0)
    desk.receive(5, makers.beat(0, 0, 1))
    desk.wait(2)
    desk.receive(5, makers.beat(0, 0, 2))
    desk.wait(2)
    (note,) = [note for note in desk.notes if "silent" in note]
    assert "ranks 0-4, 6-63 of 64 (node0, node1, node2, node3 and 28 more hosts) are silent, but still connected" in note


def test_a_large_world_beats_more_slowly_and_has_longer_to_answer() -> None:
    desk = connected(16_384, ranks=[0], heartbeat=1.0, decision_window=2.0)
    (welcome,) = desk.sent(0, messages.Welcome)
    assert (welcome.heartbeat, welcome.decision_window) == (8.0, 4.0)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.wait(3.9)
    assert desk.verdict is None
    desk.wait(0.2)
    assert desk.verdict is not None


def test_a_record_that_makes_no_sense_leaves_no_half_of_a_run_behind() -> None:
    ledger = Ledger(Options())
    entries = [Entry(0.0, NO_RANK, Opened("train", 0, 1)), Entry(1.0, 5, Left(RankState.LOST))]
    with pytest.raises(KeyError):
        ledger.restore("train-0", entries, [], 2.0)
    with pytest.raises(ValueError, match="does not begin with a run's beginning"):
        ledger.restore("train-0", entries[1:], [], 2.0)
    assert ledger.runs == {}
    ledger.handle(Received(b"a", makers.hello()), 3.0)
    assert list(ledger.runs) == ["train-0"]


def test_a_world_that_there_is_no_room_for_is_told_at_its_first_hello() -> None:
    desk = connected(3, ranks=[0], room=3)
    assert not [note for note in desk.notes if "ulimit" in note]
    desk.receive(0, makers.hello(0, 4, job="larger"))
    (note,) = [note for note in desk.notes if "ulimit" in note]
    assert note.startswith("run larger-0: only 3 ranks can connect, for want of file descriptors")


def test_a_rank_that_died_first_is_the_reason_not_the_one_that_failed_of_it() -> None:
    desk = connected(2)
    desk.receive(1, messages.Bye(1, "failed", "RuntimeError: connection closed by peer"))
    desk.end(exit_code=1)  # rank 0 was killed: it never acknowledged the abort
    report = desk.reports[-1]
    assert report.outcome is Outcome.LOST
    assert report.reason.startswith("rank 0 of 2 (node0, local rank 0) was lost")
    assert report.reason.endswith("then rank 1 of 2 (node0, local rank 1) failed: RuntimeError: connection closed by peer")


def test_on_lost_wait_lets_the_others_run_and_takes_the_rank_back() -> None:
    desk = connected(2, heartbeat=1.0, abort_on_lost=False)
    desk.disconnect(1)
    desk.wait(3.5)
    assert desk.sent(0, messages.Abort) == []
    assert [record.state for record in desk.run.ranks.values()] == [RankState.RUNNING, RankState.LOST]
    desk.connect(2)
    desk.receive((0, 1), messages.Bye(1, "finished", ""))
    assert desk.reports[-1].outcome is Outcome.FINISHED


def test_a_lost_rank_does_not_hold_up_a_verdict() -> None:
    desk = connected(2, heartbeat=0.5, decision_window=60)
    desk.disconnect(1)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 5))))
    desk.keep_hearing(0, makers.beat(3, 0, 5), times=4, every=0.5)
    assert (desk.decided.certainty, desk.decided.missing) == (Certainty.PARTIAL, (1,))


def test_ranks_that_are_all_cut_off_at_once_are_not_lost() -> None:
    desk = connected(2)
    desk.wait(5)  # silent, but connected
    desk.disconnect(0)
    desk.disconnect(1)
    desk.wait(60)
    run = desk.run
    assert {record.state for record in run.ranks.values()} == {RankState.RUNNING}
    desk.handle(Received(b"again", makers.hello(0, 2)))
    for second in range(5):  # the other rank reconnects later
        if second == 4:
            desk.receive(1, makers.beat(0, 0, 4))
        desk.handle(Received(b"again", makers.beat(0, 0, second)))
        desk.wait(1)
        assert run.ranks[1].state is RankState.RUNNING
    assert desk.sent(0, messages.Abort) == []


def test_a_rank_that_was_held_up_and_then_dies_is_lost() -> None:
    """As on a host that ran out of memory. The kernel sees a cut only after a longer silence."""
    desk = connected(1)
    desk.wait(3.5)
    assert desk.run.ranks[0].quiet
    desk.disconnect(0)
    desk.wait(3.5)
    assert desk.reports[-1].outcome is Outcome.LOST


def test_a_silence_is_called_a_cut_no_sooner_than_the_kernel_sees_one() -> None:
    answered = sockets.KEEPALIVE_IDLE + sockets.KEEPALIVE_INTERVAL * sockets.KEEPALIVE_PROBES
    # The first message of the silence may have waited a moment in the collector.
    assert answered - 1 <= CUT_SEEN_AFTER < answered


def stands_still(desk: Desk, seconds: int) -> None:
    """Rank 0 is heard, and waits."""
    desk.keep_hearing(0, makers.beat(0, 0, 1), times=seconds, every=1.0)


def test_a_rank_that_is_cut_off_is_waited_for_while_all_stand_still_and_then_lost() -> None:
    """Nobody saw its process end: its network may lose packets, which holds up the collective in which all of them are."""
    desk = connected(2)
    stands_still(desk, 5)
    desk.disconnect(1)
    stands_still(desk, 23)
    assert desk.sent(0, messages.Abort) == []
    told = "is silent and cut off, and nobody saw its process end: it may come back within 30 s"
    assert sum(told in note for note in desk.notes) == 1
    desk.handle(Received(b"again", makers.hello(1, 2)))
    stands_still(desk, 5)
    desk.handle(Disconnected(b"again"))
    stands_still(desk, 24)
    assert [record.state for record in desk.run.ranks.values()] == [RankState.RUNNING] * 2
    stands_still(desk, 4)
    assert desk.run.ranks[1].state is RankState.LOST
    assert len(desk.sent(0, messages.Abort)) >= 1


@pytest.mark.parametrize("how", ["it was seen to end", "its connection ended while it was heard", "the run is decided"])
def test_a_rank_that_is_known_to_be_dead_or_that_nobody_waits_for_is_not_waited_for(how: str) -> None:
    desk = connected(3)
    desk.receive((0, 1, 2), makers.beat(0, 0, 1))
    if how == "it was seen to end":
        desk.handle(RankExited("train-0", 1, "process-1", "killed by SIGKILL"))
    stands_still(desk, 0 if "heard" in how else 5)
    desk.disconnect(1)
    if how == "the run is decided":
        desk.receive(2, messages.Bye(1, "failed", "KeyError: 'x'"))
    desk.keep_hearing((0, 2), makers.beat(0, 0, 1), times=4, every=1.0)
    assert desk.run.ranks[1].state is RankState.LOST


def test_a_rank_whose_peers_go_on_is_not_lost() -> None:
    """Its network loses packets, and the others are past what they could do without it."""
    desk = connected(2)
    for second in range(30):
        desk.receive(0, makers.beat(second, 0, 0))
        desk.wait(1)
        if second == 4:
            desk.disconnect(1)
    told = "silent and not connected, but the others go on: nothing says that they wait for it"
    assert any(told in note for note in desk.notes)
    assert (desk.run.ranks[1].state, desk.sent(0, messages.Abort)) == (RankState.RUNNING, [])
    desk.keep_hearing(0, makers.beat(30, 0, 0), times=30, every=1.0)  # they wait for it
    assert [record.state for record in desk.run.ranks.values()] == [RankState.RUNNING] * 2
    desk.keep_hearing(0, makers.beat(30, 0, 0), times=3, every=1.0)
    assert desk.run.ranks[1].state is RankState.LOST
    assert len(desk.sent(0, messages.Abort)) >= 1


def test_a_rank_that_was_seen_to_die_is_lost_although_the_others_go_on() -> None:
    desk = connected(2)
    desk.handle(RankExited("train-0", 1, "process-1", "killed by SIGKILL"))
    desk.disconnect(1)
    for second in range(5):
        desk.receive(0, makers.beat(second, 0, 0))
        desk.wait(1)
    assert desk.run.ranks[1].state is RankState.LOST


def test_a_rank_for_which_nobody_ever_waits_is_lost_in_the_end() -> None:
    desk = connected(2, cut_off_after=30)
    desk.disconnect(1)
    for second in range(32):
        desk.receive(0, makers.beat(second, 0, 0))
        desk.wait(1)
        assert desk.run.ranks[1].state is (RankState.RUNNING if second < 30 else RankState.LOST)


def test_ranks_that_stay_cut_off_are_lost_in_the_end() -> None:
    desk = connected(2, cut_off_after=30)
    desk.wait(5)
    desk.disconnect(0)
    desk.disconnect(1)
    desk.wait(40)
    assert desk.reports[-1].outcome is Outcome.LOST


def test_a_run_whose_ranks_come_back_goes_on() -> None:
    desk = connected(1, abort_on_lost=False)
    desk.disconnect(0)
    desk.wait(5)
    assert desk.reports[-1].outcome is Outcome.LOST
    desk.handle(Received(b"again", makers.hello(0, 1)))
    assert not desk.run.over
    desk.handle(Received(b"again", messages.Bye(1, "finished", "")))
    desk.wait(1)
    assert [report.outcome.value for report in desk.reports[-1:]] == ["finished"]


def test_who_was_silent_before_the_job_is_ended_is_lost_and_not_the_signal_to_blame() -> None:
    """Of a node that failed, SLURM tells by a signal, sooner than a rank that nobody saw die is lost."""
    desk = connected(2)
    desk.receive((0, 1), makers.beat(7, 0, 3))
    desk.keep_hearing(0, makers.beat(7, 0, 3), times=5, every=1.0)
    desk.disconnect(1)
    desk.keep_hearing(0, makers.beat(7, 0, 3), times=2, every=1.0)
    assert desk.sent(0, messages.Abort) == []
    desk.handle(JobInterrupted("SIGTERM"))
    assert len(desk.sent(0, messages.Abort)) == 1
    desk.wait(0.5)
    desk.receive(0, makers.beat(7, 0, 3))
    report = desk.run.report()
    assert (report.outcome, [row.state for row in report.ranks][1]) == (Outcome.LOST, RankState.LOST)
    assert "rank 1 of 2 (node0, local rank 1) was lost" in report.reason
