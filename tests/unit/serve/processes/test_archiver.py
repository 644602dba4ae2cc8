"""--archive of a collector: each run that is over is archived once; what goes wrong is said, tried again, and holds nobody up."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

import records
from collectors import until
from rankwatch.shared.system.process import started_at
from rankwatch_monitor.decide.core.journal import NO_RANK, Closed, Entry, Opened
from rankwatch_monitor.serve.processes import archiver
from rankwatch_monitor.serve.processes.archiver import Archiver, command_of


@pytest.fixture(autouse=True)
def quick_tries(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(archiver, "PAUSES", (0.01, 0.01))


def archiver_of(runs: Path, script: str) -> Archiver:
    """Runs a shell script in the place of ``rankwatch archive``, with the run's name."""
    return Archiver("s3://bucket/runs", runs, lambda run: ["sh", "-c", script, "sh", run.name])


def over(folder: Path, *, collector: str = "head", closed: bool = True) -> Path:
    """A record of a run that is over."""
    folder.mkdir(parents=True)
    entries = [Entry(0.0, NO_RANK, Opened("train", 0, 1)), *([Entry(1.0, NO_RANK, Closed())] if closed else [])]
    records.add(folder, *entries, run=folder.name, collector=collector)
    return folder


def archiving(runs: Path, script: str) -> Archiver:
    """An archiver that was given one run."""
    one = archiver_of(runs, script)
    one.add(over(runs / "train-0").name)
    return one


def test_what_it_runs(tmp_path: Path) -> None:
    assert command_of(tmp_path / "train-0")[1:] == ["-m", "rankwatch_monitor", "archive", f"{tmp_path}/train-0"]


def test_each_run_is_archived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train-0", "train-1"):
        over(tmp_path / name)
    one = archiver_of(tmp_path, f"echo $1 $RANKWATCH_ARCHIVE >> {tmp_path}/said")
    one.add("train-0")
    one.add("train-1")
    one.close()
    assert sorted((tmp_path / "said").read_text().splitlines()) == ["train-0 s3://bucket/runs", "train-1 s3://bucket/runs"]
    assert (tmp_path / "train-0" / archiver.MARK).read_text() == "s3://bucket/runs\n"
    assert caplog.messages == []  # the verdict is the last that a person sees


def test_a_failure_is_said_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = f"echo >> {tmp_path}/tries; echo 'rankwatch: error: no such bucket'; test $(wc -l < {tmp_path}/tries) = 3"
    one = archiving(tmp_path, script)
    until(lambda: (tmp_path / "train-0" / archiver.MARK).exists())
    one.close()
    again = "run train-0 is not archived, which is tried again in 0.01 s: no such bucket"
    assert caplog.messages == [again, again, "run train-0 is archived in s3://bucket/runs"]


def test_a_run_that_cannot_be_archived_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = archiving(tmp_path, f"echo >> {tmp_path}/tries; exit 1")
    until(lambda: "tried 3 times" in caplog.text)
    one.close()
    assert (tmp_path / "tries").read_text() == "\n" * 3
    by_hand = f"rankwatch archive {tmp_path}/train-0 s3://bucket/runs"
    assert caplog.messages[-1] == f"run train-0 is not archived (tried 3 times): it printed nothing; later: {by_hand}"
    assert not (tmp_path / "train-0" / archiver.MARK).exists()


def test_a_file_system_that_hangs_does_not_hold_a_job_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiver, "CLOSING", 0.2)
    for name in ("train-0", "train-1"):
        over(tmp_path / name)
    one = archiver_of(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    one.add("train-0")
    until((tmp_path / "pid").exists)
    one.add("train-1")
    one.close()
    told = [message for message in caplog.messages if "there was no more time" in message]
    assert [message.split()[1] for message in told] == ["train-0", "train-1"]
    pid = int((tmp_path / "pid").read_text())
    until(lambda: started_at(pid) is None)


def test_a_try_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archiver, "LIMIT", 0.1)
    monkeypatch.setattr(archiver, "PAUSES", ())
    one = archiving(tmp_path, "exec sleep 600")
    until(lambda: "it took more than 0.1 s" in caplog.text)
    one.close()


def test_a_signal_ends_the_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(archiver, "PATIENCE", 0.0)
    one = archiving(tmp_path, f"touch {tmp_path}/begun; exec sleep 300")
    until((tmp_path / "begun").exists)
    closing = threading.Thread(target=one.close)
    closing.start()
    until(lambda: "waiting for the archive, for at most 30 s; Ctrl-C ends it" in caplog.messages)
    one.stop()
    closing.join()
    assert caplog.messages[-1].startswith("run train-0 is not archived: there was no more time; later: ")


def test_at_the_end_a_failure_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiver, "PAUSES", (600.0,))
    one = archiving(tmp_path, "exit 1")
    until(lambda: "is tried again in 600 s" in caplog.text)
    one.close()
    assert "tried 2 times" in caplog.messages[-1]


