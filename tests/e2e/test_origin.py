"""Where a trip came from, in trainings whose fault shows batches later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs import Job, forked, run_job

FAULT_AT, FAULTY_RANK = 40, 1


def run(folder: Path, scenario: str, ranks: int = 2) -> Job:
    return run_job(folder, forked("origins.py", scenario, ranks=ranks))


def began(job: Job) -> Any:
    return job.verdict["began"]


@pytest.mark.slow
def test_an_input_of_another_rank_is_where_it_began(tmp_path: Path) -> None:
    job = run(tmp_path, "input")
    assert job.verdict["batch"] > FAULT_AT
    assert 500 < began(job).pop("factor") < 2000
    assert began(job).items() >= {
        "rank": FAULTY_RANK, "batch": FAULT_AT, "module": "", "label": "input[0]", "alone": True,
    }.items()  # fmt: skip
    line = f"began      batch {FAULT_AT}, rank {FAULTY_RANK}: input[0] of the root"
    for text in (job.stdout, (job.run_dir / "report.txt").read_text()):
        assert line in text
        assert "; the other ranks' did not" in text


@pytest.mark.slow
def test_a_flipped_weight_is_where_it_began(tmp_path: Path) -> None:
    job = run(tmp_path, "weight")
    assert began(job).pop("factor") > 1e30
    assert began(job).items() >= {
        "rank": FAULTY_RANK, "batch": FAULT_AT, "module": "blocks.1.up", "module_class": "Linear", "label": "weight",
        "alone": True,
    }.items()  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["growing", "spike"])
def test_nothing_began_in_a_training_that_only_grew_or_recovered(tmp_path: Path, scenario: str) -> None:
    job = run(tmp_path, scenario)
    assert job.verdict["cause"] == "data"
    assert began(job) is None
    assert "began      not seen" in job.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_that_diverges_has_no_culprit(tmp_path: Path, ranks: int) -> None:
    job = run_job(tmp_path, forked("diverging.py", ranks=ranks))
    verdict = job.verdict
    assert (verdict["cause"], verdict["rank"]) == ("divergence", None)
    assert 1 <= verdict["began"]["batch"] < verdict["batch"]
    assert verdict["began"]["rank"] is None
    assert verdict["began"]["alone"] is (False if ranks > 1 else None)
    for words in ("no single rank", "learning rate", "at the end"):
        assert words in job.stdout
    assert "divergence" in job.stderr  # the exception of the ranks says so, too


@pytest.mark.slow
def test_a_rate_that_rises_until_the_training_diverges_is_no_ranks_fault(tmp_path: Path) -> None:
    job = run(tmp_path, "rising")
    assert job.verdict["cause"] == "divergence"
    assert FAULT_AT < began(job)["batch"] < job.verdict["batch"]
    assert began(job)["alone"] is False
