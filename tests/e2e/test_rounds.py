"""A launch of torchrun's agents is one run, also where a rank died before it watched, and nodes come and go."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jobs import SCRIPTS, run_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("how", ["c10d", "given", "alone", "static", "more", "replaced", "gone", "scaled"])
def test_what_goes_bad_on_one_rank_stops_all_ranks_of_its_launch(tmp_path: Path, how: str) -> None:
    """See ``rounds.py``. Each rank has said that it was finite, so all are of the run with the verdict."""
    run_job(tmp_path, [sys.executable, str(SCRIPTS / "rounds.py"), how, str(tmp_path)], "--job", "train")
    runs = [path for path in (tmp_path / "runs").glob("train-*") if not path.is_symlink()]
    verdicts = [
        verdict for path in runs if (verdict := json.loads((path / "report.json").read_text())["verdict"]) is not None
    ]
    told = {(verdict["rank"], verdict["certainty"], len(verdict["missing_ranks"])) for verdict in verdicts}
    assert told == {(1, "complete", 0)}
    assert list(tmp_path.glob("trained-*")) == []
