"""Real trainings go into an archive when they are over, and ``rankwatch fleet`` says what it has of them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import commands
import ports
from collectors import until
from commands import printed as rankwatch
from jobs import RANKWATCH, Job, environment, forked, run_job

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, str]:
    """A training that overflows, and the archive that its collector wrote."""
    folder = tmp_path_factory.mktemp("archived")
    url = f"file://{folder}/all runs"
    return run_job(folder, forked("train.py", "overflow"), "--archive", url), url


def test_a_run_is_archived_when_it_is_over(archived: tuple[Job, str]) -> None:
    job, url = archived
    assert job.code == 77
    assert (job.run_dir / "archived").read_text() == f"{url}\n"
    assert job.stdout.endswith(f"  record     rankwatch report {job.run_dir} --all\n")  # the verdict is still the last
    found = json.loads(rankwatch("fleet", url, "--json"))
    assert (found["runs"], found["outcomes"]) == (1, {"aborted": 1})
    assert found["hosts"]["count"] == 1
    assert found["hosts"]["hours"] > 0
    assert found["hosts"]["found"] == []  # an overflow is the model's
    assert found["gpus"]["count"] == 0
    assert [one["cause"] for one in found["causes"]] == [job.verdict["cause"]]
    assert [one["last_run"] for one in found["modules"]] == [job.run_dir.name]
    assert f"rankwatch: archive {url}\n  runs       1 of " in rankwatch("fleet", url)


def test_again_by_hand_it_is_still_there_once(archived: tuple[Job, str]) -> None:
    job, url = archived
    done = commands.run("archive", str(job.run_dir), url)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"rankwatch: run {job.run_dir.name} is archived: ")
    assert json.loads(rankwatch("fleet", "--json", url))["runs"] == 1
    assert "0 files merged into 0" in commands.run("archive", "--merge", url).stderr


def test_the_page_is_one_file(archived: tuple[Job, str], tmp_path: Path) -> None:
    _, url = archived
    file = tmp_path / "fleet.html"
    assert commands.run("fleet", url, "--html", str(file)).returncode == 0
    text = file.read_text()
    assert "<h1>Archive file://" in text
    assert "<script" not in text
    assert "is there already" in commands.run("fleet", url, "--html", str(file)).stderr


def test_several_runs_of_a_folder(bad: Job, good: Job, tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    for job in (bad, good, bad):
        assert commands.run("archive", str(job.run_dir.parent / job.run_dir.name), url).returncode == 0
    done = commands.run("fleet", RANKWATCH_ARCHIVE=url)
    assert "runs       2 of " in done.stdout, done.stderr


def test_what_archive_is_called_with(bad: Job, tmp_path: Path) -> None:
    url, run = str(tmp_path / "archive"), str(bad.run_dir.parent / "bad-0")
    for wrong in ((), (run,), ("--merge",)):
        assert "error: which run, and which archive? " in commands.run("archive", *wrong).stderr
    assert commands.run("archive", run, RANKWATCH_ARCHIVE=url).returncode == 0
    assert commands.run("archive", "--merge", RANKWATCH_ARCHIVE=url).returncode == 0
    assert commands.run("archive", "--merge", url, RANKWATCH_ARCHIVE="elsewhere").returncode == 0
    assert "error: --merge adds no run, and takes one archive" in commands.run("archive", "--merge", run, url).stderr
    assert "error: no run train-9; in " in commands.run("archive", "train-9", url).stderr
    assert "has no run in it; in " in commands.run("archive", str(tmp_path), url).stderr


@pytest.mark.parametrize("command", [["run"], ["collector"]])
def test_an_archive_that_cannot_be_is_refused_at_once(command: list[str]) -> None:
    rest = ["--", "true"] if command == ["run"] else []
    done = commands.run(*command, "--archive", "s4://bucket/runs", *rest)
    assert done.returncode == 2
    assert "error: cannot use s4://bucket/runs: Protocol not known: s4" in done.stderr


def test_without_an_archive_nothing_is_imported_for_it() -> None:
    """pyarrow and duckdb cost memory, which a collector of many ranks needs."""
    script = (
        "import sys; from rankwatch_monitor.cli import main\n"
        "try: main(['collector', '--listen', 'nonsense'])\n"
        "except SystemExit: pass\n"
        "import rankwatch_monitor.serve.collector, rankwatch_monitor.serve.daemon\n"
        "sys.exit(bool({'pyarrow', 'duckdb', 'fsspec'} & sys.modules.keys()))"
    )
    assert subprocess.run([RANKWATCH[0], "-c", script], env=environment(), capture_output=True).returncode == 0


@contextmanager
def collecting(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A collector that another one can take over; at the end it receives SIGTERM, if it still runs."""
    options = ["--listen", ports.address(), "--connection-file", str(folder / "file"), "--runs-dir", str(folder / "runs")]
    with subprocess.Popen(
        [*RANKWATCH, "collector", "--keep-keys", *options, *more], env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "collecting on" not in process.stderr.readline():
            assert process.poll() is None
        yield process
        process.terminate()
        process.communicate()


def of(folder: Path, **more: str) -> dict[str, str]:
    return environment(RANKWATCH_CONNECTION=str(folder / "file"), RANKWATCH_JOB="train", **more)


@pytest.mark.slow
def test_a_collector_archives_what_the_one_before_it_could_not(tmp_path: Path) -> None:
    """The first has no archive; the one that takes over its keys has, and archives the run that is over by then."""
    url = str(tmp_path / "archive")
    with collecting(tmp_path):
        done = subprocess.run(forked("train.py", "healthy"), env=of(tmp_path), capture_output=True)
        assert done.returncode == 0
    for _ in range(2):  # once: the second time, it is there
        with collecting(tmp_path, "--archive", url):
            pass
    assert json.loads(rankwatch("fleet", url, "--json"))["outcomes"] == {"finished": 1}
    assert len(list(Path(url).rglob("*.parquet"))) == 1


@pytest.mark.slow
def test_a_collector_that_is_killed_in_the_middle_archives_once(tmp_path: Path) -> None:
    url, told = str(tmp_path / "archive"), tmp_path / "overflow"
    with collecting(tmp_path, "--archive", url) as first:
        job = subprocess.Popen(
            forked("train.py", "overflow_when_told"), env=of(tmp_path, FAULT_FILE=str(told)),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until((tmp_path / "runs" / "train-0" / "run.db").exists)
        first.kill()
    with collecting(tmp_path, "--archive", url):
        told.touch()
        assert job.wait() != 0
    found = json.loads(rankwatch("fleet", url, "--json"))
    assert (found["runs"], found["outcomes"]) == (1, {"aborted": 1})
    assert found["causes"][0]["last_run"] == "train-0"
    assert len(list(Path(url).rglob("*.parquet"))) == 1
