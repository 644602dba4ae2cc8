"""The thread that writes records, on a real disk."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

import makers
import records
from collectors import until
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameTable, pack
from rankwatch_monitor.decide.core.gaps import Gap, describe_gap
from rankwatch_monitor.decide.core.journal import NO_RANK, Closed, Entry, Opened, Trained
from rankwatch_monitor.decide.keys import budget
from rankwatch_monitor.record import facts
from rankwatch_monitor.record import store as store_module
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.runs import RunRow, folders, is_unfinished, read_row
from rankwatch_monitor.record.schema import FILE, StoreError
from rankwatch_monitor.record.store import Limits, Store
from rankwatch_monitor.serve.files import unwritten as held
from rankwatch_monitor.serve.files import writer as recorders
from rankwatch_monitor.serve.files.run_folder import RunsFolder
from rankwatch_monitor.serve.files.unwritten import FileWrite
from rankwatch_monitor.serve.files.writer import RecordWriter
from rankwatch_monitor.views import runs

SOON = 10
Hold: TypeAlias = Callable[[], tuple[threading.Event, threading.Event]]
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

    def row(self, run: str = "train-0") -> RunRow:
        return read_row(self.folder / run)

    def recorded(self, run: str = "train-0") -> list[int]:
        batches: list[int] = records.read(self.folder / run / FILE, RunRecord.digests)["batch"].tolist()
        return batches


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.recorder.close()


@pytest.fixture
def retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again soon."""
    monkeypatch.setattr(held, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(held, "LAST_RETRY", 0.01)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Hold:
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


def test_a_record_that_is_half_made_is_no_run(tmp_path: Path, hold: Hold) -> None:
    begun, go_on = hold()
    first = Bench(tmp_path)
    first.recorder.append("train-0", [OPENED, *trained(0)])
    assert begun.wait(SOON)
    assert (folders(tmp_path), RunsFolder(tmp_path).unfinished("ours")) == ([], [])
    go_on.set()
    first.recorder.close()
    assert folders(tmp_path) == [tmp_path / "train-0"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["latest", FILE, "train-0"]


def test_batches_wait_for_others_until_something_is_urgent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "COMMIT_INTERVAL", 1e6)
    bench.recorder.append("train-0", [OPENED, *trained(0)])
    bench.recorder.append("train-0", [BYE])
    bench.await_stored("train-0", 100)
    assert bench.recorded() == [0]


def test_the_record_of_a_run_that_is_over_is_closed_and_may_be_opened_again(bench: Bench) -> None:
    hello, closed = Entry(0.0, 0, makers.hello()), Entry(0.0, NO_RANK, Closed())
    bench.recorder.append("train-0", [OPENED, hello, *trained(0), BYE, closed])
    bench.await_stored("train-0", 100)
    assert [path.name for path in (bench.folder / "train-0").iterdir()] == [FILE]
    bench.recorder.append("train-0", [hello, *trained(200), BYE])
    bench.await_stored("train-0", 100)
    bench.recorder.close()
    assert bench.recorded() == [0, 200]
    assert is_unfinished(bench.folder / "train-0" / FILE, "ours")


def test_what_the_disk_refuses_is_held_and_stored_as_soon_as_it_takes_it(
    bench: Bench, caplog: pytest.LogCaptureFixture, retries: None
) -> None:
    for batch in range(3):
        bench.recorder.append("later", trained(batch))
    bench.recorder.append("train-0", [OPENED, *trained(0)])
    bench.await_stored("train-0", 1)  # another run does not wait for it
    assert bench.recorded() == [0]
    assert "later" not in bench.seqs
    ((gap,), why) = bench.recorder.unstored("later"), "the file could not be opened"
    assert gap == Gap((0,), 0, 2, why)
    (line,) = caplog.messages
    assert "cannot write run later (the file could not be opened); it is tried again" in line
    (bench.folder / "later").mkdir()
    bench.await_stored("later", 3)
    assert bench.recorded("later") == [0, 1, 2]
    assert (bench.recorder.unstored("later"), bench.recorder.lost()) == ((), {})


@pytest.mark.parametrize("answers", [[False, True], [True, False], [True, False, True, False]])
def test_a_transaction_that_failed_is_written_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, retries: None, answers: list[bool]
) -> None:
    """``answers``: whether a transaction that fails is in the file all the same."""
    bench.recorder.append("train-0", [OPENED, *trained(0)])
    bench.await_stored("train-0", 1)
    write, left = Store.write, answers[::-1]

    def uncertain(self: Store, *arguments: Any, **meta: Any) -> float | None:
        if not left:
            return write(self, *arguments, **meta)
        found = write(self, *arguments, **meta) if left.pop() else None
        raise StoreError("the disk did not say whether it took it") from OSError(5, "I/O error") if found else None

    monkeypatch.setattr(Store, "write", uncertain)
    bench.recorder.append("train-0", [*trained(1), BYE])
    bench.await_stored("train-0", 100)
    assert bench.recorded() == [0, 1]