def test_a_restarted_collector_archives_what_its_predecessor_could_not(tmp_path: Path) -> None:
    over(tmp_path / "train-0")
    over(tmp_path / "train-1")
    (tmp_path / "train-1" / archiver.MARK).write_text("s3://bucket/runs\n")
    over(tmp_path / "train-2", collector="another")
    over(tmp_path / "train-3", closed=False)
    one = archiver_of(tmp_path, f"echo $1 >> {tmp_path}/said")
    one.begin("head", takes_over=True)
    one.close()
    assert (tmp_path / "said").read_text() == "train-0\n"


def test_a_run_that_ends_again_is_archived_again(tmp_path: Path) -> None:
    one = archiving(tmp_path, f"echo $1 >> {tmp_path}/said")
    until(lambda: (tmp_path / "train-0" / archiver.MARK).exists())
    one.add("train-0")
    one.close()
    assert (tmp_path / "said").read_text() == "train-0\ntrain-0\n"


def test_a_run_that_ended_again_before_a_collector_was_killed(tmp_path: Path) -> None:
    for name in ("train-0", "train-1"):
        (over(tmp_path / name) / archiver.MARK).write_text("s3://bucket/runs\n")
    records.add(tmp_path / "train-1", Entry(2.0, NO_RANK, Closed()), at=101.0)
    one = archiver_of(tmp_path, f"echo $1 >> {tmp_path}/said")
    one.begin("head", takes_over=True)
    one.close()
    assert (tmp_path / "said").read_text() == "train-1\n"


def test_a_password_in_the_url_is_told_to_its_process_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = "ftp://me:pass/word@host/runs"
    one = Archiver(url, tmp_path, lambda run: ["sh", "-c", "echo no $RANKWATCH_ARCHIVE; false"])
    one.add(over(tmp_path / "train-0").name)
    until(lambda: any("later:" in line for line in caplog.messages))
    one.close()
    two = Archiver(url, tmp_path, lambda run: ["sh", "-c", f"echo $RANKWATCH_ARCHIVE > {tmp_path}/told"])
    two.add("train-0")
    two.close()
    assert (tmp_path / "told").read_text() == f"{url}\n"
    assert (tmp_path / "train-0" / archiver.MARK).read_text() == "ftp://***@host/runs\n"
    assert "no ftp://***@host/runs; later:" in caplog.text
    assert "pass/word" not in caplog.text


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archiver, "MOST_WAITING", 2)
    monkeypatch.setattr(archiver, "NAMED", 1)


def flooded(runs: Path, script: str, count: int) -> Archiver:
    """An archiver that is at its first run, while more end than find room."""
    one = archiver_of(runs, f"touch {runs}/begun; {script}")
    one.begin("head", takes_over=False)
    names = [over(runs / f"train-{number}").name for number in range(count)]
    one.add(names[0])
    until((runs / "begun").exists)
    for name in names[1:]:
        one.add(name)
    return one


@pytest.mark.usefixtures("little_room")
def test_of_very_many_runs_some_wait_and_the_others_are_found_on_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wait = f"until test -e {tmp_path}/go; do sleep 0.02; done"
    one = flooded(tmp_path, f"{wait}; echo $1 >> {tmp_path}/said", 9)
    assert len(one._due) == 2
    one.add("train-0")  # it ends again while it is archived: nothing on the disk would say so afterwards
    (tmp_path / "go").touch()
    until(lambda: all((tmp_path / f"train-{number}" / archiver.MARK).exists() for number in range(9)))
    one.close()
    assert sorted((tmp_path / "said").read_text().split()) == ["train-0", *(f"train-{number}" for number in range(9))]
    assert caplog.messages == ["2 runs wait to be archived: those that end now are looked for on the disk later"]


@pytest.mark.usefixtures("little_room")
def test_runs_that_cannot_be_archived_hold_up_no_other_one(tmp_path: Path) -> None:
    wait = f"until test -e {tmp_path}/go; do sleep 0.02; done"
    one = flooded(tmp_path, f"{wait}; echo >> {tmp_path}/$1.tries; test $1 = train-8", 9)
    (tmp_path / "go").touch()
    until((tmp_path / "train-8" / archiver.MARK).exists)
    one.close()
    tries = [len((tmp_path / f"train-{number}.tries").read_text()) for number in range(9)]
    assert max(tries) <= 2 * 3  # as it ended, and once more as it was found


@pytest.mark.usefixtures("little_room")
def test_at_the_end_a_few_are_named_and_the_others_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiver, "CLOSING", 0.2)
    one = flooded(tmp_path, "exec sleep 600", 9)
    one.close()
    named, more = caplog.messages[-2:]
    assert named.startswith("run train-0 is not archived: there was no more time; later: ")
    assert more == (
        f"and 8 more runs in {tmp_path} are not archived; a collector with the same connection file archives them"
    )
    two = archiver_of(tmp_path, f"echo $1 >> {tmp_path}/said")
    two.begin("head", takes_over=True)
    two.close()
    assert sorted((tmp_path / "said").read_text().split()) == [f"train-{number}" for number in range(9)]
