"""How runs begin and end, and several runs at a time, over a fake clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from desk import Desk, connected, peer
from invariants import CheckedLedger
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.effects import Note, Send
from rankwatch_monitor.decide.core.journal import JobEnded, JobInterrupted
from rankwatch_monitor.decide.core.ledger import KEPT_RUNS, LOOK_AFTER, RUNS_AT_ONCE, RankExited, Received, Tick
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.report import Outcome, RankState
from rankwatch_monitor.decide.trip.verdict import Certainty


def test_a_run_whose_ranks_all_end_well_is_finished() -> None:
    desk = connected(2)
    part = messages.Batch(1, makers.summary(0))
    desk.receive(range(2), messages.Table(makers.table()), part, messages.Bye(2, "finished", ""))
    (report,) = desk.reports
    assert (report.outcome, report.batches, report.reason) == (Outcome.FINISHED, 1, "")
    assert desk.ledger.is_idle


def test_a_command_that_fails_without_a_word_of_its_ranks_is_failed() -> None:
    desk = connected(1, expects_job_end=True)
    desk.receive(0, messages.Bye(1, "ended", ""))
    assert desk.reports == []
    desk.end(exit_code=9)
    assert (desk.reports[-1].outcome, desk.reports[-1].reason) == (Outcome.FAILED, "the command ended with exit code 9")


@pytest.mark.parametrize(("bye", "code"), [("ended", 0), ("finished", 9)])
def test_a_rank_that_ended_is_believed_when_the_command_ended_well_or_it_said_so_itself(bye: str, code: int) -> None:
    desk = connected(1, expects_job_end=True)
    desk.receive(0, messages.Bye(1, bye, ""))
    desk.end(exit_code=code)
    assert desk.reports[-1].outcome is Outcome.FINISHED


def test_a_collector_that_is_ended_does_not_call_the_ranks_lost() -> None:
    desk = connected(2)
    desk.end(exit_code=None)
    (report, *_) = desk.reports
    assert (report.outcome, report.reason) == (Outcome.LOST, "the collector was ended while the run went on")
    assert [row.state for row in report.ranks] == [RankState.RUNNING] * 2


def test_the_last_rank_of_a_node_that_was_cut_off_is_lost_though_nobody_else_is_left_to_be_heard() -> None:
    desk = connected(4)
    for _ in range(5):  # ranks 2 and 3 are silent from now on
        desk.wait(1)
        desk.receive((0, 1), makers.beat(3, 0, 0))
    desk.disconnect(2)
    desk.wait(4)
    desk.receive((0, 1), messages.Ack(0, abort=True), messages.Bye(9, "aborted", ""))
    desk.wait(5)
    desk.disconnect(3)
    desk.wait(20)
    states = [row.state for row in desk.reports[-1].ranks]
    assert states == [RankState.ABORTED] * 2 + [RankState.LOST] * 2


def test_what_becomes_of_ranks_whose_job_is_being_ended_is_no_failure() -> None:
    desk = connected(3, expects_job_end=True)
    desk.handle(JobInterrupted("SIGINT"))
    desk.receive(1, messages.Bye(1, "failed", "RuntimeError: connection closed by peer"))
    desk.disconnect(0)
    desk.wait(10)
    assert desk.reports == []
    desk.handle(JobEnded(143, "SIGINT"))
    report = desk.reports[-1]
    assert (report.outcome, report.reason) == (Outcome.ABORTED, "stopped by SIGINT")


def test_of_ranks_that_ended_without_a_word_the_first_whose_connection_ended_is_named() -> None:
    desk = connected(3, expects_job_end=True)
    desk.wait(1)
    desk.disconnect(1)
    desk.wait(0.1)
    desk.disconnect(0)  # torchrun ended it, and then itself
    desk.end(exit_code=1)
    report = desk.reports[-1]
    assert report.outcome is Outcome.LOST
    assert report.reason.startswith("rank 1 of 3 (node0, local rank 1) ended without a word")


@given(batches=st.lists(st.lists(st.sampled_from(["beat", "part"]), max_size=4), max_size=5), data=st.data())
def test_a_beat_tells_as_much_before_the_batches_that_it_came_after(batches: list[list[str]], data: st.DataObject) -> None:
    """The collector takes batches later than other messages; a beat must mean the same before and after them."""
    table, said = makers.table(), list[messages.Message]()
    for batch, sends in enumerate(batches):
        frame = 0
        for what in sends:
            if what == "part":
                summary = makers.summary(batch, first=frame)
                frame += len(table.specs)
                said.append(messages.Batch(len(said) + 1, summary))
            else:
                phase = data.draw(st.sampled_from(["forward", "backward", "optimizer"]))
                said.append(makers.beat(batch, 0, frame + data.draw(st.integers(0, 1)), phase=phase))
    beats_first = sorted(said, key=lambda message: isinstance(message, messages.Batch))
    known = []
    for order in (said, beats_first):
        desk = connected(1)
        desk.receive(0, messages.Table(table), *order)
        record = desk.run.ranks[0]
        known.append(
            (record.witness(record.trip), record.seq, record.last_batch, record.frames, record.forward_frames, record.stored)
        )
    assert known[0] == known[1]


@pytest.mark.parametrize(("seconds", "outcome"), [(1, Outcome.ABORTED), (3, Outcome.LOST)])
def test_a_rank_that_failed_just_before_the_job_was_ended_did_so_by_the_same_signal(seconds: int, outcome: Outcome) -> None:
    desk = connected(3, expects_job_end=True)
    desk.receive(1, messages.Bye(1, "failed", "RuntimeError: connection closed by peer"))
    failure = "rank 1 of 3 (node0, local rank 1) failed: RuntimeError: connection closed by peer"
    desk.disconnect(0)
    desk.wait(seconds)
    desk.handle(JobInterrupted("SIGTERM"))
    desk.handle(JobEnded(143, "SIGTERM"))
    report = desk.reports[-1]
    assert report.outcome is outcome
    assert report.reason.endswith(failure)
    assert report.reason.startswith("stopped by SIGTERM; just before, rank 1") == (outcome is Outcome.ABORTED)


def test_a_verdict_stands_though_the_job_is_ended_upon_it() -> None:
    desk = connected(1, expects_job_end=True)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(5, 0, 3))))
    desk.handle(JobInterrupted("SIGTERM"))
    desk.handle(JobEnded(143, "SIGTERM"))
    assert desk.verdict is not None
    assert not desk.reports[-1].reason.startswith("stopped")


def test_a_signal_is_named_as_the_reason_and_the_ranks_are_not_lost() -> None:
    desk = connected(1, expects_job_end=True)
    desk.handle(JobEnded(1, "SIGTERM"))
    report = desk.reports[-1]
    assert (report.outcome, report.reason) == (Outcome.ABORTED, "stopped by SIGTERM")
    assert report.ranks[0].state is RankState.ABORTED


def test_a_trip_outranks_the_limit_that_another_rank_has_come_to() -> None:
    for trip_first in (True, False):
        desk = connected(2)
        said: list[tuple[int, messages.Message]] = [
            (0, messages.Tripped(1, makers.trip(at=(5, 0, 3)))),
            (1, messages.Bye(1, "limit", "stopped after batch 5")),
        ]
        for rank, message in said if trip_first else reversed(said):
            desk.receive(rank, message)
        assert desk.verdict is not None


def test_a_limit_is_the_reason_when_nothing_else_happened() -> None:
    desk = connected(2)
    desk.receive(range(2), messages.Bye(1, "limit", "stopped after batch 5"))
    assert (desk.reports[-1].outcome, desk.reports[-1].reason) == (Outcome.ABORTED, "stopped after batch 5")


def test_a_rank_that_comes_back_after_the_run_is_over_is_still_told_to_stop() -> None:
    desk = connected(2, heartbeat=1.0)
    desk.receive(0, makers.beat(1, 0, 0))
    desk.disconnect(1)
    desk.keep_hearing(0, makers.beat(1, 0, 0), times=4, every=1.0)
    desk.receive(0, messages.Ack(1, abort=True), messages.Bye(1, "aborted", ""))
    assert desk.ledger.is_idle
    desk.take()
    desk.connect(2, ranks=[1])
    assert len(desk.sent(1, messages.Abort)) == 1
    assert list(desk.ledger.runs) == ["train-0"]


def test_a_pending_trip_is_decided_when_the_job_ends_before_some_rank_ever_came() -> None:
    desk = connected(3, ranks=[0])
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.end(exit_code=1)
    assert (desk.decided.certainty, desk.decided.missing) == (Certainty.PARTIAL, (1, 2))


def test_what_a_peer_said_counts_after_it_has_gone() -> None:
    desk = connected(1)
    desk.disconnect(0)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    assert desk.verdict is not None


def test_a_failure_that_does_not_stop_the_others_is_still_the_reason() -> None:
    desk = connected(2, abort_on_lost=False)
    desk.receive(0, messages.Bye(1, "failed", "KeyError: 'x'"))
    desk.receive(1, messages.Bye(1, "finished", ""))
    assert desk.reports[-1].outcome is Outcome.FAILED
    assert "KeyError: 'x'" in desk.reports[-1].reason


def test_runs_are_kept_apart_by_job_and_restart() -> None:
    desk = Desk()
    desk.handle(Received(b"a", makers.hello(job="one")))
    desk.handle(Received(b"b", makers.hello(job="two")))
    desk.handle(Received(b"c", makers.hello(job="one", restart=1, incarnation="later")))
    assert list(desk.ledger.runs) == ["one-0", "two-0", "one-1"]
    desk.handle(Received(b"b", messages.Tripped(1, makers.trip())))
    assert [run.verdict is not None for run in desk.ledger.runs.values()] == [False, True, False]


def test_the_same_job_started_again_is_a_run_of_its_own() -> None:
    desk = connected(2)
    desk.receive(0, messages.Bye(1, "finished", ""))
    desk.handle(Received(b"new", makers.hello(0, 2, incarnation="another")))
    assert list(desk.ledger.runs) == ["train-0", "train-0.2"]
    desk.receive(1, messages.Bye(1, "finished", ""))
    assert [run.over for run in desk.ledger.runs.values()] == [True, False]


def test_names_in_use_on_disk_are_not_used_again() -> None:
    ledger = CheckedLedger(Options(), claim=lambda name: name not in {"train-0", "train-0.2"})
    ledger.handle(Received(b"a", makers.hello()), 0.0)
    assert list(ledger.runs) == ["train-0.3"]


def test_a_free_name_among_a_hundred_thousand_is_found_in_few_looks() -> None:
    taken = {"train-0", *(f"train-0.{number}" for number in range(2, 100_000))}
    looks = list[str]()

    def claim(name: str) -> bool:
        looks.append(name)
        return name not in taken

    ledger = CheckedLedger(Options(), claim=claim)
    ledger.handle(Received(b"a", makers.hello()), 0.0)
    (name,) = ledger.runs
    assert name not in taken
    assert len(looks) < 40
    ledger.handle(Received(b"b", makers.hello(incarnation="b", start="b")), 0.0)  # the next number is known by now
    assert len(looks) < 41


def test_a_peer_that_says_hello_for_another_rank_leaves_the_first_one() -> None:
    desk = connected(2)
    desk.handle(Received(peer(0), makers.hello(0, 2, model=1)))
    (first, _) = desk.ledger.runs.values()
    assert [rank.connected for rank in first.ranks.values()] == [False, True]


def test_of_many_runs_each_is_looked_at_again_only_after_a_while() -> None:
    desk = Desk()
    for number in range(RUNS_AT_ONCE + 6):
        desk.handle(Received(b"%d" % number, makers.hello(start=str(number), incarnation=str(number))))
    desk.now = 1.0
    for at_once in (RUNS_AT_ONCE, RUNS_AT_ONCE + 6):
        desk.handle(Tick())
        desk.now += LOOK_AFTER
        assert sum(run.ticked_at >= 1.0 for run in desk.ledger.runs.values()) == at_once
    assert sum(run.ticked_at > 1.0 for run in desk.ledger.runs.values()) == 6


def test_a_rank_beyond_its_world_is_refused_for_good() -> None:
    desk = Desk()
    refused = messages.Error("rank 2 does not lie in a world of 2", "stop")
    assert desk.answers(Received(b"a", makers.hello(2, 2))) == [refused]
    assert not desk.ledger.runs


def test_the_peers_of_runs_that_are_forgotten_are_forgotten_too() -> None:
    desk = Desk()
    for number in range(KEPT_RUNS + 10):
        one = b"peer of %d" % number
        desk.handle(Received(one, makers.hello(start=str(number), incarnation=str(number))))
        desk.handle(Received(one, messages.Bye(1, "finished", "")))
    assert len(desk.ledger.runs) == KEPT_RUNS
    assert len(desk.ledger._peers) == KEPT_RUNS


def test_a_rank_is_told_where_its_runs_folder_is() -> None:
    desk = connected(1, runs_dir="/runs")
    (welcome,) = desk.sent(0, messages.Welcome)
    assert (welcome.run, welcome.folder) == ("train-0", "/runs/train-0")


def test_a_reconnect_goes_on_where_it_was() -> None:
    desk = connected(1)
    desk.receive(0, messages.Table(makers.table()), messages.Batch(5, makers.summary(3)))
    assert desk.answers(Received(b"new", makers.hello())) == [messages.Welcome("train-0", 1.0, 2.0, 5)]
    (refused,) = desk.answers(Received(peer(0), makers.beat(0, 0, 0)))
    assert refused == messages.Error("you are not known here: say HELLO", "hello")


def test_a_second_process_does_not_take_a_live_ranks_place() -> None:
    desk = connected(1)
    impostor = Received(b"impostor", makers.hello(incarnation="another", pid=666))
    held = "rank 0 of run train-0 is held by process 100 on node0"
    assert desk.handle(impostor) == [
        Note(f"refused process 666 on node0: {held}"), Send(b"impostor", messages.Error(held, "none")),
    ]  # fmt: skip
    assert desk.handle(impostor) == [Send(b"impostor", messages.Error(held, "none"))]  # the agent asks again
    assert desk.run.report().ranks[0].rival == "process 666 on node0"
    unknown = messages.Error("you are not known here: say HELLO", "hello")
    assert desk.handle(Received(b"impostor", makers.beat(0, 0, 0))) == [Send(b"impostor", unknown)]


def test_another_world_size_is_another_run() -> None:
    desk = connected(2)
    desk.handle(Received(b"x", makers.hello(0, 3, incarnation="another")))
    assert [run.world_size for run in desk.ledger.runs.values()] == [2, 3]


def test_another_major_version_and_a_rank_out_of_its_world_are_refused() -> None:
    desk = connected(2)
    for hello in (makers.hello(1, 2, major=2), makers.hello(5, 2)):
        (refused,) = desk.answers(Received(b"x", hello))
        assert isinstance(refused, messages.Error)
        assert refused.remedy == "stop"
    assert len(desk.ledger.runs) == 1


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_how_the_process_of_a_lost_rank_ended_is_said(is_waited_for: bool) -> None:
    desk = connected(2, expects_job_end=not is_waited_for)
    held = desk.run.ranks[1].hello.incarnation
    desk.handle(RankExited("train-0", 1, "another process", "killed by SIGTERM"))
    desk.handle(RankExited("train-0", 1, held, "killed by SIGKILL"))
    desk.handle(RankExited("train-0", 1, held, "killed by SIGHUP"))
    desk.handle(RankExited("no-run", 1, held, "killed by SIGHUP"))
    desk.disconnect(1)
    desk.wait(10 if is_waited_for else 0.1)
    desk.end(1)
    report = desk.reports[-1]
    assert report.outcome is Outcome.LOST
    assert report.reason.startswith("rank 1 of 2 (node0, local rank 1) was lost: killed by SIGKILL; last seen in ")
    assert report.ranks[1].farewell == "killed by SIGKILL"


def test_the_death_of_a_rank_that_said_why_it_ends_is_no_news() -> None:
    desk = connected(2)
    desk.receive(1, messages.Bye(1, "failed", "KeyError: 'x'"))
    held = desk.run.ranks[1].hello.incarnation
    desk.handle(RankExited("train-0", 1, held, "its process ended with exit code 1"))
    desk.end(1)
    assert desk.reports[-1].ranks[1].farewell == "KeyError: 'x'"