@pytest.mark.parametrize("frees", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_disk_that_gets_full_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retries: None, *, frees: bool
) -> None:
    monkeypatch.setattr(recorders, "LAST_TRIES", 0.05)
    monkeypatch.setattr(recorders, "MAX_WAITING", 2 * 100 * 9 * TABLE.rows)
    bench = Bench(tmp_path)
    bench.recorder.append("train-0", [OPENED, *trained(*range(50))])
    bench.await_stored("train-0", 50)
    refused = threading.Semaphore(0)

    def full(self: Store, *arguments: Any, **meta: Any) -> float | None:
        refused.release()
        raise StoreError("the record") from OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", full)
        bench.recorder.append("train-0", trained(*range(50, 100)))
        for _ in range(2):  # at the second refusal, the writer has noted why the first one was
            assert refused.acquire(timeout=SOON)
        bench.recorder.append("train-0", trained(*range(100, 250)))
        if not frees:
            bench.recorder.append("train-0", [BYE])
            bench.recorder.close()
            described = [describe_gap(gap, 1) for gap in bench.recorder.unstored("train-0")]
            assert described[0] == "batches 50 to 249 are not on record: the disk was full"
            assert described[1] == "what came last is not on record: the disk was full"
            assert bench.seqs == {"train-0": 50}
            assert not bench.row().is_alive
            return
    assert bench.recorder.lost() == {"train-0": (Gap((0,), 150, 249, "the disk was full"),)}
    bench.await_stored("train-0", 150)
    bench.recorder.append("train-0", [*trained(250), BYE])
    bench.await_stored("train-0", 100)
    assert bench.recorded() == [*range(150), 250]
    bench.recorder.close()


def test_a_slow_disk_loses_nothing_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, write = Bench(tmp_path), Store.write
    turns = threading.Semaphore(0)

    def slow(self: Store, entries: Sequence[Entry], *rest: Any, **meta: Any) -> float | None:
        assert turns.acquire(timeout=SOON)
        return write(self, entries, *rest, **meta)

    monkeypatch.setattr(Store, "write", slow)
    clock = itertools.count(0.0, 19.0)  # each look at the clock comes 19 s later, and the disk is given up after 20
    monkeypatch.setattr(recorders, "time", SimpleNamespace(monotonic=clock.__next__, time=time.time))

    def progress() -> int:
        turns.release()  # the disk takes something between two looks
        return next(looks)

    looks = itertools.count()
    monkeypatch.setattr(bench.recorder, "_progress", progress)
    for run in range(8):
        bench.recorder.append(f"train-{run}", [OPENED, *trained(0), BYE])
    bench.recorder.close()
    assert [bench.recorded(f"train-{run}") for run in range(8)] == [[0]] * 8


def test_a_disk_that_does_not_answer_is_given_up_at_the_end(
    tmp_path: Path, hold: Hold, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "STUCK", 0.05)
    bench = Bench(tmp_path)
    begun, go_on = hold()
    bench.recorder.append("train-0", [OPENED, *trained(0, 1)])
    assert begun.wait(SOON)
    bench.recorder.close()
    assert "the disk has not answered for 0.05 s" in caplog.text
    gaps = [describe_gap(gap, 1) for gap in bench.recorder.unstored("train-0", late=True)]
    assert gaps[0] == "batches 0 to 1 are not on record: the disk did not answer"
    go_on.set()


def test_a_run_is_alive_while_its_record_is_written(bench: Bench) -> None:
    bench.recorder.append("train-0", [OPENED, *trained(0)])
    bench.await_stored("train-0", 1)
    assert bench.row().is_alive
    bench.recorder.close()
    assert not bench.row().is_alive
    assert runs.render([bench.row()]).splitlines()[1].split()[:2] == ["train-0", "unfinished"]


