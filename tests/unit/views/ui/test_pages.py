"""The data of the page's views, read from a record."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import records
import standings
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Store
from rankwatch_monitor.views.ui.pages import RunPages


@pytest.mark.parametrize(("heartbeat", "is_silent"), [(1.0, True), (10.0, False)])
def test_the_collector_is_silent_after_three_heartbeats(tmp_path: Path, heartbeat: float, is_silent: bool) -> None:
    run = records.write(tmp_path / "train-0", records.part(0, *records.frames(0)))
    store = Store(run / FILE)
    store.write([], time.time() - 20.0, standings.shown(heartbeat=heartbeat))
    store.close()
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
