"""A process that watches again and again keeps nothing of the watches that were closed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jobs import SCRIPTS, run_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEPT = 3.0
"""MiB that may be kept of 200 watches."""


def test_what_is_kept_of_watches_that_were_closed_does_not_grow(tmp_path: Path) -> None:
    job = run_job(tmp_path, [sys.executable, str(SCRIPTS / "many_watches.py")])
    assert float(job.stdout.split()[-1]) < KEPT, job.stdout + job.stderr
