"""Which ranks of a stall are asked where they are, and what becomes of their answers, over a fake clock."""

from __future__ import annotations

from typing import Any

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.effects import Publish
from rankwatch_monitor.decide.core.report import RankStack
from rankwatch_monitor.decide.stalls.stacks import AWAITED, PENDING
from rankwatch_monitor.views import as_json, stalls
from rankwatch_monitor.views import text as as_text

STALL = 10.0
LINES = (
    "main thread",
    "  train.py:31 in load: time.sleep(3600)",
    "  train.py:52 in main",
    "thread pin",
    "  queue.py:5 in get",
)


def stalled_desk(world_size: int, behind: int = 1, **options: Any) -> Desk:
    """Ranks of which the last ``behind`` have just stalled, and the others wait for them."""
    at = connected(world_size, stall_after=STALL, **options)
    beat(at, world_size, behind)
    at.take()
    while not at.reports and not any("stalled" in note for note in at.notes):
        beat(at, world_size, behind)
        at.wait(0.5)
    return at


def beat(at: Desk, world_size: int, behind: int) -> None:
    for rank in range(world_size):
        at.receive(rank, makers.beat(7, 0, 9 if rank >= world_size - behind else 12))


def wait(at: Desk, seconds: float, world_size: int, behind: int = 1) -> None:
    for _ in range(int(2 * seconds)):
        beat(at, world_size, behind)
        at.wait(0.5)


def numbers(at: Desk, rank: int) -> list[int]:
    """Those of the questions that a rank was sent."""
    return [message.number for message in at.sent(rank, messages.Inspect) if isinstance(message, messages.Inspect)]


def asked(at: Desk, world_size: int) -> dict[int, int]:
    """By rank, the number of the last question."""
    return {rank: sent[-1] for rank in range(world_size) if (sent := numbers(at, rank))}


def test_the_ranks_of_a_stall_are_asked_and_their_stacks_are_in_log_and_report() -> None:
    at = stalled_desk(2)
    number = asked(at, 2)[1]
    assert set(asked(at, 2)) == {0, 1}
    at.take()
    at.receive(1, messages.Inspected(number, "train.py:31 in load: time.sleep(3600)", LINES))
    at.receive(0, messages.Inspected(number, "all_reduce of 4 float32 (gloo, 2 ranks)", ("main thread", "  a.py:1 in b")))
    assert [note.split("\n")[0] for note in at.notes] == [
        "run train-0: rank 1 of 2 (node0, local rank 1) is in train.py:31 in load: time.sleep(3600)",
        "run train-0: rank 0 of 2 (node0, local rank 0) is in all_reduce of 4 float32 (gloo, 2 ranks)",
    ]
    assert at.notes[0].split("\n")[1:] == [f"    {line}" for line in LINES]
    at.end(1)
    (told,) = [effect.report for effect in at.take() if isinstance(effect, Publish)]
    assert [stack.rank for stack in told.stacks] == [1, 0]  # the stalled one first
    text = as_text.render(told)
    assert (
        "\n  stacks     rank 1 is in train.py:31 in load: time.sleep(3600)\n               main thread\n"
        "                 train.py:31 in load: time.sleep(3600)\n"
    ) in text
    assert "\n             rank 0 is in all_reduce of 4 float32 (gloo, 2 ranks)\n" in text
    on_screen = as_text.render(told, frames=2)
    assert "thread pin" not in on_screen
    assert "and 3 more lines: report.txt has them" in on_screen
    body = as_json.to_dict(told)["stall"]
    assert (body["ranks"], body["waiting"], body["unasked"]) == ([1], [0], 0)
    assert body["stacks"][0] == {
        "rank": 1,
        "waits": "train.py:31 in load: time.sleep(3600)",
        "text": "is in train.py:31 in load: time.sleep(3600)",
        "lines": list(LINES),
        "why_not": "",
    }


def test_a_rank_that_is_not_asked_or_answers_twice_says_nothing() -> None:
    at = stalled_desk(12, behind=9)
    number = asked(at, 12)[3]
    at.take()
    for rank, answer in ((11, number), (3, number + 1), (3, number), (3, number)):
        at.receive(rank, messages.Inspected(answer, "f", ("main thread",)))
    assert len(at.notes) == 1
    assert at.run.report().stacks[0] == RankStack(3, "f", ("main thread",))
    assert {stack.why_not for stack in at.run.report().stacks if stack.rank != 3} == {PENDING}


def test_few_ranks_are_asked_and_it_is_said_how_many_were_not() -> None:
    at = stalled_desk(100, behind=90)
    assert list(asked(at, 100)) == [0, 1, *range(10, 16)]  # some of those that wait, and most of the stalled
    for rank, number in asked(at, 100).items():
        at.receive(rank, messages.Inspected(number, "all_reduce", ("main thread",)))
    text = as_text.render_so_far(at.run.report())
    assert "\n  stacks     ranks 0-1, 10-15 are in all_reduce\n" in text  # equal ones are told once
    assert "\n             92 more were not asked\n" in text
    assert stalls.unasked(at.run.report()) == 92


def test_a_rank_that_cannot_answer_gave_no_stack_and_may_answer_later() -> None:
    at = stalled_desk(2)
    (number,) = set(asked(at, 2).values())
    at.receive(0, messages.Inspected(number, "all_reduce", ("main thread",)))
    for _ in range(30):  # rank 1 is silent
        at.receive(0, makers.beat(7, 0, 12))
        at.wait(0.5)
    assert len(at.sent(1, messages.Inspect)) > 2
    (told,) = [note for note in at.notes if "gave no stack" in note]
    assert told.startswith("run train-0: rank 1 gave no stack: it has been silent for ")
    assert "keeps its GIL" in told
    assert "rank 1 gave no stack: it has been silent for" in as_text.render_so_far(at.run.report())
    at.receive(1, messages.Inspected(number, "f", ("main thread",)))
    assert [stack.why_not for stack in at.run.report().stacks] == ["", ""]


