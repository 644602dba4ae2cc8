"""Which batches are not on record, and what is said of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

import makers
from desk import connected
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.gaps import END, MAX_RANGES, Gap, Gaps, describe_gap, joined
from rankwatch_monitor.decide.core.journal import NO_RANK, Entry
from rankwatch_monitor.decide.core.ledger import Stored, Unrecorded
from rankwatch_monitor.views import as_json, text

FULL = "the disk was full"


def test_ranges_are_those_of_the_batches_that_were_added() -> None:
    chance = random.Random(0)
    for _ in range(200):
        gaps, batches = Gaps(), [chance.randrange(30) for _ in range(chance.randrange(1, 40))]
        for batch in batches:
            gaps.add(0, batch, batch, FULL)
        found = gaps.all()
        assert {batch for gap in found for batch in range(gap.first, gap.last + 1)} == set(batches)
        assert all(one.last + 1 < two.first for one, two in itertools.pairwise(found))
        assert joined(found, found) == found


def test_a_range_that_is_added_again_changes_nothing_even_where_there_is_no_room() -> None:
    gaps = Gaps()
    for batch in range(0, 2 * MAX_RANGES, 2):
        gaps.add(0, batch, batch, FULL)
    found = gaps.all()
    assert len(found) == MAX_RANGES
    gaps.take(found)
    assert gaps.all() == found


def test_ranks_that_miss_the_same_batches_are_named_together() -> None:
    full = [Gap((0, 2), 50, 249, FULL), Gap((1,), 50, 249, FULL)]
    gaps = joined([*full, Gap((1,), 7, 7, "I/O error"), Gap((-1,), END, END, FULL)])
    assert [describe_gap(gap, 3) for gap in gaps] == [
        "batch 7 of rank 1 is not on record: I/O error",
        "batches 50 to 249 are not on record: the disk was full",
        "what came last is not on record: the disk was full",
    ]


def test_a_gap_is_a_fact_of_the_report_and_of_the_record() -> None:
    desk = connected(1)
    gap = Gap((0,), 50, 249, FULL)
    run = desk.run
    desk.handle(Unrecorded(run.id, (gap,)))
    assert gap not in [entry.fact for entry in desk.records[run.id]]  # the disk takes nothing
    desk.handle(Stored(run.id, {}))
    desk.receive(0, messages.Bye(1, "finished", ""))
    desk.end()
    assert [entry for entry in desk.records[run.id] if entry.fact == gap] == [Entry(0.0, NO_RANK, gap)]
    report = desk.reports[-1]
    assert report.gaps == (gap,)
    told = text.render(report)
    assert "no inf or nan was reported, but not all of it is on record" in told
    assert "batches 50 to 249 are not on record: the disk was full" in told
    assert as_json.to_dict(report)["gaps"][0]["text"] == "batches 50 to 249 are not on record: the disk was full"
    assert "no inf or nan\n" in text.render(replace(report, gaps=()))


def test_batches_that_a_rank_dropped_or_had_before_it_came_are_gaps() -> None:
    desk = connected(2)
    for rank, seq, batch in [(0, 251, 249), (0, 252, 250), (0, 260, 258), (1, 3, 1000), (1, 4, 1001)]:
        desk.receive(rank, messages.Table(makers.table()), messages.Batch(seq, makers.summary(batch)))
    assert [describe_gap(gap, 2) for gap in desk.run.report().gaps] == [
        "batches 0 to 248 of rank 0 are not on record: the rank trained before it came to this collector",
        "batches 251 to 257 of rank 0 are not on record: the spool of the rank was full",
        "batches 998 to 999 of rank 1 are not on record: the rank trained before it came to this collector",
    ]


@pytest.mark.parametrize("queued", [0, 30])
def test_batches_that_a_rank_had_not_sent_when_it_was_ended_are_a_gap(queued: int) -> None:
    desk = connected(2)
    desk.receive(1, messages.Table(makers.table()))
    for batch in range(10):
        desk.receive(1, messages.Batch(batch + 1, makers.summary(batch)))
    desk.receive(1, replace(makers.beat(30, 0, 0), queued=queued))
    desk.disconnect(1)
    desk.end()
    gaps = [describe_gap(gap, 2) for gap in desk.reports[-1].gaps]
    told = "batches 10 to 30 of rank 1 are not on record: the rank was ended before it had sent them"
    assert gaps == ([told] if queued else [])  # where nothing waits, it has sent all that is sent


def test_a_resumed_training_and_a_dropped_fingerprint_are_no_gaps() -> None:
    desk = connected(1)
    for seq, batch in [(1, 1000), (2, 1001), (5, 1002)]:
        desk.receive(0, messages.Table(makers.table()), messages.Batch(seq, makers.summary(batch)))
    assert not desk.run.report().gaps
