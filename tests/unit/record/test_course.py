"""How a run went, as its record knows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import makers
import records
from rankwatch.shared.types.frame import Frame, Kind, Phase
from rankwatch_monitor.decide.core.journal import NO_RANK, Closed, Decided, Entry, Waited
from rankwatch_monitor.decide.core.report import Outcome, Report
from rankwatch_monitor.decide.ending.course import Course, GrownReading, LossAt, LossCourse, NearestReading
from rankwatch_monitor.record import replay
from rankwatch_monitor.record.course import _loss, find_course
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.views import as_json
from rankwatch_monitor.views import text as as_text

BATCHES = 20


def forward(batch: int, rank: int, dtype: str = "float16") -> list[Frame]:
    """The weight grows by x1.1 a batch, and rank 1's output is largest in batch 7. The mask is huge on purpose."""
    high = 1000.0 if (batch, rank) == (7, 1) else 2.0
    grown = makers.reading("weight", 1.1**batch, dtype="float32")
    loss = makers.reading("loss", 4.0 / (batch + 1) + rank, kind=Kind.LOSS)
    mask = makers.reading("mask", 65504.0, dtype="float16", kind=Kind.KEYWORD)
    return [
        makers.frame(grown, mask, makers.reading("output", high, dtype=dtype), at=(batch, 0, 0), module="up"),
        makers.frame(makers.reading("output", 1.0), at=(batch, 0, 1), module="", module_class="Net"),
        makers.frame(loss, at=(batch, 0, 2), module="", module_class="Net"),
    ]


def written(folder: Path, dtype: str = "float16", batches: int = BATCHES) -> Path:
    parts = [
        records.part(rank, *forward(batch, rank, dtype), seq=batch + 1, ended=100.0 + batch / 4)
        for batch in range(batches)
        for rank in (0, 1)
    ]
    end = [Entry(9.0, NO_RANK, Decided(Outcome.FINISHED, "", False)), Entry(9.0, NO_RANK, Closed())]
    return records.write(folder, *parts, *end)


def course(folder: Path) -> Course:
    return records.read(folder / FILE, lambda record: find_course(record, 2))


def report(folder: Path) -> Report:
    return records.read(folder / FILE, lambda record: replay.take(record).report)


def test_the_course_of_a_run(tmp_path: Path) -> None:
    found = course(written(tmp_path / "train-1"))
    assert found.pace == pytest.approx(4.0)
    assert found.first_loss == LossAt(0, 4.5, 2)
    assert found.last_loss is not None
    assert found.last_loss == LossAt(19, found.last_loss.loss, 2)
    assert found.last_loss.loss == pytest.approx(0.7)
    assert found.nearest is not None
    times = found.nearest.times
    assert found.nearest == NearestReading("up", "Linear", Phase.FORWARD, "output", "float16", times, 1, 7)
    assert times == pytest.approx(65.504)
    assert found.grown is not None
    assert found.grown == GrownReading("up", "Linear", Phase.FORWARD, "weight", 0, 1.0, 19, found.grown.last)
    assert found.grown.last == pytest.approx(1.1**19, rel=1e-4)


def test_it_is_in_the_report_in_a_few_lines_and_in_the_json(tmp_path: Path) -> None:
    told = report(written(tmp_path / "train-1"))
    lines = as_text.render(told, record="rankwatch report runs/train-1").splitlines()
    assert lines == [
        "rankwatch: run train-1 finished: 2 ranks, 20 batches, no inf or nan",
        "  took       0.0 s, 4 batches a second, 1970-01-01 00:01 UTC",
        "  loss       4.5 in batch 0, 0.7 in batch 19 (mean of 2 ranks)",
        "  nearest    up (Linear), output: x65.5 below float16's largest number, on rank 1 in batch 7",
        "  grew most  up (Linear), weight: x6.12, from 1 in batch 0 to 6.12 in batch 19",
        "  noticed    nothing",
        "  steps      none was seen in 20 batches: what changes the weights, if anything does, is not known here",
        "  record     rankwatch report runs/train-1",
    ]
    assert told.course is not None
    stepped = as_text.render(replace(told, course=told.course._replace(steps=19)))
    assert stepped.endswith("  noticed    nothing\n  steps      19 before the last of 20 batches\n")
    body = json.loads(as_json.render(told))["course"]
    assert body["last_loss"] == {"batch": 19, "loss": pytest.approx(0.7), "ranks": 2}
    assert (body["nearest"]["module"], body["nearest"]["phase"]) == ("up", "forward")
    assert body["batches_per_second"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        (2, 1, "2 in batch 0 (mean of 2 ranks), 1 in batch 9 (1 rank)"),
        (2, 3, "2 in batch 0 (mean of 2 ranks), 1 in batch 9 (mean of 3 ranks)"),
        (1, 1, "2 in batch 0, 1 in batch 9"),
    ],
)
def test_each_loss_has_its_ranks_where_they_differ(tmp_path: Path, first: int, last: int, text: str) -> None:
    told = report(written(tmp_path / "train-1"))
    assert told.course is not None
    loss = LossCourse("loss", LossAt(0, 2.0, first), LossAt(9, 1.0, last))
    told = replace(told, course=told.course._replace(losses=(loss,)))
    assert f"  loss       {text}\n" in as_text.render(told)


