"""The thread that writes records, on a real disk."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import makers
import records
from rankwatch.shared import messages
from rankwatch.shared.frame import FrameTable, pack
from rankwatch_monitor.decide.journal import NO_RANK, Closed, Entry, Opened, Trained
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.runs import folders, is_unfinished
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Limits, Store
from rankwatch_monitor.serve import writer as recorders
from rankwatch_monitor.serve.run_folder import RunsFolder
from rankwatch_monitor.serve.writer import RecordWriter

SOON = 10
TABLE = makers.table()
OPENED = Entry(0.0, NO_RANK, Opened("train", 0, 1))
BYE = Entry(0.0, 0, messages.Bye(100, "finished", ""))


def trained(*batches: int) -> list[Entry]:
    return [Entry(0.0, 0, Trained(batch + 1, makers.summary(batch), TABLE)) for batch in batches]


class Bench:
    """A writer, and the entries that it reported as stored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told = threading.Condition()
        self.seqs: dict[str, int] = {}
        self.recorder = RecordWriter(folder, self._wake, Limits(), RunsFolder(folder).begin, collector="ours")

    def _wake(self) -> None:
        with self.told:
            self.seqs.update({run: seqs[0] for run, seqs in self.recorder.stored().items() if seqs})
            self.told.notify()

    def await_stored(self, run: str, seq: int) -> None:
        with self.told:
            assert self.told.wait_for(lambda: self.seqs.get(run) == seq, SOON)

    def recorded(self, run: str = "train-0") -> list[int]:
        batches: list[int] = records.read(self.folder / run / FILE, RunRecord.digests)["batch"].tolist()
        return batches


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.recorder.close()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[threading.Event, threading.Event]]:
    """Makes the disk hang. Returns an event that a write sets when it begins, and an event that the write then waits for."""

    def make() -> tuple[threading.Event, threading.Event]:
        begun, go_on, write = threading.Event(), threading.Event(), Store.write

        def hanging(self: Store, entries: Sequence[Entry], *rest: Any, **meta: Any) -> float | None:
            begun.set()
            assert go_on.wait(SOON)
            return write(self, entries, *rest, **meta)

        monkeypatch.setattr(Store, "write", hanging)
        return begun, go_on

    return make


def test_entries_reported_as_stored_are_on_disk(bench: Bench) -> None:
    bench.recorder.append("train-0", [OPENED])
    bench.recorder.append("train-1", [OPENED])
    bench.recorder.append("train-0", trained(0, 1))
    bench.recorder.append("train-1", trained(0))
    bench.await_stored("train-0", 2)
    bench.await_stored("train-1", 1)
    assert (bench.recorded("train-0"), bench.recorded("train-1")) == ([0, 1], [0])
    assert is_unfinished(bench.folder / "train-0" / FILE, "ours") is False  # no rank is known


def test_a_collector_that_is_killed_while_a_run_begins_leaves_no_half_run(
    tmp_path: Path, hold: Callable[[], tuple[threading.Event, threading.Event]]
) -> None:
    begun, go_on = hold()
    killed = Bench(tmp_path)
    killed.recorder.append("train-0", [OPENED, *trained(0)])
    assert begun.wait(SOON)
    shutil.copytree(tmp_path, tmp_path / "left-behind")
    go_on.set()
    killed.recorder.close()
    assert folders(tmp_path) == [tmp_path / "train-0"]

    left = tmp_path / "left-behind"
    assert list(left.iterdir())  # the killed collector left files
    runs = RunsFolder(left)
    assert (folders(left), runs.unfinished("ours"), runs.is_free("train-0")) == ([], [], True)
    again = Bench(left)
    again.recorder.append("train-0", [OPENED, *trained(7)])
    again.await_stored("train-0", 8)
    again.recorder.close()
    assert again.recorded() == [7]
    assert sorted(path.name for path in left.iterdir()) == ["latest", "train-0"]


def test_batches_wait_for_others_until_something_is_urgent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "COMMIT_INTERVAL", 1e6)
    bench.recorder.append("train-0", [OPENED, *trained(0)])
    bench.recorder.append("train-0", [BYE])
    bench.await_stored("train-0", 100)
    assert bench.recorded() == [0]


