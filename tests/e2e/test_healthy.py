"""Healthy trainings of two ranks, those of ``scripts/healthy.py``: no verdict, and nothing is noticed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs import SCRIPTS, forked, run_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NAMES = re.findall(r"^@training\ndef (\w+)", (SCRIPTS / "healthy.py").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_training_is_left_in_peace(tmp_path: Path, name: str) -> None:
    job = run_job(tmp_path, forked("healthy.py", name), "--abort-grace", "3")
    assert job.code == 0, job.stdout + job.stderr
    assert (job.report["verdict"], job.report["notices"]) == (None, [])
    assert job.left_behind == []
