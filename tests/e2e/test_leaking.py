"""A real rank that keeps what it should let go of, and is killed for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import forked, run_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_rank_that_leaked_says_what_it_took_and_from_which_file_to_go_on(tmp_path: Path) -> None:
    saved = tmp_path / "step-21.pt"
    job = run_job(tmp_path, forked("leaking.py"), "--heartbeat", "0.1", env={"SAVED": str(saved)})
    report = job.report
    assert (report["outcome"], report["advice"]["action"]) == ("lost", "stop")
    (leaked,) = (row for row in report["ranks"] if row["leaked"])
    assert leaked["rank"] == 1
    grew = leaked["memory"]
    assert grew.startswith("memory ")
    assert " GiB, +1" in grew  # some 16 MiB a batch, by the beats that came
    assert grew.endswith(" MiB a batch")
    assert grew in report["reason"]
    assert report["made_with"]["saved"] == f"{saved}, after batch 20"
    assert "last saved step-21.pt, after batch 20" in job.stdout
    assert "its memory had grown all the time" in job.stdout
    assert "look for what keeps the tensors of earlier batches" in report["advice"]["reason"]
