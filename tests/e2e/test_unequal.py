"""Real ranks that are not watched alike: the verdict names the right one, and never vouches for one that did not look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs import Job, forked, run_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG = ("--decision-window", "60")
"""A verdict comes only if no rank is waited for in vain."""


def job_of(tmp_path: Path, *what: str) -> Job:
    job = run_job(tmp_path, forked("unequal.py", *what), *LONG)
    assert job.code == 77, job.stderr
    return job


def at(verdict: dict[str, Any]) -> tuple[int, int, int, str]:
    return verdict["rank"], verdict["batch"], verdict["optimizer_step"], verdict["module"]


def test_a_rank_that_closed_its_watch_does_not_count_as_finite(tmp_path: Path) -> None:
    job = job_of(tmp_path, "closed", "overflow")
    assert at(job.verdict) == (0, 5, 5, "middle")
    assert (job.verdict["certainty"], job.verdict["missing_ranks"]) == ("partial", [1])
    assert "\n  certainty  partial: 1 of 2 ranks answered; not known: rank 1 (rank 1 " in job.stdout
    whole = "partial: 1 of 2 ranks answered; not known: rank 1 (rank 1 closed its watch after batch 3)\n"
    assert whole in (job.run_dir / "report.txt").read_text()


def test_a_rank_whose_watch_broke_does_not_count_as_finite_and_is_not_waited_for(tmp_path: Path) -> None:
    job = job_of(tmp_path, "broken", "overflow")
    assert at(job.verdict) == (0, 5, 5, "middle")
    assert (job.verdict["certainty"], job.verdict["missing_ranks"]) == ("partial", [1])
    fault = "switched itself off in batch 3 by an error of its own: RuntimeError('planted')"
    assert "\n  certainty  partial: 1 of 2 ranks answered; not known: rank 1 (rank 1's " in job.stdout
    assert f"not known: rank 1 (rank 1's watch {fault})\n" in (job.run_dir / "report.txt").read_text()
    assert f"the watch of rank 1 of 2 ({job.report['ranks'][1]['host']}, local rank 1) {fault}" in job.stderr


def test_a_nan_that_the_all_reduce_handed_to_both_is_no_single_ranks(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("unequal.py", "gradient"), *LONG, env={"RANKWATCH_GUARD": "0"})
    assert at(job.verdict) == (0, 5, 5, "first")
    assert (job.verdict["cause"], job.verdict["alike_ranks"]) == ("weight", [0, 1])
    assert "culprit    no single rank (ranks 0-1 of 2 at once), step 5" in job.stdout
    assert "both ranks have it; which one made it is not known: gradients=True tells" in job.stdout


def test_a_rank_that_has_fewer_batches_than_the_others(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("fewer_batches.py"))
    assert job.report["outcome"] in ("failed", "lost")  # as gloo ends it: by an error, or by SIGABRT
    assert (
        "ranks ran unequal numbers of batches: rank 1 ended after 20, rank 0 was in its 21st; give" in job.report["reason"]
    )
    assert job.report["advice"]["action"] == "fix-code"
