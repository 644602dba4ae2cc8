"""How loud the end of a run is in the log, and that Ctrl-C is no failure."""

from __future__ import annotations

import logging

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.effects import Note
from rankwatch_monitor.decide.core.journal import JobEnded
from rankwatch_monitor.decide.core.report import End, Outcome, RankState
from rankwatch_monitor.decide.ending.rules import EXCUSED


def told(desk: Desk, level: int) -> list[str]:
    return [note.text.removeprefix("run train-0: ") for note in desk.asked(Note) if note.level == level]


def test_a_verdict_is_an_error() -> None:
    desk = connected(1)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 1))))
    assert told(desk, logging.ERROR)[0].startswith("first inf: rank 0 of 1 (node0, local rank 0), batch 3: ")


def test_the_ranks_say_the_verdict_in_one_clause() -> None:
    desk = connected(2)
    desk.receive((0, 1), messages.Tripped(1, makers.trip(at=(3, 0, 1))))
    (reason,) = {abort.reason for abort in desk.sent(1, messages.Abort)}
    assert reason == "no single rank (ranks 0-1 of 2 at once), batch 3: layer (Linear), output: inf (overflow)"
    assert desk.run.report().reason.startswith(reason.removesuffix(")"))


def test_of_a_long_reason_the_ranks_say_the_first_clauses() -> None:
    desk = connected(2)
    desk.receive(1, messages.Bye(1, "failed", f"KeyError: 'x'; of a row; {'y' * 320}"))
    (reason,) = {abort.reason for abort in desk.sent(0, messages.Abort)}
    assert reason.endswith("KeyError: 'x'; of a row")


def test_a_failure_is_an_error_at_once_and_once() -> None:
    desk = connected(2)
    desk.receive(1, messages.Bye(1, "failed", "KeyError: 'x'", at="train.py:4 in load"))
    failure = "failed: rank 1 of 2 (node0, local rank 1) failed: KeyError: 'x', at train.py:4 in load"
    assert told(desk, logging.ERROR) == [failure]
    desk.receive(0, messages.Ack(0, abort=True), messages.Bye(1, "aborted", ""))
    desk.wait(5.0)
    assert desk.reports
    assert told(desk, logging.ERROR) == [failure]


def test_a_rank_that_is_lost_is_an_error() -> None:
    desk = connected(2, expects_job_end=True)
    desk.handle(JobEnded(137))
    (text,) = told(desk, logging.ERROR)
    assert text.startswith("lost: rank 0 of 2 (node0, local rank 0) ended without a word")


def test_a_notice_is_a_warning() -> None:
    desk = connected(1)
    desk.receive(0, messages.Noticed(1, makers.notice()))
    assert told(desk, logging.WARNING)[0].startswith("rank 0 of 1 (node0, local rank 0): next to overflow: ")


def interrupted(*others: str) -> Desk:
    desk = connected(2)
    desk.receive(0, messages.Bye(1, "failed", "KeyboardInterrupt"))
    for text in others:
        desk.receive(1, messages.Bye(1, "failed", text))
    return desk


def test_ctrl_c_is_no_failure() -> None:
    for other in ("KeyboardInterrupt", "RuntimeError: Connection closed by peer [127.0.0.1]:45986"):
        desk = interrupted(other)
        (report,) = desk.reports
        assert (report.outcome, report.reason, report.end) == (Outcome.ABORTED, "stopped by SIGINT", End.SIGNAL)
        assert report.ranks[0].state is RankState.ABORTED
        assert told(desk, logging.ERROR) == []


def test_a_rank_that_waits_for_one_that_ctrl_c_ended_is_stopped() -> None:
    desk = interrupted()
    desk.keep_hearing(1, makers.beat(3, 0, 1), times=20, every=EXCUSED / 15)
    assert desk.sent(1, messages.Abort)
