"""The queries of docs/pages/internals/archive.md give what ``rankwatch fleet`` says; and what that says of bad machines."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

import fleets
from e2e.pages import PAGES, blocks
from jobs import environment
from rankwatch_fleet import as_json, page, query, text
from rankwatch_fleet.findings import Fleet


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    fleets.write(str(folder / "archive"), 1_500, hosts=16, jobs=3, days=30)
    return folder


@pytest.fixture(scope="module")
def found(archive: Path) -> Fleet:
    return query.ask(str(archive / "archive"))


def test_the_bad_gpu_stands_out_and_others_do_not(found: Fleet) -> None:
    bad = fleets.gpu_name(*fleets.BAD_GPU)
    assert [one.name for one in found.gpus.standing_out] == [bad]
    (host,) = found.hosts.standing_out
    assert (host.name, host.through) == (fleets.host_name(fleets.BAD_GPU[0]), (bad,))
    assert len(found.gpus.by_chance) > 20


def test_the_documented_queries(archive: Path, found: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(archive)
    in_duckdb, _, _, further = blocks(PAGES["internals/archive.md"], "sql")
    rows = duckdb.execute(in_duckdb).fetchall()
    assert len(rows) == found.gpus.count
    assert {gpu: k for gpu, k, *_ in rows if k} == {one.name: one.incidents for one in found.gpus.found}
    assert {n for _, _, n, *_ in rows} == {found.gpus.incidents}
    assert sum(p for *_, p in rows) == pytest.approx(1.0)
    files = "read_parquet('archive/*/*/*.parquet', hive_partitioning = true)"
    causes, versions = (duckdb.execute(f"WITH runs AS (FROM {files}) {part}").fetchall() for part in further.split(";")[:2])
    assert sum(runs for *_, runs, _ in causes) == sum(one.runs for one in found.causes)
    assert sum(runs for _, _, runs, _ in versions) == found.runs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs a Java")
def test_the_documented_query_on_spark(archive: Path) -> None:
    spark_sql = pytest.importorskip("pyspark.sql", reason="needs pyspark")
    in_duckdb, in_spark, *_ = blocks(PAGES["internals/archive.md"], "sql")
    view, query_text = in_spark.replace("s3a://bucket/runs", str(archive / "archive")).split(";", 1)
    session = spark_sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    session.sql(view)
    of_spark = {
        gpu: (k, n, pytest.approx(hours), pytest.approx(p)) for gpu, k, n, hours, p in session.sql(query_text).collect()
    }
    session.stop()
    files = str(archive / "archive/*/*/*.parquet")
    assert {
        gpu: tuple(row) for gpu, *row in duckdb.execute(in_duckdb.replace("archive/*/*/*.parquet", files)).fetchall()
    } == of_spark


SHOW = """
import sys
from rankwatch_fleet.query import _opened
with _opened(sys.argv[1]) as (database, _):
    print(database.execute("SELECT current_setting('enable_progress_bar')").fetchall())
"""


def test_no_progress_bar_stands_in_the_json(archive: Path) -> None:
    """DuckDB would draw one after two seconds, on standard output, where Python runs no file."""
    command = [sys.executable, "-c", SHOW, str(archive / "archive")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.stdout == "[(False,)]\n", done.stderr


def test_as_text_json_and_page(found: Fleet) -> None:
    bad = fleets.gpu_name(*fleets.BAD_GPU)
    lines = text.render(found).splitlines()
    assert lines[0].startswith("rankwatch: archive ")
    assert max(len(line) for line in lines[1:]) <= 80
    at = next(number for number, line in enumerate(lines) if line.endswith(f"*  {bad}"))
    assert lines[at - 2].startswith("1 of 128 GPUs stands out; ")
    assert lines[at + 1].startswith("      on gpu005, NVIDIA H200: ")
    told = json.loads(as_json.render(found))
    assert [one["name"] for one in told["gpus"]["found"] if one["stands_out"]] == [bad]
    assert told["bound"]["formula"].startswith("A machine with k incidents stands out if M x P(X >= k) < 0.05")
    assert page.render(found).count('class="is-bad"') == 2
