"""Real ranks that leave out steps: the run ends as without these steps, or with a verdict where that does not help."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import SCRIPTS, Job, forked, run_job, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SOURCE = (SCRIPTS / "skipped.py").read_text().splitlines()
LINE = next(number for number, line in enumerate(SOURCE, 1) if "# 0 / 0" in line)

SKIP = "--on-bad-step", "skip"


def told(job: Job) -> list[tuple[int, int, str]]:
    return [(one["step"], one["verdict"]["rank"], one["verdict"]["cause"]) for one in job.report["skipped"]]


def test_two_bad_steps_are_left_out(tmp_path: Path) -> None:
    """Weights, running statistics and the batches they count are those of a training that never ran the bad batches."""
    job = run_job(tmp_path / "skip", torchrun("skipped.py", "nan"), *SKIP)
    assert job.code == 0, job.stdout + job.stderr
    assert (job.report["outcome"], job.report["verdict"]) == ("finished", None)
    assert told(job) == [(5, 1, "data"), (9, 1, "data")]
    names = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert [(one["restored"], one["budget_left"]) for one in job.report["skipped"]] == [(names, 2), (names, 1)]
    assert "finished, but 2 steps were left out: batch 5 (rank 1, unit: data), batch 9 (rank 1, unit: data);" in job.stderr
    assert "WARNING rankwatch: run skipped-0: optimizer step 5 was left out: rank 1 of 2" in job.stderr
    by_hand = run_job(tmp_path / "by_hand", forked("skipped.py", "by_hand"))
    weights, expected = (
        sorted(line for line in one.stdout.splitlines() if line.startswith("rank ")) for one in (job, by_hand)
    )
    assert len(weights) == 2
    assert weights == expected


def test_an_operator_that_is_bad_for_the_third_time_ends_the_run(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("skipped.py", "zeros"), "--on-bad-step", "skip=9/128")
    assert job.code == 77, job.stdout + job.stderr
    assert told(job) == [(3, 1, "invalid"), (6, 1, "invalid"), (9, 1, "invalid")]
    assert (job.verdict["rank"], job.verdict["batch"], job.verdict["closeup"]["source"]["line"]) == (1, 9, LINE)
    assert job.report["reason"].endswith(f"skipped.py:{LINE} for the third time: steps 3, 6 and 9 were left out")


def test_more_bad_steps_than_may_be_left_out_end_the_run(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("skipped.py", "all"), *SKIP)
    assert job.code == 77, job.stdout + job.stderr
    assert told(job) == [(step, 1, "data") for step in (5, 6, 7)]
    assert (job.verdict["rank"], job.verdict["batch"], job.verdict["began"]) == (
        1,
        8,
        None,
    )  # not in a step that was left out
    assert job.report["reason"].endswith("; 3 steps were left out before")
