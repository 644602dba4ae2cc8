"""Real ranks whose model measures itself: a measure of 0/0 ends a training only where gradients are bad because of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import forked, run_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_measure_beside_the_loss_ends_no_training(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("measured.py", "beside"))
    assert (job.code, job.report["outcome"], job.report["batches"]) == (0, "finished", 8), job.stderr
    (told,) = job.report["notices"]
    assert (told["rank"], told["module"], told["batch"]) == (1, "recall", 3)
    assert "harmless: recall (Recall), output: in batch 3 nan" in (job.run_dir / "report.txt").read_text()


def test_a_measure_by_which_the_loss_is_weighted_is_the_culprit(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("measured.py", "used"))
    assert job.code == 77, job.stderr
    verdict = job.verdict
    assert (verdict["rank"], verdict["batch"], verdict["module"], verdict["cause"]) == (1, 3, "recall", "invalid")
    assert "0 / 0" in job.stdout
