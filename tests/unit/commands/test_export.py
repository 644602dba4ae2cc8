"""``rankwatch export`` as a command: its output, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import records
from rankwatch_monitor.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return records.write(tmp_path / "run", *(records.part(rank, *records.frames(0)) for rank in (0, 1)))


def test_files_are_written_and_their_names_printed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for options, told in (
        (["--parquet", "all"], "22 rows of run train-1 written to all: batch 0"),
        (["--parquet", "one", "--rank", "1"], "11 rows of run train-1 written to one: batch 0"),
        (["--parquet", "envelope", "--what", "envelope"], "11 rows of run train-1 written to envelope: batch 0"),
        (["--parquet", "digests", "--what", "digests"], "2 rows of run train-1 written to digests: batch 0"),
        (["--parquet", "all", "--overwrite"], "22 rows of run train-1 written to all: batch 0"),
        (["--tensorboard", "board"], "18 scalars of run train-1 written to board: batch 0"),
    ):
        assert main(["export", "run", *options]) == 0
        assert capsys.readouterr() == ("", f"rankwatch: {told}\n")
        if options[0] == "--parquet":
            assert str(pq.read_metadata(options[1]).num_rows) == told.split()[0]


def test_missing_batches_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = records.write(tmp_path / "run", *(records.part(0, *records.frames(batch)) for batch in range(4)))
    records.execute(run, "DELETE FROM summaries WHERE batch < 2")
    records.execute(run, "DELETE FROM envelopes WHERE batch = 1")
    for what, told in (
        ("summaries", "22 rows of run train-1 written to {}: batch 2 to 3, 2 of 4 batches; the others are not stored as sent: "
         "--what envelope has more of them"),
        ("envelope", "33 rows of run train-1 written to {}: batch 0 to 3, 3 of 4 batches; the others are not stored"),
        ("digests", "4 rows of run train-1 written to {}: batch 0 to 3"),
    ):  # fmt: skip
        assert main(["export", str(run), "--parquet", str(tmp_path / what), "--what", what]) == 0
        assert capsys.readouterr().err == f"rankwatch: {told}\n".format(tmp_path / what)


def test_what_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.db").write_bytes(b"no database")
    for name, options, complaint in (
        ("run", ["--parquet", str(tmp_path / "new"), "--rank", "2"], "no rank 2: run train-1 has ranks 0 to 1"),
        ("run", ["--parquet", str(tmp_path / "there")], "there exists: name another file, or replace it by --overwrite"),
        ("run", ["--tensorboard", str(tmp_path)], "is not empty: name another, or replace what is of rankwatch by --over"),
        ("broken", ["--parquet", str(tmp_path / "new")], "file is not a database; is"),
    ):
        assert main(["export", str(tmp_path / name), *options]) == 2
        assert complaint in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_json_lines_and_the_name_that_they_had(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--jsonl", "--frames"]) == 0
    lines = capsys.readouterr().out
    assert json.loads(lines.splitlines()[0])["what"] == "record"
    assert main(["dump", str(run), "--frames"]) == 0
    assert capsys.readouterr() == (lines, "rankwatch: `rankwatch dump` is `rankwatch export --jsonl` now\n")
