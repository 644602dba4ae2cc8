"""Exports of a real job's record: pyarrow, polars, duckdb and TensorBoard read what ``rankwatch export --jsonl`` prints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from commands import printed as rankwatch
from jobs import Job
from rankwatch.shared.types.frame import MEASURED

pytestmark = pytest.mark.e2e

Row = tuple[Any, ...]
COLUMNS = (
    *("rank", "batch", "frame", "module", "module_class", "phase"),
    *("label", "kind", "dtype", "abs_min", "abs_max", "state"),
)
MEASURED_STATES = {state.name.lower() for state in MEASURED}


@pytest.fixture(scope="module")
def dumped(bad: Job) -> set[Row]:
    """Every reading of a batch in the record."""
    lines = [json.loads(line) for line in rankwatch("export", "--jsonl", str(bad.run_dir), "--frames").splitlines()]
    frames = [(line["rank"], line["frame"]) for line in lines if line["what"] == "frame"]
    for line in lines:
        if line.get("kind") == "tripped":  # only the trip contains this rank's last batch
            position = line["fact"]["trip"]["position"]
            frames += [
                (line["rank"], frame)
                for frame in line["fact"]["trip"]["frames"]
                if frame["position"]["batch"] == position["batch"]
            ]
    return {row for rank, frame in frames for row in _rows(rank, frame)}


def _rows(rank: int, frame: dict[str, Any]) -> Iterator[Row]:
    spec, position = frame["spec"], frame["position"]
    states = ("finite", "inf", "nan", "none", "not_a_tensor", "empty", "not_float", "unmaterialised")
    for index, row in enumerate(spec["readings"]):
        state = states[frame["states"][index]]
        numbers = [frame[name][index] if state in MEASURED_STATES else None for name in ("abs_min", "abs_max")]
        yield (
            rank, position["batch"], position["frame"], spec["module"], spec["module_class"], spec["phase"],
            row["label"], row["kind"], row["dtype"], *numbers, state,
        )  # fmt: skip


def comparable(rows: list[Row]) -> set[Row]:
    """The rows as JSON writes them: inf and nan are null."""
    found = {tuple(None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row) for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture(scope="module")
def parquet(bad: Job, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("exported") / "run.parquet")
    rankwatch("export", str(bad.run_dir), "--parquet", path)
    return path


def test_pyarrow_reads_the_same_as_dump_prints(dumped: set[Row], parquet: str) -> None:
    table = pq.read_table(parquet)
    assert comparable([tuple(row[name] for name in COLUMNS) for row in table.to_pylist()]) == dumped
    assert set(table.column("optimizer_step").to_pylist()) == set(range(6))
    assert set(table.column("local_rank").to_pylist()) == {0, 1, 2, 3}


def test_polars_reads_the_same_as_dump_prints(dumped: set[Row], parquet: str) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    assert comparable(polars.read_parquet(parquet).select(COLUMNS).rows()) == dumped


def test_duckdb_reads_the_same_as_dump_prints(dumped: set[Row], parquet: str) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    assert comparable(duckdb.sql(f"SELECT {', '.join(COLUMNS)} FROM '{parquet}'").fetchall()) == dumped
    culprit = duckdb.sql(f"SELECT rank, batch, module, label, abs_max FROM '{parquet}' WHERE state = 'inf'").fetchall()
    assert culprit == [(1, 5, "blocks.2.square", "output", math.inf)]


def test_tensorboard_shows_the_overflow(bad: Job, dumped: set[Row], tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    rankwatch("export", str(bad.run_dir), "--tensorboard", str(tmp_path / "board"))
    read = accumulators.EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    curve = {event.step: event.value for event in read.Scalars("abs_max/blocks.2.square/output")}
    highs: dict[int, float] = {}
    for row in dumped:
        of = dict(zip(COLUMNS, row, strict=True))
        if (of["module"], of["label"]) == ("blocks.2.square", "output"):
            highs[of["batch"]] = max(highs.get(of["batch"], 0.0), math.inf if of["state"] == "inf" else of["abs_max"])
    assert curve == highs
    assert curve[5] == math.inf
    assert [event.value for event in read.Scalars("headroom/blocks.2.square")][-1] == 0.0
    times = [event.wall_time for event in read.Scalars("headroom/blocks.2.square")]
    assert times == sorted(times)
    assert times[0] > 1.7e9