def test_a_rank_that_ends_before_it_answers_gave_no_stack() -> None:
    at = stalled_desk(2)
    at.end(1)
    (told,) = [effect.report for effect in at.take() if isinstance(effect, Publish)]
    assert {stack.why_not for stack in told.stacks} == {"it did not answer before its process ended: it counts as lost"}
    assert "ranks 0-1 gave no stack: it did not answer before" in as_text.render(told)


def test_a_rank_that_reconnects_is_asked_again() -> None:
    at = stalled_desk(2)
    at.disconnect(1)
    at.take()
    at.connect(2, ranks=[1])
    at.wait(3)
    assert at.sent(1, messages.Inspect)


def test_a_stall_that_is_over_leaves_nothing_and_the_next_one_asks_anew() -> None:
    at = stalled_desk(2)
    (number,) = set(asked(at, 2).values())
    at.receive(1, messages.Inspected(number, "f", ("main thread",)))
    at.receive(1, makers.beat(7, 0, 10))
    at.wait(0.5)
    assert at.notes[-1] == "run train-0: rank 1 went on"
    assert (at.run.report().stall, at.run.report().stacks, as_json.to_dict(at.run.report())["stall"]) == (None, (), None)
    for _ in range(30):
        at.receive(0, makers.beat(7, 0, 12))
        at.receive(1, makers.beat(7, 0, 10))
        at.wait(0.5)
    assert min(asked(at, 2).values()) > number
    at.receive(1, messages.Inspected(number, "late", ("main thread",)))
    assert "late" not in str(at.run.report().stacks)


def test_a_rank_that_waits_later_is_asked_as_well() -> None:
    at = connected(3, stall_after=STALL)
    at.receive(2, makers.beat(7, 0, 9))
    for turn in range(40):
        at.receive(2, makers.beat(7, 0, 9))
        at.receive(0, makers.beat(7, 0, 12))
        at.receive(1, makers.beat(7, 0, min(turn, 24) + 20))
        at.wait(0.5)
    assert at.run.report().stall is not None
    assert (at.run.report().stall.ranks, at.run.report().stall.waiting) == ((2,), (0, 1))  # type: ignore[union-attr]
    assert set(asked(at, 3)) == {0, 1, 2}
    assert len([note for note in at.notes if "stalled" in note]) == 1


def test_the_ranks_are_asked_before_they_are_stopped_and_the_report_waits_a_little() -> None:
    at = stalled_desk(2, abort_on_stall=True)
    (number,) = set(asked(at, 2).values())
    assert not at.sent(1, messages.Abort)
    at.receive((0, 1), messages.Inspected(number, "f", ("main thread",)))
    at.wait(1)
    (abort, *_) = at.sent(1, messages.Abort)
    assert "rank 1 is in f; rank 0 waits for it in f" in abort.reason
    at.receive((0, 1), messages.Ack(0, abort=True))
    at.wait(0.1)
    assert [stack.waits for stack in at.reports[0].stacks] == ["f", "f"]


def test_ranks_that_give_no_stack_are_stopped_all_the_same() -> None:
    at = stalled_desk(2, abort_on_stall=True)
    assert not at.sent(1, messages.Abort)
    at.wait(AWAITED)
    assert at.sent(1, messages.Abort)


def test_ranks_that_end_by_the_stall_leave_it_in_the_report_and_blame_no_other() -> None:
    at = stalled_desk(2)
    at.receive(1, messages.Bye(1, "aborted", "", makers.moment(7, 0, 9)))
    at.take()
    for _ in range(40):
        at.receive(0, makers.beat(7, 0, 12))
        at.wait(0.5)
    assert [note for note in at.notes if "stalled" in note or "went on" in note] == []
    assert at.run.report().stall is not None
    assert at.run.report().stall.ranks == (1,)  # type: ignore[union-attr]


def test_ranks_that_finish_after_all_leave_no_stall() -> None:
    at = stalled_desk(2)
    at.receive((0, 1), messages.Bye(1, "finished", "", makers.moment(7, 0, 12)))
    assert at.run.report().stall is None


def test_a_run_that_stalls_all_the_time_asks_only_now_and_then() -> None:
    at = connected(1, stall_after=0.3, heartbeat=0.1)
    for batch in range(100):
        at.receive(0, makers.beat(batch, 0, 1))
        at.wait(0.6)
        at.receive(0, makers.beat(batch, 0, 1))
    assert 10 < len(set(numbers(at, 0))) < 30


def test_a_collector_that_is_started_again_finds_the_stall_anew() -> None:
    at = stalled_desk(2)
    (number,) = set(asked(at, 2).values())
    at.receive(1, messages.Inspected(number, "f", ("main thread",)))
    again = Desk(at.options, now=at.now)
    again.ledger.restore("train-0", at.records["train-0"], [], again.now)
    again.records = {"train-0": list(at.records["train-0"])}
    assert (again.run.report().stall, again.run.report().stacks) == (at.run.report().stall, at.run.report().stacks)
    again.connect(2)
    wait(again, STALL - 1, 2)
    assert again.run.report().stall is None  # where the ranks are is not known yet
    wait(again, 3, 2)
    assert [note for note in again.notes if "went on" in note] == []
    assert again.run.report().stall is not None
    assert min(asked(again, 2).values()) > number
