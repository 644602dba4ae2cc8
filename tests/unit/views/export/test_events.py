"""Records as TensorBoard's event files, read back by TensorBoard, or by a parser of the format."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

import makers
import records
from jobs import environment
from makers import INF, NAN
from rankwatch.errors import UsageError
from rankwatch.shared.types.frame import FrameTable, Phase
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.views.export import events
from rankwatch_monitor.views.export.events import LARGEST, tags_of
from rankwatch_monitor.views.export.written import Written


def write(run: Path, folder: Path, rank: int | None, *, overwrite: bool) -> Written:
    with RunRecord(run / FILE) as record:
        return events.write(record, folder, rank, overwrite=overwrite)


Scalars = dict[str, dict[int, float]]


def scalars(folder: Path) -> Scalars:
    """The scalars by tag and step."""
    found: Scalars = {}
    for event in _events(folder):
        for value in event.summary.value:
            assert event.step not in found.setdefault(value.tag, {})
            found[value.tag][event.step] = value.simple_value
    return found


def _events(folder: Path) -> Iterator[Any]:
    (path,) = folder.glob("events.out.tfevents.*.rankwatch")
    body = path.read_bytes()
    while body:
        (length,) = struct.unpack_from("<Q", body)
        yield Event.FromString(body[12 : 12 + length])
        body = body[16 + length :]


def exported(tmp_path: Path, *entries: Any, rank: int | None = None) -> Scalars:
    run = records.write(tmp_path / "run", *entries)
    written = write(run, tmp_path / "board", rank, overwrite=False)
    found = scalars(tmp_path / "board")
    assert written.rows == sum(map(len, found.values()))
    return found


def test_the_scalars_cover_all_ranks_and_each_batch(tmp_path: Path) -> None:
    entries = [records.part(rank, *records.frames(batch, 2.0**batch + rank)) for batch in range(3) for rank in (0, 1)]
    found = exported(tmp_path, *entries)
    assert found["abs_max/embed/output"] == {0: 2.0, 1: 3.0, 2: 5.0}
    assert found["abs_min/embed/output"] == {0: 0.25, 1: 0.25, 2: 0.25}
    assert found["abs_max/(root)/output"] == {0: 1.0, 1: 1.5, 2: 2.5}
    assert found["abs_max/layer/output"][0] == 8.0
    assert found["abs_max/layer (call 2)/output"][0] == 16.0
    assert found["headroom/mask"][0] == pytest.approx(math.log2(65504 / 40))
    assert found["headroom/layer"][0] == pytest.approx(128 - math.log2(16))
    assert "abs_max/layer/input[0]" not in found  # it was never measured
    assert "abs_max/mask/input[mask]" in found
    assert {event.wall_time for event in _events(tmp_path / "board")} == {0.0, 11.0}


def test_the_scalars_of_one_rank(tmp_path: Path) -> None:
    entries = [records.part(rank, *records.frames(0, 1.0 + rank), ended=11.0 + rank) for rank in (0, 1)]
    assert exported(tmp_path, *entries, rank=0)["abs_max/embed/output"] == {0: 1.0}
    assert {event.wall_time for event in _events(tmp_path / "board")} == {0.0, 11.0}


@pytest.mark.parametrize("rank", [None, 1])
def test_inf_and_nan_are_shown_as_they_are(tmp_path: Path, rank: int | None) -> None:
    found = exported(
        tmp_path,
        records.part(0, *records.frames(0, 3.0)),
        records.part(1, *records.frames(0, INF)),
        records.part(0, *records.frames(1, 3.0)),
        records.part(1, *records.frames(1, NAN)),
        rank=rank,
    )
    assert found["abs_max/embed/output"][0] == INF
    assert found["headroom/embed"][0] == 0.0
    assert math.isnan(found["abs_max/embed/output"][1])
    assert 1 in found["headroom/embed"]  # the headroom of its weight


def test_finite_numbers_that_tensorboard_cannot_hold_stay_finite(tmp_path: Path) -> None:
    found = exported(tmp_path, records.part(0, *records.frames(0, 1e300, wide=True)))
    assert found["abs_max/embed/output"][0] == np.float32(LARGEST)
    assert found["headroom/embed"][0] == pytest.approx(1024 - math.log2(1e300))


def test_tables_and_parts_of_one_batch_are_brought_together(tmp_path: Path) -> None:
    found = exported(
        tmp_path,
        records.part(0, *records.frames(0, 4.0)),
        records.part(1, *records.frames(0, 2.0, wide=True)),
        records.part(0, *records.backward(0, 7.0)),
    )
    assert found["abs_max/embed/output"] == {0: 4.0}
    assert found["abs_max/layer/grad_output"] == {0: 7.0}
    assert found["abs_max/layer (recomputed)/output"] == {0: 8.0}
    assert found["headroom/embed"][0] == pytest.approx(128 - 2)


@pytest.mark.parametrize("rank", [None, 1])
def test_a_trip_is_the_end_of_the_curve(tmp_path: Path, rank: int | None) -> None:
    found = exported(
        tmp_path,
        *(records.part(rank, *records.frames(batch, 1.0)) for batch in range(2) for rank in (0, 1)),
        records.part(0, *records.frames(2, 1.0)),
        records.tripped(1, *records.frames(2, INF)[:1]),
        rank=rank,
    )
    assert found["abs_max/embed/output"] == {0: 1.0, 1: 1.0, 2: INF}


def test_tags() -> None:
    frame, reading = makers.frame, makers.reading
    specs = [
        frame(reading("weight"), reading("output"), module="a"),
        frame(reading("output"), module="a"),
        frame(reading("output"), module="a", phase=Phase.RECOMPUTE),
        frame(reading("grad_output"), module="a", phase=Phase.BACKWARD),
        frame(reading("output"), module=""),
    ]
    tags = tags_of(FrameTable(tuple(of.spec for of in specs)))
    assert tags.rows == [
        "a/weight", "a/output", "a (call 2)/output", "a (recomputed)/output", "a/grad_output", "(root)/output",
    ]  # fmt: skip
    assert [tags.modules[of] for of in tags.of_module] == ["a"] * 5 + ["(root)"]


def test_only_our_own_files_in_the_folder_are_replaced(tmp_path: Path) -> None:
    run = records.write(tmp_path / "run", records.part(0, *records.frames(0)))
    board = tmp_path / "board"
    write(run, board, None, overwrite=False)
    (before,) = board.iterdir()
    with pytest.raises(UsageError, match=f"the folder {board} is not empty"):
        write(run, board, None, overwrite=False)
    other = board / "events.out.tfevents.1.host.2.0"
    other.write_bytes(b"of somebody else")
    before.rename(before.with_name("events.out.tfevents.1.host.2.rankwatch"))
    write(run, board, None, overwrite=True)
    assert len(list(board.iterdir())) == 2
    assert other.read_bytes() == b"of somebody else"
    assert scalars(board)["abs_max/embed/output"] == {0: 1.0}
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"cannot write into the folder {tmp_path}/file"):
        write(run, tmp_path / "file", None, overwrite=True)


def test_an_export_that_fails_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = records.write(tmp_path / "run", records.part(0, *records.frames(0)), records.part(0, *records.frames(1)))
    board = tmp_path / "board"
    write(run, board, None, overwrite=False)
    before = scalars(board)

    def interrupt(*of: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(events, "values_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(run, board, None, overwrite=True)
    assert scalars(board) == before
    assert len(list(board.iterdir())) == 1


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    expected = exported(
        tmp_path,
        records.part(0, *records.frames(0, 3.0), *records.backward(0)),
        records.part(0, *records.frames(1, INF)),
        records.part(0, *records.frames(2, NAN)),
    )
    read = accumulators.EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == set(expected)
    for tag, by_step in expected.items():
        assert [event.step for event in read.Scalars(tag)] == list(by_step)
        np.testing.assert_equal([event.value for event in read.Scalars(tag)], list(by_step.values()))


def test_the_export_does_not_import_torch() -> None:
    code = (
        "import sys; from rankwatch_monitor.views.export import events, parquet, target; "
        "assert 'torch' not in sys.modules; import torch; print(torch.ones(1).item())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("1.0\n", 0), done.stderr
