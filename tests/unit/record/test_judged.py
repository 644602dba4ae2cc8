"""What a run is judged by, as its record has it, and where the judgement is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import makers
import records
from rankwatch.shared.types.frame import Kind
from rankwatch.shared.types.notice import NoticeKind
from rankwatch_monitor.decide.core.journal import NO_RANK, Closed, Decided, Doubted, Entry
from rankwatch_monitor.decide.core.report import End, Outcome, RankNotice, Report
from rankwatch_monitor.decide.ending.judgement import Doubt, signs_of
from rankwatch_monitor.record import judged, replay
from rankwatch_monitor.record.judged import read_numbers
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.runs import read_row
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.serve.files.run_folder import RunsFolder
from rankwatch_monitor.views import as_json, runs, text

BATCHES = 100


def part(batch: int, rank: int, loss: float, weight: float) -> Entry:
    layer = makers.frame(makers.reading("weight", weight), makers.reading("output"), at=(batch, 0, 0), module="up")
    root = makers.frame(
        makers.reading("loss", loss, low=loss, kind=Kind.LOSS), at=(batch, 0, 1), module="", module_class="Net"
    )
    return records.part(rank, layer, root, step=batch, seq=batch + 1, ended=100.0 + batch / 4)


def written(folder: Path, *, is_blown: bool = False) -> Path:
    """Two ranks; ``is_blown``: from batch 50 on, the loss and the weights are far too large."""
    parts = []
    for batch in range(BATCHES):
        is_bad = is_blown and batch >= 50
        loss, weight = (140.0, 80.0) if is_bad else (2.4 * 0.97**batch, 1.0 + batch / 100)
        parts += [part(batch, rank, loss + rank / 1000, weight) for rank in (0, 1)]
    end = [Entry(9.0, NO_RANK, Decided(Outcome.FINISHED, "", False, End.FINISHED)), Entry(9.0, NO_RANK, Closed())]
    return records.write(folder, *parts, *end)


def report(folder: Path) -> Report:
    return records.read(folder / FILE, lambda record: replay.take(record).report)


def test_the_first_line_is_the_judgement(tmp_path: Path) -> None:
    told = report(written(tmp_path / "train-1"))
    head = "rankwatch: run train-1 finished, and looks healthy: loss 2.26 -> 0.189, still falling; 4 batches/s, steady"
    assert text.render(told).splitlines()[0] == f"{head}; 2 ranks, 100 batches, no inf or nan"
    assert "  noticed    nothing\n" in text.render(told)
    body = json.loads(as_json.render(told))
    assert body["judgement"]["healthy"] is True
    assert (body["outcome"], body["judgement"]["reasons"]) == ("finished", [])


def test_what_went_badly_is_told_with_its_batch_wherever_a_run_is_shown(tmp_path: Path) -> None:
    told = report(written(tmp_path / "train-1", is_blown=True))
    grown = "the loss has grown x244 since batch 50: 140, from 0.574 in batch 47; on all ranks alike"
    why = f"{grown}; from batch 49 to 66, 1 of 1 weights changed more than twofold (up.weight x53.7)"
    assert text.render(told).splitlines()[0].startswith(f"rankwatch: run train-1 finished, but {why}; 2 ranks")
    assert "noticed" not in text.render(told)
    body = json.loads(as_json.render(told))
    assert (body["outcome"], body["advice"]) == ("finished", None)
    assert body["judgement"] == {
        "healthy": False,
        "text": why,
        "reasons": [{"kind": "loss-grown", "batch": 50, "text": why}],
    }
    RunsFolder(tmp_path).publish(told)
    row = read_row(tmp_path / "train-1")
    assert (row.outcome, row.judged) == ("finished", why)
    assert runs.render([row]).splitlines()[1] == f"train-1  finished, but  2      100      {why}"
    assert runs.to_dict(row)["judged"] == why


def test_while_it_lasts_a_report_of_a_running_run_says_so(tmp_path: Path) -> None:
    told = report(written(tmp_path / "train-1", is_blown=True))
    assert "  but        the loss has grown x244 since batch 50" in text.render_so_far(told)
    held_up = replace(told, course=None, held_up=(40, "rank 1 takes long"))
    assert "  but        rank 1 takes long\n" in text.render_so_far(held_up)
    assert "  but" not in text.render_so_far(report(written(tmp_path / "train-2")))


def test_a_notice_of_a_rank_that_stands_still_is_a_reason(tmp_path: Path) -> None:
    notice = makers.notice(NoticeKind.NO_STEP, module="", why="no optimizer has ever stepped")
    told = replace(report(written(tmp_path / "train-1")), notices=(RankNotice(0, notice), RankNotice(1, notice)))
    line = text.render(told).splitlines()[0]
    assert line.startswith("rankwatch: run train-1 finished, but ranks 0-1: stands still: 4094 backwards since batch 10")


def test_what_a_running_run_says_is_what_was_told_of_it(tmp_path: Path) -> None:
    """A moment in the middle may be any: what speaks against the run is told once it has lasted."""
    parts = [part(batch, rank, 140.0 if batch >= 50 else 0.7, 1.0 + batch) for batch in range(BATCHES) for rank in (0, 1)]
    folder = records.write(tmp_path / "train-1", *parts)
    with RunRecord(folder / FILE) as record:
        so_far = replay.take(record, course_so_far=True)
    assert not so_far.is_over
    assert "  but" not in text.render_so_far(so_far.report)
    doubt = Doubt("loss-grown", 50, "the loss has grown x200 since batch 50")
    records.add(folder, Entry(9.0, NO_RANK, Doubted((doubt,))))
    with RunRecord(folder / FILE) as record:
        so_far = replay.take(record, course_so_far=True)
    assert f"  but        {doubt.text}\n" in text.render_so_far(so_far.report)
    body = json.loads(as_json.render(so_far.report))
    assert body["judgement"]["reasons"] == [doubt._asdict()]
    row = read_row(folder)
    assert runs.render([row]).splitlines()[1] == f"train-1  running, but  2      100      {doubt.text}"
    records.add(folder, Entry(9.5, NO_RANK, Doubted(())))
    assert runs.render([read_row(folder)]).splitlines()[1] == "train-1  running  2      100"


def test_weights_that_are_measured_in_few_batches_of_a_budget(tmp_path: Path) -> None:
    every, batches = 48, 1000

    def entry(batch: int) -> Entry:
        is_bad = batch >= 600
        loss = 140.0 if is_bad else 2.4 * 0.97 ** min(batch, 100)
        root = makers.frame(
            makers.reading("loss", loss, low=loss, kind=Kind.LOSS), at=(batch, 0, 1), module="", module_class="Net"
        )
        layer = makers.frame(makers.reading("weight", 80.0 if is_bad else 1.0), at=(batch, 0, 0), module="up")
        measured = [root] if batch % every else [layer, root]
        return records.part(0, *measured, step=batch, seq=batch + 1, ended=100.0 + batch / 4)

    folder = records.write(tmp_path / "train-1", *map(entry, range(batches)), world_size=1)
    with RunRecord(folder / FILE) as record:
        numbers = read_numbers(record, batches)
        assert numbers.weights(500, 640) > 5.0
        assert [one.kind for one in signs_of(numbers, 4.0).reasons] == ["loss-grown"]


def test_of_a_long_run_a_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged, "ENDS", 10)
    with RunRecord(written(tmp_path / "train-1") / FILE) as record:
        numbers = read_numbers(record, BATCHES)
    losses = numbers.losses["loss"]
    assert list(losses.batches[:11]) == list(range(11))
    assert list(losses.batches[-10:]) == list(range(90, 100))
    assert len(losses) == 30
    assert numbers.unchanged is None


def test_segments_of_both_ends_and_some_between(tmp_path: Path) -> None:
    folder = written(tmp_path / "train-1")
    for number in range(2, 41):
        records.execute(
            folder, "INSERT INTO digests SELECT ?, first_batch, last_batch, count, body FROM digests WHERE id = 1", number
        )
    with RunRecord(folder / FILE) as record:
        read = [number for number, _ in record.some_segments(("batch",), 16)]
        assert (read[:3], read[-3:], len(read)) == ([1, 2, 3], [38, 39, 40], 16)
        assert [number for number, _ in record.some_segments(("batch",), 64)] == list(range(1, 41))
