"""When which run is judged, and what that costs."""

from __future__ import annotations

from pathlib import Path

import pytest

import makers
import records
from desk import connected
from rankwatch.shared.types.frame import Kind
from rankwatch_monitor.decide.core.journal import Entry
from rankwatch_monitor.decide.core.run import Run
from rankwatch_monitor.serve.files.run_judge import EVERY, LATEST, RunJudge
from rankwatch_monitor.serve.files.unwritten import FileWrite


class Writer:
    """The actions that it was given, as the writer has them."""

    def __init__(self) -> None:
        self.given: list[tuple[str, FileWrite]] = []

    def write(self, run: str, action: FileWrite) -> None:
        self.given.append((run, action))


def trained(*batches: int) -> list[Run]:
    """Runs that have trained so many batches each."""
    found = []
    for number, count in enumerate(batches):
        run = connected(1).run
        run.id = f"train-{number}"
        run.ranks[0].last_batch = count - 1
        found.append(run)
    return found


def part(batch: int) -> Entry:
    loss = 0.7 if batch < 50 else 1e7
    root = makers.frame(makers.reading("loss", loss, low=loss, kind=Kind.LOSS), at=(batch, 0, 0), module="")
    return records.part(0, root, step=batch, seq=batch + 1, ended=100.0 + batch)


def test_the_runs_take_turns_and_each_waits_for_more_batches() -> None:
    writer = Writer()
    judge = RunJudge(lambda run: Path(run), writer.write)
    runs = trained(100, 3, 100)
    now = 0.0
    for _ in range(100):
        judge.look(runs, now)
        now += LATEST
    assert [run for run, _ in writer.given] == ["train-0", "train-2"]
    runs[0].ranks[0].last_batch = 200
    for number in range(len(runs)):
        judge.look(runs, now + number)
    assert [run for run, _ in writer.given[2:]] == ["train-0"]
    runs[2].ranks[0].last_batch = 200
    for number in range(10):
        judge.look(runs, now + len(runs) + number * EVERY)  # nothing is heard of the look before
    assert len(writer.given) == 3


def test_what_it_finds_and_that_the_next_look_waits_for_what_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = records.write(tmp_path / "train-0", *map(part, range(100)), world_size=1)
    writer = Writer()
    judge = RunJudge(lambda run: folder / "run.db", writer.write)
    runs = trained(100)
    judge.look(runs, 0.0)
    clock = iter([1.0, 3.5])
    monkeypatch.setattr("rankwatch_monitor.serve.files.run_judge.time.thread_time", lambda: next(clock))
    monkeypatch.setattr("rankwatch_monitor.serve.files.run_judge.time.monotonic", lambda: 10.0)
    writer.given[0][1].do()
    (found,) = judge.found()
    assert (found.run, found.batches, [one.kind for one in found.reasons]) == ("train-0", 100, ["loss-grown"])
    assert list(judge.found()) == []
    runs[0].ranks[0].last_batch = 200
    judge.look(runs, 10.0 + 249.0)
    assert len(writer.given) == 1
    judge.look(runs, 10.0 + 250.0)
    assert len(writer.given) == 2


def test_without_a_record_nothing_is_found(tmp_path: Path) -> None:
    writer = Writer()
    judge = RunJudge(lambda run: tmp_path / run / "run.db", writer.write)
    judge.look(trained(100), 0.0)
    writer.given[0][1].do()
    assert list(judge.found()) == []
