"""Replicas that are not one model, from the fingerprints of their ranks to the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

import makers
from desk import connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.fingerprint import ALL_ROWS, OF_BUFFERS, Fingerprint, FingerprintTable, RankMesh
from rankwatch.shared.types.notice import NoticeKind
from rankwatch_monitor.decide.core.effects import Alert, Trouble
from rankwatch_monitor.decide.core.report import Outcome, Report

Values = Callable[[int, int, int], int]
"""The checksum of a row on a rank at an ordinal."""

SLOTS = 2


class Job:
    """Ranks that send fingerprints: slot by slot, after the first three."""

    def __init__(self, ranks: int, table: FingerprintTable | None = None, **options: Any) -> None:
        self.desk = connected(ranks, **options)
        self.table = table or makers.fingerprint_table(4, ranks, inputs=None)
        self.seq = [0] * ranks
        self.desk.receive(range(ranks), messages.Fingerprints(self.table))

    def step(self, rank: int, ordinal: int, value: Values, **changes: object) -> None:
        self.seq[rank] += 1
        self.desk.receive(rank, messages.Fingerprinted(self.seq[rank], self.taken(rank, ordinal, value, **changes)))

    def taken(self, rank: int, ordinal: int, value: Values, **changes: object) -> Fingerprint:
        slot = ALL_ROWS if ordinal <= 2 or changes.get("is_loaded") else ordinal % SLOTS
        slot = changes.pop("slot", slot)  # type: ignore[assignment]
        rows = self.table.rows_of(slot)
        values = [value(rank, self.table.rows.index(row), ordinal) for row in rows]
        at = replace(self.table, rows=rows)
        return makers.fingerprint(at, ordinal, values, table_id=self.table.id, slot=slot, **changes)

    def train(self, value: Values, ordinals: Sequence[int], **changes: object) -> Report:
        for ordinal in ordinals:
            for rank in range(len(self.seq)):
                self.step(rank, ordinal, value, **changes)
        return self.report()

    def report(self) -> Report:
        self.desk.wait(1.0)
        return self.desk.run.report()

    @property
    def lines(self) -> list[str]:
        return [note for note in self.desk.notes if "differ" in note or "same" in note]


def equal(rank: int, row: int, ordinal: int) -> int:
    return 1000 * (row + 1) + ordinal


def told(report: Report) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(one.pattern.value, one.parameter, one.ranks, one.step) for one in report.desync]


def test_a_live_report_says_no_longer_that_all_are_equal() -> None:
    """What was compared is a fact each minute only, but at once where something differs."""
    job = Job(3)
    assert (first := job.train(equal, [0]).compared) is not None
    assert first.equal
    flipped = lambda rank, row, at: equal(rank, row, at) + (rank == 1 and row == 2 and at >= 5)  # noqa: E731
    compared = job.train(flipped, range(1, 9)).compared
    assert compared is not None
    assert (compared.equal, compared.step >= 5) == (False, True)


def test_equal_replicas_are_compared_and_nothing_is_found() -> None:
    job = Job(4)
    assert told(job.train(equal, range(50))) == []
    job.desk.end()
    compared = job.report().compared
    assert compared is not None
    assert (compared.step, compared.parameters, compared.ranks, compared.times, compared.equal) == (49, 4, 4, 50, True)


def test_one_flipped_bit_names_rank_parameter_and_step() -> None:
    def flipped(rank: int, row: int, ordinal: int) -> int:
        return equal(rank, row, ordinal) ^ (rank == 1 and row == 2 and ordinal >= 19)

    job = Job(4)
    report = job.train(flipped, range(40))
    (one,) = report.desync
    assert told(report) == [("one-rank", "layers.2.weight", (1,), 20)]
    assert (one.host, one.equal_at, one.replicas, one.is_declared) == ("node0", 18, 4, True)
    assert len(job.lines) == 1
    assert "rank 1 of 4 (node0): layers.2.weight differs from the other 3 since step 20, equal at step 18" in job.lines[0]


def test_buffers_that_differ_are_told_and_are_no_parameters() -> None:
    table = makers.fingerprint_table(6, 3, inputs=None)
    (weights,) = table.meshes
    buffers = replace(weights, source=OF_BUFFERS, is_declared=False)
    rows = tuple(row._replace(mesh=int(number > 3), is_trainable=number < 4) for number, row in enumerate(table.rows))
    job = Job(3, FingerprintTable(rows, (weights, buffers)))

    def value(rank: int, row: int, ordinal: int) -> int:
        return equal(rank, row, ordinal) if row < 4 else 7 + (rank == 1 and row == 5)

    report = job.train(value, range(40))
    assert told(report) == [("buffer", "layers.5.weight", (1,), 0)]
    assert not report.desync[0].is_split
    job.desk.end()
    compared = job.report().compared
    assert compared is not None
    assert (compared.parameters, compared.equal) == (4, True)


def test_the_first_update_may_come_late() -> None:
    """The learning rate warms up from 0, or a scaler skips the first steps."""

    def value(rank: int, row: int, at: int) -> int:
        return equal(0, row, max(0, at - 9)) + 100 * rank * (at > 9)

    assert {p for p, *_ in told(Job(4).train(value, range(30)))} == {"unsynchronised"}
    part = Job(4).train(lambda rank, row, at: value(rank * (row == 3), row, at), range(30))
    assert [(p, n) for p, n, *_ in told(part)] == [("subset", "layers.3.weight")]


@pytest.mark.parametrize(("is_sharded", "found"), [(True, ["subset"]), (False, [])])
def test_what_is_not_sharded_beside_shards_must_be_equal(is_sharded: bool, found: list[str]) -> None:
    """Shards cannot be compared, so nothing is seen to stay equal beside a parameter that FSDP ignores."""
    shards = RankMesh((0, 1), (2,), (not is_sharded,), source="FSDP")
    beside = RankMesh((0, 1), (2,), (True,), source="none", is_declared=False)
    table = makers.fingerprint_table(4, 2, inputs=None, meshes=(shards, beside))
    table = replace(table, rows=tuple([row._replace(mesh=int(row is table.rows[-1])) for row in table.rows]))

    def value(rank: int, row: int, at: int) -> int:
        return equal(rank, row, min(at, 0 if row < 3 else at)) + 7 * rank * (at > 0 and row == 3)

    assert [one.pattern for one in Job(2, table).train(value, range(60)).desync] == found


def test_models_of_their_own_are_never_said_to_be_equal() -> None:
    """Each rank trains a plain model with a seed of its own: constants, as a norm's weights, are equal before the first step."""
    mesh = RankMesh((0, 1), (2,), (True,), source="none", is_declared=False)
    table = replace(makers.fingerprint_table(4, 2, inputs=None), meshes=(mesh,))

    def own(rank: int, row: int, at: int) -> int:
        return equal(rank, row, at) + rank * (row < 3 or at > 0)

    job = Job(2, table)
    report = job.train(own, range(20), communicates=False)
    assert {pattern for pattern, *_ in told(report)} == {"initialisation"}
    job.desk.end()
    compared = job.report().compared
    assert compared is not None
    assert (compared.parameters, compared.times, compared.equal) == (3, 20, False)


