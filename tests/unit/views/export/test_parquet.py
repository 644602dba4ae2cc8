"""Records as Parquet: the rows read back equal what the ranks sent, for all states, dtypes and parts."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import makers
import records
from jobs import ROOT, environment
from makers import INF, NAN
from rankwatch.shared.types.frame import MEASURED, Frame
from rankwatch_monitor.decide.core.journal import Entry
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE, StoreError
from rankwatch_monitor.record.store import Limits, Store
from rankwatch_monitor.views.export import parquet
from rankwatch_monitor.views.export.origin import origin_of
from rankwatch_monitor.views.export.parquet import SCHEMAS, write
from rankwatch_monitor.views.export.written import Written, describe

Row = dict[str, Any]


def exported(run: Path, what: str = "summaries", rank: int | None = None) -> tuple[list[Row], Written]:
    file = io.BytesIO()
    written = records.read(run / FILE, lambda record: write(record, origin_of(record), what, file, rank))
    rows: list[Row] = pq.read_table(io.BytesIO(file.getvalue())).to_pylist()
    assert written.rows == len(rows)
    return rows, written


def expected(rank: int, frames: Iterable[Frame], step: int | None) -> Iterator[Row]:
    for frame in frames:
        for reading in frame.readings:
            measured = reading.state in MEASURED
            yield {
                "run": "train-1", "job": "train", "restart": 1, "rank": rank, "host": "node0", "local_rank": rank,
                "batch": frame.position.batch, "optimizer_step": step, "frame": frame.position.frame,
                "module": frame.spec.module, "module_class": "Linear", "phase": frame.spec.phase.name.lower(),
                "label": reading.label, "kind": reading.kind.name.lower(), "dtype": reading.dtype,
                "abs_min": reading.abs_min if measured else None, "abs_max": reading.abs_max if measured else None,
                "state": reading.state.name.lower(),
            }  # fmt: skip


def plain(rows: Iterable[Row]) -> list[Row]:
    """The rows, with nan replaced by a value that equals itself."""
    return [{name: "nan" if value != value else value for name, value in row.items()} for row in rows]


def test_summaries_are_what_the_ranks_sent(tmp_path: Path) -> None:
    sent = [
        (0, records.frames(0), 0),
        (1, records.frames(0, INF), 0),
        (0, records.backward(0, NAN), 1),
        (1, records.frames(1, 1e300, wide=True), 1),
        (0, records.frames(1, NAN), 2),
        (1, records.backward(1), 2),
    ]
    run = records.write(tmp_path, *(records.part(rank, *frames, step=step) for rank, frames, step in sent))
    rows, written = exported(run)
    in_order = sorted(sent, key=lambda of: (of[1][0].position.batch, of[0], of[1][0].position.frame))
    assert plain(rows) == plain(row for of in in_order for row in expected(*of))
    assert (written.first, written.last, written.batches) == (0, 1, 2)
    assert any(row["abs_max"] == 1e300 for row in rows)
    assert {row["state"] for row in rows} >= {"inf", "nan", "none", "empty", "not_float", "not_a_tensor", "unmaterialised"}
    of_rank, _ = exported(run, rank=1)
    assert plain(of_rank) == plain(row for row in rows if row["rank"] == 1)


def test_the_size_of_row_groups_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = records.write(tmp_path, *(records.part(rank, *records.frames(b), step=b) for b in range(9) for rank in (0, 1)))
    whole, _ = exported(run)
    for name, value in (("ROW_GROUP", 30), ("PARTS", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(parquet, name, value)
            assert exported(run) == (whole, Written(len(whole), 0, 8, 9))
    assert [row["optimizer_step"] for row in whole] == [row["batch"] for row in whole]


def test_the_frames_of_a_trip_appear_once(tmp_path: Path) -> None:
    ring = [records.frames(4)[-1], *records.frames(5, INF)[:2]]
    run = records.write(
        tmp_path,
        records.part(0, *records.frames(4)),
        records.part(1, *records.frames(4)),
        records.part(0, *records.frames(5), step=2),
        records.part(0, *records.frames(6)),
        records.tripped(1, *ring, step=3, reading=0),
        # This frame was judged late, after its batch had been sent.
        records.tripped(0, *records.frames(5), *records.backward(5, NAN)[:2], step=2),
    )
    rows, _ = exported(run)
    assert [row for row in rows if (row["rank"], row["batch"]) == (1, 5)] == list(expected(1, ring[1:], 3))
    late = [row for row in rows if (row["rank"], row["batch"]) == (0, 5)]
    told = [*records.frames(5), *records.backward(5, NAN)[:2]]
    assert plain(late) == plain(expected(0, told, 2))
    assert [row["batch"] for row in rows] == sorted(row["batch"] for row in rows)


def test_without_its_digest_a_batchs_step_is_unknown(tmp_path: Path) -> None:
    run = records.write(tmp_path, records.part(0, *records.frames(3), step=7))
    records.execute(run, "DELETE FROM digests")
    rows, _ = exported(run)
    assert plain(rows) == plain(expected(0, records.frames(3), None))


def test_the_envelope_names_the_ranks(tmp_path: Path) -> None:
    run = records.write(
        tmp_path,
        records.part(0, makers.frame(makers.reading("output", 2.0), makers.reading("bad", NAN))),
        records.part(1, makers.frame(makers.reading("output", INF, low=0.25), makers.reading("bad", NAN))),
    )
    rows, written = exported(run, "envelope")
    assert [name for name in SCHEMAS["envelope"].names if name not in rows[0]] == []
    output, bad = rows
    assert {name: output[name] for name in ("batch", "frame", "module", "label", "ranks")} == {
        "batch": 0, "frame": 0, "module": "layer", "label": "output", "ranks": 2,
    }  # fmt: skip
    assert (output["abs_min"], output["abs_min_rank"], output["abs_max"], output["abs_max_rank"]) == (0.25, 1, INF, 1)
    assert (output["state"], output["state_rank"]) == ("inf", 1)
    of_bad = [bad[name] for name in ("abs_min", "abs_max", "abs_max_rank", "state", "state_rank")]
    assert of_bad == [None, None, None, "nan", 0]
    assert written == Written(2, 0, 0, 1)


def test_digests_name_the_readings(tmp_path: Path) -> None:
    run = records.write(
        tmp_path,
        records.part(0, *records.frames(2), step=1, ended=1.5e9),
        records.part(1, *records.backward(2, INF), step=1),
        limits=replace(Limits(), tables=1000),
    )
    healthy, bad = exported(run, "digests")[0]
    assert list(healthy) == SCHEMAS["digests"].names
    names = ("rank", "host", "batch", "optimizer_step", "frame", "module", "label", "dtype", "bad", "bad_frame", "bad_label")
    assert [healthy[name] for name in names] == [0, "node0", 2, 1, 1, "mask", "input[0]", "float16", 0, None, None]
    assert healthy["headroom"] == pytest.approx(math.log2(65504 / 40))
    assert healthy["ended"].timestamp() == 1.5e9
    assert [healthy[name] for name in ("loss", "gradient_norm", "memory_mib")] == [None, None, None]
    assert [bad[name] for name in names] == [1, "node0", 2, 1, 5, "layer", "output", "float32", 2, 6, "grad_output"]
    assert bad["bad_phase"] == "backward"
    assert [row["rank"] for row in exported(run, "digests", rank=1)[0]] == [1]


def test_digests_of_dropped_tables_have_no_names(tmp_path: Path) -> None:
    run = records.write(tmp_path, records.part(0, *records.frames(2)), limits=replace(Limits(), tables=1))
    (row,) = exported(run, "digests")[0]
    assert (row["batch"], row["module"], row["frame"], row["frames"]) == (2, None, None, 5)


@pytest.mark.parametrize("what", SCHEMAS)
def test_an_export_of_an_empty_record_has_the_schema_and_names_its_run(tmp_path: Path, what: str) -> None:
    run = records.write(tmp_path)
    file = io.BytesIO()
    assert records.read(run / FILE, lambda record: write(record, origin_of(record), what, file)) == Written()
    read = pq.read_table(io.BytesIO(file.getvalue()))
    assert read.schema.equals(SCHEMAS[what])
    about = read.schema.metadata
    assert (about[b"rankwatch.run"], about[b"rankwatch.what"]) == (b"train-1", what.encode())
    assert about[b"rankwatch.version"]


def test_missing_data_is_reported(tmp_path: Path) -> None:
    entries: list[Entry] = [records.part(0, *records.frames(batch)) for batch in range(20)]
    size = 9 * sum(len(frame.states) for frame in records.frames(0))
    run = records.write(tmp_path, *entries, limits=replace(Limits(), summaries=6 * size))
    written = exported(run)[1]
    assert 0 < written.first < written.last == 19
    assert describe(written, "rows", "train-1", "out", 20, " as sent") == (
        f"{written.rows} rows of run train-1 written to out: batch {written.first} to 19, "
        f"{written.batches} of 20 batches; the others are not stored as sent"
    )
    assert describe(Written(5, 0, 1, 2), "rows", "a", "b", 2) == "5 rows of run a written to b: batch 0 to 1"


def test_a_part_that_does_not_fit_its_table_is_reported(tmp_path: Path) -> None:
    run = records.write(tmp_path, records.part(0, *records.frames(3)))
    records.execute(run, "UPDATE summaries SET body = x'0000'")
    with pytest.raises(StoreError, match=r"run\.db: a part of 2 bytes instead of 99"):
        exported(run)


def test_an_export_shows_the_moment_it_began(tmp_path: Path) -> None:
    run = records.write(tmp_path, records.part(0, *records.frames(0)))
    store = Store(run / FILE)
    with RunRecord(run / FILE) as record:
        sent, envelopes = record.sent(), record.envelopes()
        first = [next(sent).batch, next(envelopes).batch]
        store.write([records.part(0, *records.frames(1, wide=True))], 100.0)
        assert (first, list(sent), list(envelopes)) == ([0, 0], [], [])
    assert exported(run)[1].batches == 2
    store.close()


GENERATE = """
import sys
from pathlib import Path
import numpy as np
import makers, records
from peak import peak_bytes
from rankwatch.shared.types.frame import BatchSummary, FrameTable
from rankwatch_monitor.views.export import parquet
from rankwatch_monitor.views.export.origin import origin_of
from rankwatch_monitor.decide.core.journal import Entry, Trained
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Store