def test_the_record_of_a_run_that_is_over_is_closed_and_may_be_opened_again(bench: Bench) -> None:
    bench.recorder.append(
        "train-0", [OPENED, Entry(0.0, 0, makers.hello()), *trained(0), BYE, Entry(0.0, NO_RANK, Closed())]
    )
    bench.await_stored("train-0", 100)
    assert [path.name for path in (bench.folder / "train-0").iterdir()] == [FILE]
    bench.recorder.append("train-0", [Entry(0.0, 0, makers.hello()), *trained(200), BYE])
    bench.await_stored("train-0", 100)
    bench.recorder.close()
    assert bench.recorded() == [0, 200]
    assert is_unfinished(bench.folder / "train-0" / FILE, "ours")


def test_unwritable_entries_are_logged_once_and_count_as_stored(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for batch in range(3):
        bench.recorder.append("no-such-folder", trained(batch))
        bench.await_stored("no-such-folder", batch + 1)
    bench.recorder.append("train-0", [OPENED, *trained(0)])
    bench.await_stored("train-0", 1)
    assert bench.recorded() == [0]
    (line,) = caplog.messages
    assert "no-such-folder/run.db: unable to open database file; run no-such-folder goes on without it" in line


def test_an_internal_error_ends_only_the_record_of_its_run(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_write_batches", lambda self, parts: 1 / 0)
        bench.recorder.append("train-0", [OPENED, *trained(0)])
        bench.await_stored("train-0", 1)
    bench.recorder.append("train-1", [OPENED, *trained(0)])
    bench.await_stored("train-1", 1)
    assert "an error of ours while run train-0 was recorded; it goes on without a record" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_disk_that_is_too_slow_loses_only_batches(
    bench: Bench,
    hold: Callable[[], tuple[threading.Event, threading.Event]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorders, "MAX_WAITING", 5 * 9 * TABLE.rows)
    begun, go_on = hold()
    bench.recorder.append("train-0", [OPENED])
    assert begun.wait(SOON)
    for batch in range(50):
        bench.recorder.append("train-0", trained(batch))
    bench.recorder.append("train-0", [BYE])
    go_on.set()
    bench.await_stored("train-0", 100)
    assert bench.recorded() == [0, 1, 2, 3, 4]
    assert records.read(bench.folder / "train-0" / FILE, RunRecord.entries)[-1].fact == BYE.fact
    (line,) = caplog.messages
    assert line == "the disk is too slow: batches of run train-0 are missing in its record"
    bench.recorder.append("train-0", trained(50))
    bench.await_stored("train-0", 51)
    assert bench.recorded()[-1] == 50  # batches are recorded again as soon as there is room


def test_other_files_are_written_after_the_entries_before_them_even_if_one_fails(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[list[int]] = []
    done = threading.Event()
    bench.recorder.append("train-0", [OPENED, *trained(0)])
    bench.recorder.do(lambda: seen.append(bench.recorded()))
    bench.recorder.do(lambda: seen.append([1 // 0]))
    bench.recorder.do(done.set)
    assert done.wait(SOON)
    assert seen == [[0]]
    assert "an error of ours while a file was written; the collector goes on" in caplog.text


def test_closing_writes_the_queued_entries(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "COMMIT_INTERVAL", 1e6)
    bench.recorder.append("train-0", [OPENED, *trained(0, 1, 2)])
    bench.recorder.close()
    assert bench.recorded() == [0, 1, 2]


def test_the_least_headroom_of_the_stored_batches_is_reported(tmp_path: Path) -> None:
    told = threading.Event()
    heard: list[tuple[str, float]] = []

    def tell(run: str, doublings: float) -> None:
        heard.append((run, doublings))
        told.set()

    recorder = RecordWriter(tmp_path, lambda: None, Limits(), RunsFolder(tmp_path).begin, tell)
    table = FrameTable((makers.frame(makers.reading("output", dtype="float16")).spec,))
    summaries = [
        makers.summary(batch, of=table)._replace(abs_max=pack("f", [high])) for batch, high in enumerate((1.0, 1024.0))
    ]
    entries = [Entry(0.0, 0, Trained(summary.batch + 1, summary, table)) for summary in summaries]
    recorder.append("train-0", [OPENED, *entries])
    assert told.wait(SOON)
    recorder.append("train-0", [BYE])
    recorder.close()
    ((run, doublings),) = heard
    assert run == "train-0"
    assert doublings == pytest.approx(math.log2(65504 / 1024), abs=1e-3)