def test_abort_on_desync() -> None:
    job = Job(2, abort_on_desync=True)
    report = job.train(lambda rank, row, at: equal(rank, row, at) + rank, range(3))
    assert report.outcome is Outcome.ABORTED
    assert report.stops_ranks
    assert "layers.0.weight differs" in report.reason
    assert job.desk.sent(0, messages.Abort)
    assert job.desk.sent(1, messages.Abort)


def test_a_run_that_goes_on_does_not_stop_its_ranks_and_somebody_is_told_once() -> None:
    job = Job(2)
    assert not job.train(lambda rank, row, at: equal(rank, row, at) + rank, range(3)).stops_ranks
    assert not job.desk.sent(0, messages.Abort)
    (alert,) = job.desk.asked(Alert)
    assert (alert.trouble, alert.text.partition(" differs")[0]) == (Trouble.DESYNC, "ranks 0-1: layers.0.weight")
    assert alert.report.desync


def test_shards_that_have_nothing_of_a_parameter_say_nothing_of_its_seed() -> None:
    """Two of four rows are zero on all ranks: what is drawn at all differs, so the seeds do."""
    job = Job(2)
    report = job.train(lambda rank, row, at: 0 if row < 2 else row + 10 * rank, [0])
    assert [one.pattern.value for one in report.desync] == ["initialisation"] * 2


@pytest.mark.parametrize(("kind", "pattern"), [(NoticeKind.NEVER_CHANGED, "never-changed"), (NoticeKind.UNTIED, "untied")])
def test_parameters_that_are_noticed_one_by_one_are_told_in_one_line(kind: NoticeKind, pattern: str) -> None:
    desk = connected(2)
    for rank in range(2):
        for number in range(3):
            noticed = makers.notice(kind, module=f"layers.{number}", label="weight", value=36.0, batch=36, since=0)
            desk.receive(rank, messages.Noticed(number + 1, noticed))
    desk.wait(1.0)
    assert told(desk.run.report()) == [(pattern, f"layers.{number}.weight", (0, 1), 36) for number in range(3)]
    (line,) = [note for note in desk.notes if "layers." in note]
    assert "ranks 0-1: layers.0.weight" in line
    assert "step 36" in line
    assert "and 2 more parameters" in line