run, batches = records.write(Path(sys.argv[1])), int(sys.argv[2])
readings = [makers.reading(label) for label in ("weight", "input[0]", "output")]
table = FrameTable(tuple(makers.frame(*readings, module=f"blocks.{i}").spec for i in range(1000)))
store = Store(run / FILE)
for batch in range(batches):
    low, high = np.random.default_rng(batch).random((2, table.rows), np.float32)
    columns = low.tobytes(), high.tobytes(), bytes(table.rows)
    summary = BatchSummary(batch, 0, batch, 1.0, 2.0, False, table.id, *columns)
    store.write([Entry(1.0, 0, Trained(batch + 1, summary, table))], 100.0)
store.close()
before = peak_bytes()
with open(run / "out.parquet", "wb") as file, RunRecord(run / FILE) as record:
    written = parquet.write(record, origin_of(record), "summaries", file)
print(written.rows, peak_bytes() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_record(tmp_path: Path) -> None:
    def grown(batches: int) -> int:
        command = [sys.executable, "-c", GENERATE, str(tmp_path / str(batches)), str(batches)]
        env = environment(PYTHONPATH=f"{environment()['PYTHONPATH']}:{ROOT / 'tests'}")
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
        rows, grown = map(int, done.stdout.split())
        assert rows == batches * 3000
        return grown

    small, large = grown(150), grown(1200)
    # 3,150,000 more rows; they took 380 MB when all were held in memory.
    assert large - small < 60e6


@pytest.mark.parametrize("connected", [(0,), (0, 1)])
@pytest.mark.parametrize("what", ["summaries", "digests"])
def test_a_rank_that_the_run_does_not_have_is_a_damaged_record(
    tmp_path: Path, what: str, connected: tuple[int, ...]
) -> None:
    parts = [records.part(rank, *records.frames(0)) for rank in (0, 1)]
    run = records.write(tmp_path / "train-1", *parts, world_size=2, connected=connected)
    smaller = """replace(body, '"world_size": 2', '"world_size": 1')"""
    records.execute(run, f"UPDATE events SET body = {smaller} WHERE kind = 'opened'")
    with pytest.raises(StoreError, match=r"train-1.*rank"):
        exported(run, what)
