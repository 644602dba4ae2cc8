"""``rankwatch run --max-restarts``: a training that was killed goes on, and one that its code ends does not begin again."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import Job, forked_apart, run_job, torchrun

pytestmark = pytest.mark.e2e


def starts(folder: Path) -> list[str]:
    return [path.read_text().rstrip() for path in sorted(folder.glob("start-*"))]


def said(job: Job) -> list[str]:
    return [line.partition("rankwatch: ")[2] for line in job.stderr.splitlines() if "started again" in line]


@pytest.mark.slow
def test_a_rank_that_was_killed_is_started_again_and_finishes(tmp_path: Path) -> None:
    job = run_job(tmp_path, torchrun("restarted.py", "killed", str(tmp_path)), "--max-restarts", "3")
    assert (job.code, job.report["outcome"], job.run_dir.name) == (0, "finished", "restarted-1")
    assert starts(tmp_path) == ["0", "4 restart"]
    why = "rank 1 was killed by SIGKILL: nothing is known to be wrong with the code or the data"
    assert said(job) == [f"started again (1 of 3), restart: {why}"]
    assert job.report["advice"] is None
    assert not job.left_behind


@pytest.mark.parametrize(
    ("what", "code", "action", "because"),
    [
        ("raises", 1, "stop", "rank 1 failed: KeyError: 'planted': a restart comes to this error again"),
        ("overflows", 77, "fix-code", "singular in batch 4 of rank 1: the code or its settings make it, so a restart"),
    ],
)
@pytest.mark.slow
def test_what_the_code_does_is_not_started_again(tmp_path: Path, what: str, code: int, action: str, because: str) -> None:
    job = run_job(tmp_path, torchrun("restarted.py", what, str(tmp_path)), "--max-restarts", "44")
    assert (job.code, job.run_dir.name, len(starts(tmp_path))) == (code, "restarted-0", 1)
    assert job.report["advice"]["action"] == action
    (line,) = said(job)
    assert line.startswith(f"not started again, {action}: {because}")


@pytest.mark.slow
def test_what_ends_in_the_same_place_each_time_is_stopped(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked_apart("restarted.py", "killed-always", str(tmp_path)), "--max-restarts", "44")
    assert job.code
    assert len(starts(tmp_path)) == 3
    assert [line.partition(",")[0] for line in said(job)] == [
        "started again (1 of 44)",
        "started again (2 of 44)",
        "not started again",
    ]
