"""Stalled ranks, over a fake clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.effects import Alert, Note, Publish, Trouble
from rankwatch_monitor.decide.core.report import Outcome
from rankwatch_monitor.views import text as as_text

STALL = 10.0


def keep_beating(at: Desk, seconds: float, *beats: messages.Beat | None) -> None:
    """Each rank sends the same beat at every heartbeat, and says where it is when it is asked; None: it says nothing."""
    end = at.now + seconds
    while at.now < end:
        for rank, beat in enumerate(beats):
            if beat is not None:
                at.receive(rank, beat)
                for asked in at.sent(rank, messages.Inspect)[-1:]:
                    at.receive(rank, stack(asked.number))
        at.wait(0.5)


def stack(number: int, waits: str = "train.py:31 in load") -> messages.Inspected:
    return messages.Inspected(number, waits, ("main thread", f"  {waits}"))


def notes(at: Desk) -> list[str]:
    """What was noted, but for the stacks."""
    return [effect.text for effect in at.take() if isinstance(effect, Note) and " is in " not in effect.text]


def test_the_rank_that_the_others_wait_for_is_named_with_its_frame_and_phase() -> None:
    at = connected(4, stall_after=STALL)
    ahead, behind = makers.beat(7, 0, 12, phase="backward"), makers.beat(7, 0, 9)
    keep_beating(at, 1, ahead, ahead, behind, ahead)
    at.take()
    keep_beating(at, STALL + 1, ahead, ahead, behind, ahead)
    assert notes(at) == [
        "run train-0: rank 2 of 4 (node1, local rank 2) stalled: no progress for 10 s, though its heartbeat comes; "
        "last seen in batch 7, frame 9, phase forward; ranks 0-1, 3 wait, from batch 7, frame 12, phase backward on"
    ]
    keep_beating(at, STALL, ahead, ahead, behind, ahead)
    assert notes(at) == []  # noted once
    keep_beating(at, 1, ahead, ahead, makers.beat(7, 0, 10), ahead)
    assert notes(at) == ["run train-0: rank 2 went on"]


def test_a_rank_that_had_waited_is_not_taken_for_the_next_one_to_stall() -> None:
    """The rank that goes on may be heard of a heartbeat before the ones that it had kept."""
    at = connected(2, stall_after=STALL)
    ahead, behind, beyond = makers.beat(7, 0, 12, phase="backward"), makers.beat(7, 0, 9), makers.beat(9, 0, 1)
    keep_beating(at, 1, ahead, behind)
    keep_beating(at, STALL + 1, ahead, behind)
    assert "rank 1 of 2 (node0, local rank 1) stalled" in notes(at)[-1]
    at.receive(1, beyond)
    at.wait(0.6)
    assert notes(at) == ["run train-0: rank 1 went on"]
    keep_beating(at, STALL + 1, ahead, beyond)  # but if it stays where it was
    assert "rank 0 of 2 (node0, local rank 0) stalled" in notes(at)[-1]


def test_a_rank_whose_process_is_stopped_is_told_from_one_that_hangs() -> None:
    at = connected(2, stall_after=STALL)
    ahead = makers.beat(3, 0, 4)
    at.receive(1, makers.beat(3, 0, 2))
    keep_beating(at, STALL + 1, ahead, None)
    silent, stalled = notes(at)[-2:]
    assert "rank 1 of 2 (node0, local rank 1) is silent, but still connected" in silent
    assert "and no heartbeat for 10 s (its process is stopped, or busy outside of Python)" in stalled
    assert stalled.endswith("rank 0 waits, from batch 3, frame 4, phase forward on")


def test_a_slow_rank_is_no_stall() -> None:
    at = connected(2, stall_after=STALL)
    at.take()
    for frame in range(6):  # rank 0 waits for rank 1 at the end of each batch
        keep_beating(at, STALL - 1, makers.beat(1, 0, 100), makers.beat(1, 0, frame + 1))
    assert notes(at) == []


def test_a_rank_whose_watch_is_off_is_no_stall() -> None:
    at = connected(2, stall_after=STALL)
    at.receive(1, messages.Off(1, "switched itself off in batch 1"))
    for frame in range(6):  # where rank 1 is, is not known any more
        keep_beating(at, STALL - 1, makers.beat(2, 0, frame + 1), makers.beat(1, 0, 2))
    assert [note for note in notes(at) if "stalled" in note] == []


def test_ranks_of_which_none_is_behind_are_told_of_together() -> None:
    at = connected(3, stall_after=STALL)
    same = makers.beat(2, 0, 5, phase="backward")
    keep_beating(at, STALL + 0.5, same, same, same)
    text = (
        "run train-0: ranks 0-2 stalled: no progress for 10 s, though their heartbeats come; last seen in batch 2, frame 5, "
        "phase backward; no rank is behind another"
    )
    assert text in notes(at)


@pytest.mark.parametrize(
    ("sleepers", "told"),
    [
        ((), "no rank is behind another: they may wait for each other: ranks 0-2 are in all_reduce"),
        (
            (1,),
            "rank 1 is in hang.py:9: time.sleep(60); ranks 0, 2 wait for it in all_reduce; last seen in batch 2, frame 5",
        ),
        ((0, 1), "ranks 0-1 are in hang.py:9: time.sleep(60); rank 2 waits for them in all_reduce; last seen in batch 2"),
        ((0, 1, 2), "ranks 0-2 are in hang.py:9: time.sleep(60); last seen in batch 2, frame 5, phase backward"),
    ],
)
def test_the_stacks_say_who_waits_for_whom_in_the_reason_the_log_and_the_event(sleepers: tuple[int, ...], told: str) -> None:
    for abort_on_stall in (False, True):
        at = connected(3, stall_after=STALL, abort_on_stall=abort_on_stall)
        same = makers.beat(2, 0, 5, phase="backward")
        while not (asked := at.sent(0, messages.Inspect)):
            at.receive((0, 1, 2), same)
            at.wait(0.5)
        assert not [effect for effect in at.effects if isinstance(effect, Alert)]
        assert not at.sent(0, messages.Abort)
        for rank in range(3):
            in_code = stack(asked[0].number, "hang.py:9: time.sleep(60)")
            in_collective = messages.Inspected(
                asked[0].number, "all_reduce of 1 float32, called at a.py:3", (), "all_reduce of 1"
            )
            at.receive(
                rank, in_code if rank in sleepers else replace(in_collective, collective="all_reduce (gloo, 3 ranks)")
            )
        at.wait(1)
        report = at.run.report()
        texts = [report.stalled, *(effect.text for effect in at.effects if isinstance(effect, Alert))]
        texts += [abort.reason for abort in at.sent(0, messages.Abort)[:1]]
        assert len(texts) == 2
        assert all(told in text for text in texts)
        assert any(told in note for note in at.notes)
        assert not sleepers or not any("may wait for each other" in text for text in (*texts, *at.notes))


def test_a_stall_stops_the_others_where_that_was_asked_for() -> None:
    at = connected(2, stall_after=STALL, abort_on_stall=True)
    ahead, behind = makers.beat(1, 0, 3, phase="backward"), makers.beat(1, 0, 2)
    keep_beating(at, STALL + 1, ahead, behind)
    assert all(at.sent(rank, messages.Abort) for rank in (0, 1))
    at.receive((0, 1), messages.Ack(0, abort=True))
    (published,) = [effect for effect in at.take() if isinstance(effect, Publish)]
    assert published.report.outcome is Outcome.STALLED
    text = as_text.render(published.report)
    assert text.startswith("rankwatch: run train-0 stalled: rank 1 of 2 (node0, local rank 1): no progress for 10 s")
    assert text.count("stalled:") == 1


def test_somebody_is_told_once_of_a_stall_that_stops_nobody() -> None:
    for options, alerts in ((dict[str, Any](), 1), ({"abort_on_stall": True}, 0)):
        at = connected(2, stall_after=STALL, **options)
        ahead, behind = makers.beat(1, 0, 3, phase="backward"), makers.beat(1, 0, 2)
        keep_beating(at, 2 * STALL, ahead, behind)
        told = [effect for effect in at.take() if isinstance(effect, Alert)]
        assert [(one.trouble, one.text) for one in told] == [(Trouble.STALL, one.report.stalled) for one in told]
        assert len(told) == alerts


def test_the_report_of_a_run_that_ended_in_a_stall_says_so() -> None:
    at = connected(2, stall_after=STALL)
    ahead, behind = makers.beat(1, 0, 3, phase="backward"), makers.beat(1, 0, 2)
    keep_beating(at, STALL + 1, ahead, behind)
    at.take()
    at.end(1)
    (published,) = [effect for effect in at.take() if isinstance(effect, Publish)]
    assert "\n  stalled    rank 1 of 2 (node0, local rank 1) stalled: " in as_text.render(published.report)


def test_never_means_never() -> None:
    at = connected(1, stall_after=0)
    at.take()
    keep_beating(at, 1000, makers.beat(0, 0, 1))
    assert notes(at) == []
