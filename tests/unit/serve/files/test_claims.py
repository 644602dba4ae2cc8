"""Names of runs in a folder that several collectors use."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.serve.files.claims import NOTE, PART, Claims, Owner
from rankwatch_monitor.serve.files.run_folder import RunsFolder


def gone() -> int:
    """The number of a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def leave(runs: Path, run: str, **fields: object) -> Path:
    """What a process leaves that is killed while it makes a record; the fields are those of its note."""
    assert Claims(runs).claim(run)
    note = runs / run / NOTE
    note.write_text(json.dumps(Owner(*json.loads(note.read_text()))._replace(**fields)))  # type: ignore[arg-type]
    (runs / run / PART).mkdir()
    (runs / run / PART / FILE).write_text("half a record")
    return runs / run


@pytest.mark.parametrize("taken", ["folder", "file", "link to nowhere"])
def test_a_name_is_claimed_once_by_whoever_comes_first(tmp_path: Path, taken: str) -> None:
    path = tmp_path / "train-0"
    if taken == "folder":
        assert RunsFolder(tmp_path).claim("train-0")
    elif taken == "file":
        path.touch()
    else:
        path.symlink_to("nowhere")
    assert not RunsFolder(tmp_path).claim("train-0")
    assert RunsFolder(tmp_path).claim("train-0.2")


def test_a_run_begins_where_its_folder_cannot_be_made_and_the_folder_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = RunsFolder(tmp_path / "runs")

    def full(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "mkdir", full)
        assert runs.claim("train-0")
        assert runs.claim("train-1")
    assert "cannot make the folder of run train-0: No space left on device; the run begins without it" in caplog.text
    assert RunsFolder(tmp_path / "runs").claim("train-1")  # another collector's, meanwhile
    with runs.begin("train-0") as folder:
        (folder / FILE).touch()
    assert (tmp_path / "runs" / "train-0" / FILE).exists()
    with pytest.raises(FileExistsError), runs.begin("train-1"):
        pass
    runs.record_trace("train-1", 0, 0, ())
    assert [path.name for path in (tmp_path / "runs" / "train-1").iterdir()] == [NOTE]


def test_a_runs_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    runs = RunsFolder(tmp_path / "runs")
    (tmp_path / "runs").rmdir()
    assert runs.claim("train-0")
    assert (tmp_path / "runs" / "train-0").is_dir()


def test_a_runs_folder_that_leads_nowhere_takes_no_name_and_the_run_begins(tmp_path: Path) -> None:
    """A link to a scratch disk, which is cleaned or unmounted while the collector runs."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    runs = RunsFolder(tmp_path / "runs")
    (tmp_path / "scratch").rmdir()
    assert runs.claim("train-0")  # else the collector would try one name after the other, without end
    (tmp_path / "scratch").mkdir()
    with runs.begin("train-0") as folder:
        (folder / FILE).touch()
    assert (tmp_path / "scratch" / "train-0" / FILE).exists()


def test_a_run_whose_folder_was_removed_before_its_record_began_has_one(tmp_path: Path) -> None:
    runs = RunsFolder(tmp_path)
    assert runs.claim("train-0")
    shutil.rmtree(tmp_path / "train-0")
    with runs.begin("train-0") as folder:
        (folder / FILE).touch()
    assert [path.name for path in (tmp_path / "train-0").iterdir()] == [FILE]


def test_what_a_killed_collector_left_is_swept_and_its_name_is_free(tmp_path: Path) -> None:
    leave(tmp_path, "train-0", pid=gone())
    leave(tmp_path, "train-1", began="1")  # its number is another process's by now
    leave(tmp_path, "train-2", machine="another", collector="ours")  # on another host, with the keys that this one has
    leave(tmp_path, "train-3", collector="ours")  # the keys are this one's by now, and the process is still dying
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked how it ended
    leave(tmp_path, "train-4", pid=dead.pid)
    runs = RunsFolder(tmp_path)
    runs.sweep("ours")
    dead.wait()
    assert list(tmp_path.iterdir()) == []
    assert all(runs.claim(name) for name in ("train-0", "train-1", "train-2"))


def test_a_stranger_sweeps_nothing(tmp_path: Path) -> None:
    left = [
        leave(tmp_path, "mine"),  # this process lives
        leave(tmp_path, "elsewhere", machine="another", pid=gone()),
        leave(tmp_path, "keyless", machine="another", collector=""),
        leave(tmp_path, "unknown", machine="", pid=gone()),
        leave(tmp_path, "roots", pid=1, began="0" * 30) if os.geteuid() else leave(tmp_path, "roots"),
    ]
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / NOTE).write_text("{")
    for collector in ("ours", ""):
        RunsFolder(tmp_path).sweep(collector)
    assert all((path / PART / FILE).exists() for path in left)
    assert {"empty", "odd"} <= {path.name for path in tmp_path.iterdir()}


def test_a_report_without_a_record_outlives_the_sweep(tmp_path: Path) -> None:
    run = leave(tmp_path, "train-0", pid=gone())
    (run / "report.txt").write_text("the verdict")
    RunsFolder(tmp_path).sweep("ours")
    assert [path.name for path in run.iterdir()] == ["report.txt"]


def test_a_claim_made_while_another_collector_sweeps_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = leave(tmp_path, "train-0", pid=gone())
    slow, second = RunsFolder(tmp_path), RunsFolder(tmp_path)
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        if self.name == NOTE:
            monkeypatch.undo()
            second.sweep("second")
            assert second.claim("train-0")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    slow.sweep("slow")
    assert [path.name for path in run.iterdir()] == [NOTE]
    with second.begin("train-0") as folder:
        (folder / FILE).touch()
    assert [path.name for path in run.iterdir()] == [FILE]
