"""Ranks that outlive what started them, over a fake clock."""

from __future__ import annotations

from dataclasses import replace

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.journal import JobInterrupted
from rankwatch_monitor.decide.core.ledger import CommandEnded, Event
from rankwatch_monitor.decide.core.report import Outcome


def killed(*events: Event) -> Desk:
    """A job of two ranks whose command has just been killed."""
    desk = connected(2, expects_job_end=True, hold_limit=0)
    for event in [*events, CommandEnded()]:
        desk.handle(event)
    return desk


def awaits(desk: Desk) -> bool:
    return desk.ledger.awaits_orphans(desk.now)


def test_ranks_that_beat_after_the_command_has_ended_are_aborted_and_waited_for() -> None:
    desk = killed()
    desk.wait(1)
    assert desk.sent(0, messages.Abort) == []
    desk.receive(1, makers.beat(0, 0, 1))
    desk.wait(0.5)
    (abort,) = {*desk.sent(0, messages.Abort), *desk.sent(1, messages.Abort)}
    reason = "the command has ended, and rank 1 of 2 (node0, local rank 1) is still training"
    assert abort.reason == reason
    assert awaits(desk)
    desk.receive((0, 1), messages.Ack(0, abort=True), messages.Bye(1, "aborted", ""))
    assert not awaits(desk)
    desk.end(exit_code=-9)
    assert (desk.reports[-1].outcome, desk.reports[-1].reason) == (Outcome.LOST, reason)
    assert not desk.reports[-1].stops_ranks


def test_ranks_that_end_with_the_command_are_not_waited_for() -> None:
    desk = killed()
    desk.receive(1, makers.beat(0, 0, 1))  # it was on its way
    for rank in (0, 1):
        desk.disconnect(rank)
    assert not awaits(desk)
    desk.end(exit_code=1)
    assert "ended without a word" in desk.reports[-1].reason


def test_a_rank_that_ends_later_than_its_command_is_no_orphan() -> None:
    desk = killed()
    desk.wait(1)
    desk.receive(1, makers.beat(0, 0, 1))
    desk.disconnect(1)
    desk.wait(1)
    assert desk.sent(0, messages.Abort) == []


def test_the_wait_for_silent_and_for_stuck_ranks_is_bounded() -> None:
    desk = killed()
    desk.wait(3.6)
    assert not awaits(desk)
    desk = killed()
    desk.wait(1)
    desk.receive(1, makers.beat(0, 0, 1))
    desk.wait(11)
    assert awaits(desk)
    desk.wait(2)
    assert not awaits(desk)


def test_a_signal_is_the_reason_where_one_ended_the_command() -> None:
    desk = killed(JobInterrupted("SIGINT"))
    desk.wait(1)
    desk.receive(1, makers.beat(0, 0, 1))
    desk.wait(0.5)
    assert desk.sent(0, messages.Abort)
    desk.end(exit_code=-9)
    assert desk.reports[-1].reason == "stopped by SIGINT"


def test_a_rank_that_says_that_its_torchrun_has_ended_stops_the_run() -> None:
    desk = connected(2)
    desk.receive(1, replace(makers.beat(0, 0, 1), orphaned=True))
    (abort,) = desk.sent(0, messages.Abort)
    assert abort.reason.startswith("the torchrun that started rank 1 of 2 (node0, local rank 1) has ended")
