"""What waits for a disk that fails: how long until the next try, and how much of it."""

from __future__ import annotations

from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.journal import Entry
from rankwatch_monitor.serve.files.unwritten import FIRST_RETRY, LAST_RETRY, Held

BYES = [Entry(0.0, 0, messages.Bye(seq, "failed", "x" * 100)) for seq in range(1, 21)]


def test_each_try_comes_after_twice_the_time_up_to_a_limit() -> None:
    held, waits = Held("train-0"), []
    for _ in range(8):
        held.fail("the disk was full", 0.0)
        waits.append(held.retry_at)
    assert waits == [min(FIRST_RETRY * 2**times, LAST_RETRY) for times in range(8)]
    held.succeed()
    held.fail("the disk was full", 0.0)
    assert held.retry_at == FIRST_RETRY


def test_what_came_during_a_try_that_failed_is_written_after_what_was_tried() -> None:
    held = Held("train-0")
    held.append(BYES[:2], room=0, bulk_room=1000, why="")
    held.begin()
    held.append(BYES[2:4], room=0, bulk_room=1000, why="")
    held.fail("the disk was full", 0.0)
    assert held.entries == BYES[:4]


def test_facts_that_wait_are_counted_until_they_are_written() -> None:
    held = Held("train-0")
    held.append(BYES[:2], room=0, bulk_room=1000, why="", is_behind=True)
    one = held.bulk // 2
    held.begin()
    held.append(BYES[2:3], room=0, bulk_room=1000, why="", is_behind=True)
    held.fail("the disk was full", 0.0)
    assert held.weight == (3, 0, 3 * one)
    held.begin()
    held.append(BYES[3:4], room=0, bulk_room=1000, why="", is_behind=True)
    held.succeed()
    assert held.weight == (1, 0, one)


def test_other_facts_than_batches_are_bounded_while_the_disk_fails() -> None:
    held = Held("train-0")
    held.append(BYES, room=0, bulk_room=1000, why="")
    assert held.entries == BYES
    held.fail("the disk was full", 0.0)
    held.append(BYES, room=0, bulk_room=1000, why="")
    taken = len(held.entries) - len(BYES)
    assert 0 < taken < 10
    assert held.lost.all()
