"""What people look at, of real runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from jobs import RANKWATCH, environment, run_job, torchrun

pytestmark = pytest.mark.e2e


def rankwatch(*arguments: str) -> str:
    done = subprocess.run([*RANKWATCH, *arguments], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_diff(tmp_path: Path) -> None:
    job = run_job(tmp_path, torchrun("train.py", "healthy"))
    assert job.code == 0
    run = str(job.run_dir)
    ranks = rankwatch("diff", run, "--rank", "0", "--rank", "1")
    assert "left       rank 0, batch 11 of train-0" in ranks
    assert "right      rank 1, batch 11 of train-0" in ranks
    same = json.loads(rankwatch("diff", run, run, "--json"))
    assert (same["first"], same["largest"]) == (None, [])
    assert same["frames"]["left"] == same["frames"]["right"] > 4
    assert "batch 3 of train-0" in rankwatch("diff", run, "--batch", "3", "--batch", "4")
