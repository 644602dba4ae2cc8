"""The benchmarks of the collector and of the network run, and measure what they claim."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import ROOT, finished

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.slow]


def measured(tmp_path: Path, script: str, *arguments: str) -> Any:
    path = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / script), *arguments, "--json", str(path)]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_load(tmp_path: Path) -> None:
    options = "--ranks 16 --seconds 3 --trips 2 --parameters 0,40 --groups 2 --flood 4 --flood-seconds 1"
    figures = measured(tmp_path, "load.py", *options.split())
    assert [load["parameters"] for load in figures["load"]] == [0, 40]
    for load, messages in zip(figures["load"], (2, 3), strict=True):
        sent = messages * 15 * 3  # in three seconds; rank 0 only trips
        assert load["messages/s"] * load["seconds"] == pytest.approx(sent)
        assert 0 <= load["behind"] < sent
        assert load["small trips"] > 0
        assert 0 < load["small: TRIP to ABORT p50"] <= load["small: TRIP to last ACK p99"]
        assert load["trips"] == 2
        assert load["calls us"] > 0
        for kind in ("", "asked: "):
            assert 0 < load[f"{kind}TRIP to ABORT p50"] <= load[f"{kind}TRIP to last ACK max"]
    assert 0 == figures["load"][0]["fingerprint bytes"] < figures["load"][1]["fingerprint bytes"]
    (flood,) = figures["flood"]
    assert 0 < flood["ratio"] == pytest.approx(flood["collector"] / flood["bare ROUTER"])


def test_drowning(tmp_path: Path) -> None:
    (row,) = measured(tmp_path, "drowning.py", "--ranks", "4", "--seconds", "2", "--trips", "1")
    assert row["batches/s"] > 0
    for name in ("small, known", "small, asked", "large, known", "large, asked"):
        assert row[f"{name} aborts"] > 0
        assert 0 < row[f"{name} p50"] <= row[f"{name} p99"]


def test_network(tmp_path: Path) -> None:
    rows = {row["mode"]: row for row in measured(tmp_path, "network.py", "--rounds", "5", "--flooding-ranks", "8")}
    assert rows["bare"]["ratio"] == 1
    assert all(row["ratio"] > 0 for row in rows.values())
    assert (rows["healthy"]["is connected"], rows["absent"]["is connected"]) == (True, False)