@pytest.mark.parametrize(
    ("batches_of_a_step", "has_loss", "is_told"),
    [
        (1, 1, False),
        (2, 1, True),
        (4, 1, True),
        (20, 1, False),  # it has not stepped: nothing is known
        (2, 2, False),  # two forwards, as of a pair, and one loss
        (3, 3, False),
        (6, 2, True),
    ],
)
def test_a_loss_of_micro_batches_is_said_to_be_the_one_that_backward_got(
    tmp_path: Path, batches_of_a_step: int, has_loss: int, is_told: bool
) -> None:
    parts = [
        records.part(0, *forward(batch, 0)[: 2 + (batch % has_loss == 0)], seq=batch + 1, step=batch // batches_of_a_step)
        for batch in range(20)
    ]
    end = [Entry(9.0, NO_RANK, Decided(Outcome.FINISHED, "", False)), Entry(9.0, NO_RANK, Closed())]
    told = report(records.write(tmp_path / "train-1", *parts, *end))
    (line,) = (line for line in as_text.render(told, record="").splitlines() if line.startswith("  loss "))
    assert line.endswith(", as given to backward()") == is_told


def test_a_rank_with_two_losses_in_a_batch_is_one_rank() -> None:
    digests = np.zeros(4, [(name, np.float64) for name in ("rank", "batch", "first_frame", "loss")])
    digests["rank"], digests["first_frame"], digests["loss"] = [0, 1, 0, 1], [0, 0, 4, 4], [1.0, 3.0, 500.0, 700.0]
    assert _loss(digests, min) == LossAt(0, 2.0, 2)


def test_losses_that_take_turns_have_a_line_each(tmp_path: Path) -> None:
    parts = [records.part(rank, *records.gan(batch), seq=batch + 1) for batch in range(12) for rank in (0, 1)]
    end = [Entry(9.0, NO_RANK, Decided(Outcome.FINISHED, "", False)), Entry(9.0, NO_RANK, Closed())]
    told = report(records.write(tmp_path / "train-1", *parts, *end))
    both = [
        "  loss       Critic: 1 in batch 0, 0.9 in batch 10 (mean of 2 ranks)",
        "             Generator: -4.05 in batch 5, -4.11 in batch 11 (mean of 2 ranks)",
    ]
    lines = as_text.render(told, record="").splitlines()
    assert lines[lines.index(both[0]) :][:2] == both
    body = json.loads(as_json.render(told))["course"]
    assert [one["name"] for one in body["losses"]] == ["Critic", "Generator"]
    assert (body["first_loss"], body["last_loss"]) == (body["losses"][0]["first"], body["losses"][0]["last"])


def test_a_run_that_is_running_took_the_time_to_its_last_standings(tmp_path: Path) -> None:
    written(tmp_path / "train-1")
    before = course(tmp_path / "train-1").seconds
    records.execute(tmp_path / "train-1", "INSERT OR REPLACE INTO standing SELECT 1, MIN(time) + 60, '' FROM events")
    assert (before < 60, course(tmp_path / "train-1").seconds) == (True, 60.0)


def test_in_float32_nothing_comes_near(tmp_path: Path) -> None:
    assert course(written(tmp_path / "train-1", "float32")).nearest is None


@pytest.mark.parametrize("batches", [0, 1])
def test_what_is_not_known_is_left_out(tmp_path: Path, batches: int) -> None:
    folder = written(tmp_path / "train-1", batches=batches)
    found = course(folder)
    assert (found.pace, found.grown) == (None, None)
    assert (found.first_loss is None) == (batches == 0)
    assert "took       0.0 s, 1970-01-01 00:01 UTC\n" in as_text.render(report(folder))


def test_a_run_with_a_verdict_has_a_course_too(tmp_path: Path) -> None:
    bad = makers.frame(makers.reading("output", makers.INF), at=(1, 0, 0))
    trip = records.part(0, *forward(0, 0)), records.tripped(0, bad), Entry(9.0, NO_RANK, Waited())
    folder = records.write(tmp_path / "train-1", *trip, world_size=1)
    with RunRecord(folder / FILE) as record:
        told = replay.take(record).report
        assert told.verdict is not None
        assert told.course is not None
        assert (told.course.began, told.course.last_loss and told.course.last_loss.batch) == (100.0, 0)
    assert "\n  took       0.0 s, 1970-01-01 00:01 UTC\n" in as_text.render(told)


def test_an_error_in_the_search_costs_only_the_course(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written(tmp_path / "train-1")
    told = replace(report(folder), course=None)
    with RunRecord(folder / FILE) as record:
        record.close()
        assert replay.searched(told, record).course is None
    assert "how the run went is not known" in caplog.text
