"""Real ranks that wait for one of them in each batch, and ranks that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import forked, run_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OFTEN = ("--heartbeat", "0.25")


def test_the_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("held_up.py", "slow"), *OFTEN)
    judgement = job.report["judgement"]
    assert (job.code, job.report["outcome"]) == (0, "finished")
    assert [one["kind"] for one in judgement["reasons"]] == ["rank-waited-for"]
    assert judgement["text"].startswith("rank 1 of 2 (")
    assert "finished, but rank 1 of 2 (" in job.stderr


def test_of_ranks_alike_none_is_named(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("held_up.py"), *OFTEN)
    assert job.code == 0
    assert (job.report["judgement"]["healthy"], job.report["judgement"]["reasons"]) == (True, [])
