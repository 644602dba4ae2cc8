"""The data of the page's views, read from a record."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

import makers
import records
import standings
from rankwatch.shared.types.frame import Kind, Phase
from rankwatch_monitor.decide.core.journal import NO_RANK, Closed, Desynced, Entry, ReplicasCompared, Stood, Waited
from rankwatch_monitor.decide.core.report import Stall
from rankwatch_monitor.decide.replicas.desync import Compared, Desync, DesyncPattern
from rankwatch_monitor.record import replay
from rankwatch_monitor.record.runs import RunRow, folders, read_row
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Store
from rankwatch_monitor.views.ui import pages as of_pages
from rankwatch_monitor.views.ui.pages import Pages, RunPages
from rankwatch_monitor.views.ui.sources import SPARK


@pytest.mark.parametrize(("heartbeat", "is_silent"), [(1.0, True), (10.0, False)])
def test_the_collector_is_silent_after_three_heartbeats(tmp_path: Path, heartbeat: float, is_silent: bool) -> None:
    run = records.write(tmp_path / "train-0", records.part(0, *records.frames(0)))
    records.add(run, at=time.time() - 20.0, shown=standings.shown(heartbeat=heartbeat))
    with RunPages(run).open() as record:
        assert RunPages(run).overview(record)["silent_collector"] is is_silent


def test_new_batches_are_added_to_the_earlier_ones(tmp_path: Path) -> None:
    run = records.write(tmp_path / "train-0", records.part(0, *records.frames(0)))
    pages = RunPages(run)
    with pages.open() as before:
        assert [len(row) for row in pages.ranks(before).cells] == [1, 1]
        store = Store(run / FILE)
        store.write([records.part(1, *records.frames(1))], 100.0)
        with pages.open() as after:
            assert pages.overview(after)["report"]["batches"] == 2
            grid = pages.ranks(after)
        assert [[cell is None for cell in row] for row in grid.cells] == [[False, True], [True, False]]
        assert pages.overview(before)["report"]["batches"] == 1  # its record was opened at an earlier moment
        store.close()
    with pages.open() as after:
        assert pages.overview(after)["report"]["batches"] == 2


def test_losses_that_take_turns_have_lines_of_their_own(tmp_path: Path) -> None:
    """Also where that is known only while the page is open. Of the first round nothing is known."""
    run = records.write(tmp_path / "train-0", *[records.part(rank, *records.gan(0)) for rank in (0, 1)])
    pages = RunPages(run)
    with pages.open() as record:
        assert {line["name"] for line in pages.curves(record, [0])["loss"]} == {"mean of the ranks", "rank 0"}
    records.add(run, *[records.part(rank, *records.gan(batch), seq=batch + 1) for batch in range(2, 8) for rank in (0, 1)])
    with pages.open() as record:
        lines = {line["name"]: line["points"] for line in pages.curves(record, [0])["loss"]}
    assert list(lines) == [f"{name}, {line}" for name in ("Critic", "Generator") for line in ("mean of the ranks", "rank 0")]
    assert lines["Critic, mean of the ranks"] == [[0, 1.0, None], [4, 0.96, None], [6, 0.94, None]]
    assert lines["Generator, rank 0"] == [[5, -4.05, None], [7, -4.07, None]]


def test_the_time_of_a_batch_is_counted_from_the_first_one(tmp_path: Path) -> None:
    parts = [records.part(0, *records.frames(batch), seq=batch + 1, ended=11.0 + 2 * batch) for batch in range(3)]
    run = RunPages(records.write(tmp_path / "train-0", *parts))
    with run.open() as record:
        clock = run.curves(record)["clock"]
    assert (clock[0], clock[-1]) == ((0, 0.0), (2, 4.0))


def test_a_list_has_the_cause_and_the_losses_of_a_run(tmp_path: Path) -> None:
    parts = [records.part(rank, *records.gan(batch), seq=batch + 1) for batch in range(8) for rank in (0, 1)]
    bad = records.tripped(1, makers.frame(makers.reading("output", math.inf), at=(9, 0, 0)))
    records.write(tmp_path / "bad-0", *parts, bad, Entry(9.0, NO_RANK, Waited()), Entry(9.5, NO_RANK, Closed()))
    records.write(tmp_path / "train-0", *parts, Entry(9.0, NO_RANK, Closed()), job="train")
    of = {row["run"]: row for row in Pages(tmp_path).list()}
    assert (of["bad-0"]["cause"], of["train-0"]["cause"]) == ("overflow", "")
    assert of["train-0"]["model"] == "Gan"
    critic, generator = of["train-0"]["losses"]
    assert [value for _, value in critic][-2:] == [0.96, 0.94]
    assert [at for at, _ in generator] == sorted({at for at, _ in generator})
    assert generator[-1] == (SPARK * 7 // 8, -4.07)


def test_another_run_of_a_name_is_another_run(tmp_path: Path) -> None:
    """Its folder is removed while the page is looked at, and the job is started again."""
    pages = Pages(tmp_path)

    def cells() -> int:
        run = pages.run("train-0")
        with run.open() as record:
            assert len(run.curves(record)["loss"]) == 0
            return len(run.ranks(record).cells[0])

    parts = [records.part(0, *records.frames(batch), seq=batch + 1) for batch in range(9)]
    run = records.write(tmp_path / "train-0", *parts)
    assert cells() == 9
    shutil.rmtree(run)
    records.write(run, records.part(0, *records.frames(0)), at=200.0)
    assert cells() == 1


def test_a_list_while_a_run_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records.write(tmp_path / "train-0")
    found = folders(tmp_path)
    monkeypatch.setattr(of_pages, "folders", lambda folder: [*found, tmp_path / "train-1"])
    assert [run["run"] for run in Pages(tmp_path).list()] == ["train-0"]


def test_a_run_that_nobody_writes_is_read_once_for_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = records.write(tmp_path / "train-0", boot="of another day")
    pages, read = Pages(tmp_path), list[Path]()

    def counted(folder: Path) -> RunRow:
        read.append(folder)
        return read_row(folder)

    monkeypatch.setattr(of_pages, "read_row", counted)
    pages.list(), pages.list()  # SQLite leaves an empty file beside a record that is read for the first time
    before = len(read)
    assert pages.list()[0]["state"] == "unfinished"
    assert len(read) == before
    records.add(run, records.part(0, *records.frames(0)))
    assert (pages.list()[0]["batches"], len(read)) == (1, before + 1)


def test_a_list_and_the_report_have_one_rate(tmp_path: Path) -> None:
    """The first batch took long, and rank 1 came furthest."""
    parts = [
        records.part(rank, *records.frames(batch), seq=batch + 1, ended=[11.0, 20.0, 20.5 + rank, 30.0][batch])
        for batch in range(4)
        for rank in (0, 1)[batch == 3 :]
    ]
    run = records.write(tmp_path / "train-0", *parts, Entry(9.0, NO_RANK, Closed()))
    report = records.read(run / FILE, lambda record: replay.take(record).report)
    assert report.course is not None
    assert report.course.pace == pytest.approx(3 / 19)
    assert [row["rate"] for row in Pages(tmp_path).list()] == [report.course.pace]


def test_a_run_that_stalls_has_no_rate(tmp_path: Path) -> None:
    parts = [records.part(0, *records.frames(batch), seq=batch + 1, ended=11.0 + batch) for batch in range(2)]
    stalls = Stall((0,), (1,), "rank 0 stalled", 1, 1)
    run = records.write(tmp_path / "train-0", *parts, Entry(2.0, NO_RANK, Stood(stalls)), world_size=2)
    for stall, rate in ((stalls, None), (None, 1.0)):
        store = Store(run / FILE)  # and a collector writes it
        store.write([Entry(2.0, NO_RANK, Stood(stall))], 100.0)
        assert [row["rate"] for row in Pages(tmp_path).list()] == [rate]
        store.close()


@pytest.mark.parametrize(("batch", "has_diff"), [(0, False), (1, True)])
def test_the_culprits_batch_has_a_link_where_there_is_one_beside_it(tmp_path: Path, batch: int, has_diff: bool) -> None:
    good = [records.part(1, *records.frames(before)) for before in range(batch)]
    bad = records.tripped(1, makers.frame(makers.reading("output", math.inf), at=(batch, 0, 0)))
    run = RunPages(records.write(tmp_path / "train-0", *good, bad, Entry(9.0, NO_RANK, Waited())))
    with run.open() as record:
        overview = run.overview(record)
    assert overview["report"]["verdict"]["rank"] == 1
    assert overview["has_diff"] is has_diff


def test_what_is_said_of_replicas(tmp_path: Path) -> None:
    flipped = Desync(9, "layers.3.weight", (1,), 3, DesyncPattern.ONE_RANK, "node0", "GPU-5f3a", 8, source="DDP")
    compared = Entry(1.0, NO_RANK, ReplicasCompared(Compared(8, 146, 3, 9, True)))
    run = records.write(tmp_path / "train-0", records.part(0, *records.frames(0)), compared, world_size=3)
    with RunPages(run).open() as record:
        equal = "equal at step 8 (all 146 parameters, 3 ranks), compared 9 times"
        assert RunPages(run).overview(record)["replicas"] == {"lines": [], "rows": [], "hidden": 0, "compared": equal}
    records.add(run, Entry(2.0, NO_RANK, Desynced((flipped, replace(flipped, parameter="head.bias")), 4)))
    with RunPages(run).open() as record:
        found = RunPages(run).overview(record)["replicas"]
    (line,) = found["lines"]
    assert line["try"].startswith("load a checkpoint from before")
    assert line["text"].startswith(
        "rank 1 of 3 (node0, GPU-5f3a): layers.3.weight differs from the other 2 since step 9, equal at step 8; and"
    )
    assert [row["parameter"] for row in found["rows"]] == ["layers.3.weight", "head.bias"]
    assert found["hidden"] == 4


def test_the_largest_gradient_of_each_batch_is_over_all_ranks_and_no_share_of_zeros(tmp_path: Path) -> None:
    def gradients(rank: int, batch: int, high: float) -> Entry:
        zeros = makers.reading("weight.grad zeros", 0.9, kind=Kind.GRADIENT)
        last = makers.frame(zeros, at=(batch, 0, 8), module="layer", phase=Phase.BACKWARD)
        return records.part(rank, *records.frames(batch), *records.backward(batch, high), last, seq=batch + 1)

    highs = [(0.1, 0.3), (0.2, math.inf), (0.25, 0.2)]
    parts = [gradients(rank, batch, high) for batch, of in enumerate(highs) for rank, high in enumerate(of)]
    run = records.write(tmp_path / "train-0", *parts)
    with RunPages(run).open() as record:
        (line,) = RunPages(run).curves(record)["gradient"]
    assert line["name"] == "of a parameter"
    assert [(batch, number and pytest.approx(number)) for batch, number, _ in line["points"]] == [
        (0, 0.3), (1, None), (2, 0.25),
    ]  # fmt: skip