def test_an_internal_error_ends_only_the_record_of_its_run(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_write_batches", lambda self, parts: 1 / 0)
        bench.recorder.append("train-0", [OPENED, *trained(0)])
        until(lambda: bench.recorder.lost())
        assert "train-0" not in bench.seqs
    bench.recorder.append("train-1", [OPENED, *trained(0)])
    bench.await_stored("train-1", 1)
    assert "an error of ours while run train-0 was recorded; it goes on without a record" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_disk_that_is_too_slow_loses_only_batches(
    bench: Bench, hold: Hold, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "MAX_WAITING", 2 * 5 * 9 * TABLE.rows)
    begun, go_on = hold()
    bench.recorder.append("train-0", [OPENED])
    assert begun.wait(SOON)
    for batch in range(50):
        bench.recorder.append("train-0", trained(batch))
    bench.recorder.append("train-0", [BYE])
    bench.recorder.append("other-0", [OPENED, *trained(0, 1)])  # a run may take half of what is free
    go_on.set()
    bench.await_stored("train-0", 100)
    bench.await_stored("other-0", 2)
    assert bench.recorded() == [0, 1, 2, 3, 4]
    assert bench.recorded("other-0") == [0, 1]
    assert records.read(bench.folder / "train-0" / FILE, RunRecord.entries)[-1].fact == BYE.fact
    (line,) = caplog.messages
    assert line == "the disk was too slow: batches of run train-0 are missing in its record"
    bench.recorder.append("train-0", trained(50))
    bench.await_stored("train-0", 51)
    assert bench.recorded()[-1] == 50  # batches are recorded again as soon as there is room


def test_batches_of_one_key_leave_room_for_those_of_another(
    bench: Bench, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 9 * TABLE.rows
    monkeypatch.setattr(recorders, "MAX_WAITING", 40 * size)
    begun, go_on = hold()
    bench.recorder.append("train-0", [OPENED])
    assert begun.wait(SOON)
    for number in range(20):
        opened = Entry(0.0, NO_RANK, Opened("greedy", number, 1, bound="greedy"))
        bench.recorder.append(f"greedy-{number}", [opened, *trained(*range(20))])
    assert bench.recorder.unwritten == 30 * size
    bench.recorder.append("train-0", trained(*range(5)))
    go_on.set()
    bench.await_stored("train-0", 5)
    assert bench.recorded() == [0, 1, 2, 3, 4]


def test_facts_of_one_key_are_bounded_while_the_disk_does_not_answer_and_leave_room_for_those_of_another(
    bench: Bench, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(facts.encode(BYE.fact)[1])
    monkeypatch.setattr(recorders, "MANY", 20)
    monkeypatch.setattr(recorders, "MAX_FACTS", 40 * size)
    begun, go_on = hold()
    bench.recorder.append("train-0", [OPENED])
    assert begun.wait(SOON)
    greedy = [f"greedy-{number}" for number in range(20)]
    for number, run in enumerate(greedy):
        bench.recorder.append(run, [Entry(0.0, NO_RANK, Opened("greedy", number, 1, bound="greedy"))])
    for run in greedy:
        bench.recorder.append(run, [BYE] * 10)
    assert [run for run in greedy if not bench.recorder.unstored(run)] == greedy[:3]
    bench.recorder.append("train-0", [BYE] * 5)
    assert bench.recorder.unstored("train-0") == ()
    go_on.set()
    bench.await_stored("greedy-0", 100)
    bench.recorder.append("greedy-19", [BYE] * 10)  # there is room again
    bench.await_stored("greedy-19", 100)


@pytest.mark.slow
def test_records_of_a_key_that_has_filled_its_share_of_the_disk_drop_their_oldest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(budget, "DISK_AT_ONCE", 1 << 19)
    monkeypatch.setattr(budget, "DISK_PER_SECOND", 0.0)
    monkeypatch.setattr(store_module, "SEGMENT", 64)
    monkeypatch.setattr(store_module, "LEAST", 8192)
    monkeypatch.setattr(recorders, "COMMIT_INTERVAL", 0.0)

    def train(run: str, bound: str, batches: int) -> list[int]:
        bench.recorder.append(run, [Entry(0.0, NO_RANK, Opened(run, 0, 1, bound=bound))])
        for first in range(0, batches, 200):
            bench.recorder.append(run, trained(*range(first, first + 200)))
            bench.await_stored(run, first + 200)
        bench.recorder.append(run, [Entry(0.0, NO_RANK, Closed())])
        return bench.recorded(run)

    greedy = [train(f"greedy-{number}", "greedy", 4000) for number in range(2)]
    assert [batches[-1] for batches in greedy] == [3999] * 2
    assert 500 < len(greedy[0]) < 3500
    assert len(greedy[1]) < 400
    assert train("llama-0", "llama", 1000) == list(range(1000))
    (line,) = [line for line in caplog.messages if "share of the disk" in line]
    assert line.startswith("the runs of the key of job greedy have filled its share of the disk")


def test_other_files_are_written_after_the_entries_before_them_even_if_one_fails(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[list[int]] = []
    done = threading.Event()
    bench.recorder.append("train-0", [OPENED, *trained(0)])
    bench.recorder.do("train-0", FileWrite(lambda: seen.append(bench.recorded())))
    bench.recorder.do("train-0", FileWrite(lambda: seen.append([1 // 0])))
    bench.recorder.do("train-0", FileWrite(done.set))
    assert done.wait(SOON)
    assert seen == [[0]]
    assert "an error of ours while a file was written; the collector goes on" in caplog.text


def test_beside_a_record_that_another_process_has_locked_reports_are_written_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "WRITER_TIMEOUT", 0.05)
    bench.recorder.append("train-0", [OPENED, *trained(0)])
    until(lambda: bench.seqs)
    with closing(sqlite3.connect(bench.folder / "train-0" / FILE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        early, late = list[None](), threading.Event()
        bench.recorder.append("train-0", [*trained(1), BYE])
        bench.recorder.do("train-0", FileWrite(late.set, lambda: early.append(None)))
        until(lambda: early)
        assert not late.is_set()
        other.execute("ROLLBACK")
    assert late.wait(SOON)
    assert (bench.recorded(), early) == ([0, 1], [None])


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
    columns = [pack("f", [high]) for high in (1.0, 1024.0)]
    summaries = [makers.summary(batch, of=table)._replace(abs_max=column) for batch, column in enumerate(columns)]
    entries = [Entry(0.0, 0, Trained(summary.batch + 1, summary, table)) for summary in summaries]
    recorder.append("train-0", [OPENED, *entries])
    assert told.wait(SOON)
    recorder.append("train-0", [BYE])
    recorder.close()
    ((run, doublings),) = heard
    assert run == "train-0"
    assert doublings == pytest.approx(math.log2(65504 / 1024), abs=1e-3)


def replace(path: Path) -> None:
    path.with_name("other").write_bytes(path.read_bytes())
    os.replace(path.with_name("other"), path)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.unlink(),
        lambda path: shutil.rmtree(path.parent),
        lambda path: os.truncate(path, 0),
        pytest.param(replace, marks=pytest.mark.slow),
        pytest.param(lambda path: path.write_bytes(bytes(path.stat().st_size)), marks=pytest.mark.slow),
    ],
    ids=["removed", "folder removed", "emptied", "replaced", "overwritten"],
)
def test_what_is_written_to_a_file_that_is_gone_is_not_stored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, retries: None, harm: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(recorders, "LAST_TRIES", 0.05)
    bench.recorder.append("train-0", [OPENED, *trained(*range(50))])
    bench.await_stored("train-0", 50)
    harm(bench.folder / "train-0" / FILE)
    bench.recorder.append("train-0", trained(*range(50, 60)))
    until(lambda: bench.recorder.unstored("train-0"))
    first = describe_gap(bench.recorder.unstored("train-0")[0], 1)
    assert first.startswith("batches 0 to 59 are not on record: the file ")
    bench.recorder.append("train-0", [BYE])
    bench.recorder.close()
    assert describe_gap(bench.recorder.lost()["train-0"][0], 1).startswith("batches 0 to 59 are not on record: the file ")
    assert bench.seqs == {"train-0": 50}


def test_a_file_that_comes_back_is_gone_on_with(bench: Bench, retries: None) -> None:
    bench.recorder.append("train-0", [OPENED, *trained(*range(50))])
    bench.await_stored("train-0", 50)
    (bench.folder / "train-0").rename(bench.folder / "elsewhere")
    bench.recorder.append("train-0", trained(*range(50, 60)))
    until(lambda: bench.recorder.unstored("train-0"))
    (bench.folder / "elsewhere").rename(bench.folder / "train-0")
    bench.await_stored("train-0", 60)
    assert bench.recorded() == list(range(60))
    assert (bench.recorder.unstored("train-0"), bench.recorder.lost()) == ((), {})
