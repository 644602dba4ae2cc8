"""A run whose collector was killed: no command says that it goes on, or how it ended."""

from __future__ import annotations

import json
from pathlib import Path

import records
import standings
from commands import run as rankwatch
from rankwatch.shared.system.process import boot_id
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Store


def test_a_report_without_its_collector_is_unfinished(tmp_path: Path) -> None:
    run = records.write(tmp_path / "train-1", records.part(0, *records.frames(0)))
    store = Store(run / FILE)
    store.write([], 100.0, standings.shown(standings.standing(0), standings.standing(1)), boot=boot_id())
    assert rankwatch("report", str(run)).stdout.startswith("rankwatch: run train-1 is running\n")
    store.close()
    told = "rankwatch: run train-1 is unfinished: no collector writes it any more, and how it ended is not on record\n"
    assert rankwatch("report", str(run)).stdout.startswith(told)
    assert rankwatch("report", str(run), "--frames", "3").stdout.startswith(told)
    assert json.loads(rankwatch("report", str(run), "--json").stdout)["outcome"] is None
    assert "unfinished" in rankwatch("list", str(tmp_path)).stdout
