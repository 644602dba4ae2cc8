"""The files of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import records
from makers import INF, frame, reading
from rankwatch.shared.types.frame import Phase
from rankwatch.shared.words.text import format_trace
from rankwatch_monitor.decide.core.journal import NO_RANK, Entry, JobEnded
from rankwatch_monitor.decide.trip.began import Began
from rankwatch_monitor.record import replay
from rankwatch_monitor.serve.files import run_folder
from rankwatch_monitor.serve.files.run_folder import RunsFolder


def test_a_trace_that_comes_in_parts_is_one_file(tmp_path: Path) -> None:
    folder = RunsFolder(tmp_path)
    forward = (frame(at=(4, 0, 0), module="a"), frame(at=(4, 0, 1), module=""))
    backward = (frame(reading("grad_input"), at=(4, 0, 2), module="a", phase=Phase.BACKWARD),)
    for _ in range(2):  # each forward starts the file again
        folder.record_trace("train-0", 1, 4, forward)
        folder.record_trace("train-0", 1, 4, backward)
    written = (tmp_path / "train-0" / "trace" / "batch-4.rank-1.txt").read_text()
    assert written == format_trace((*forward, *backward)) + "\n"


def test_a_backward_whose_forward_never_came_is_written_too(tmp_path: Path) -> None:
    RunsFolder(tmp_path).record_trace("train-0", 0, 4, (frame(at=(4, 0, 9)),))
    assert (tmp_path / "train-0" / "trace" / "batch-4.rank-0.txt").exists()


def test_traces_are_bounded_and_that_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = frame(at=(4, 0, 0))
    monkeypatch.setattr(run_folder, "TRACE_LIMIT", 3 * (len(format_trace([one])) + 1))
    folder = RunsFolder(tmp_path)
    for batch in range(6):
        folder.record_trace("train-0", 0, batch, [one])
    folder.record_trace("train-1", 0, 0, [one])
    assert len(list((tmp_path / "train-0" / "trace").iterdir())) == 3
    assert len(list((tmp_path / "train-1" / "trace").iterdir())) == 1
    (line,) = caplog.messages
    assert "run train-0: more than 0 MiB of traces; further ones are not written" in line


def test_each_report_knows_what_the_record_has_by_then(tmp_path: Path) -> None:
    """At a verdict, the batches of the other ranks may still be under way."""

    def parts(rank: int, jumped: float) -> list[Entry]:
        highs = [1.0 if batch < 28 else jumped for batch in range(30)]
        return [
            records.part(rank, frame(reading("output", high), at=(batch, 0, 0)), step=batch, seq=batch)
            for batch, high in enumerate(highs, 1)
        ]

    trip = records.tripped(1, frame(reading("output", INF), at=(31, 0, 0)), step=31)
    run = records.write(tmp_path / "train-1", *parts(1, 1024.0), trip, Entry(9.0, NO_RANK, JobEnded(1)))
    report = records.read(run / "run.db", lambda record: replay.take(record).report)
    folder = RunsFolder(tmp_path)
    first = folder.publish(replace(report, origin=None))
    assert first.origin is not None
    assert first.origin.began == Began(1, 29, "layer", "Linear", "output", 1024.0, None)
    records.add(run, *parts(0, 1.0))
    last = folder.publish(replace(report, origin=None))
    assert last.origin is not None
    assert last.origin.began == replace(first.origin.began, alone=True)
    assert "the other ranks' did not" in (run / "report.txt").read_text()
