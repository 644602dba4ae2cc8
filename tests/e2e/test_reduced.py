"""Ranks that reduce in place: the verdict tells a sum that is too large from a part that was bad, in the right module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs import forked, run_job

pytestmark = pytest.mark.e2e


def verdict_of(tmp_path: Path, how: str) -> dict[str, Any]:
    job = run_job(tmp_path, forked("reduced.py", how), "--decision-window", "30")
    assert job.code == 77, job.stderr
    assert job.verdict["certainty"] == "complete"
    return job.verdict


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sum", "async", "scatter"])
def test_a_sum_of_finite_parts(tmp_path: Path, how: str) -> None:
    verdict = verdict_of(tmp_path, how)
    assert (verdict["batch"], verdict["module"], verdict["reading"]) == (3, "row", "output")
    assert (verdict["state"], verdict["cause"]) == ("inf", "reduction")
    assert [also["rank"] for also in verdict["also"]] == [1]  # no rank is guilty alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rank", "module", "cause"),
    [("inner", 1, "row.inner", "overflow"), ("here", 1, "row", "invalid"), ("after", 0, "row", "overflow")],
)
def test_a_bad_part_and_a_finite_sum_are_no_reduction(tmp_path: Path, how: str, rank: int, module: str, cause: str) -> None:
    verdict = verdict_of(tmp_path, how)
    assert (verdict["rank"], verdict["batch"], verdict["module"], verdict["cause"]) == (rank, 3, module, cause)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "reading"), [("hook", "bias.grad (reduced)"), ("manual", "weight.grad (reduced)")])
def test_a_gradient_that_its_reduction_made_inf(tmp_path: Path, how: str, reading: str) -> None:
    verdict = verdict_of(tmp_path, how)
    assert (verdict["batch"], verdict["phase"], verdict["module"]) == (3, "backward", "2")
    assert (verdict["reading"], verdict["state"]) == (reading, "inf")
    assert verdict["cause"] == "reduction"
    assert [also["rank"] for also in verdict["also"]] == [1]


@pytest.mark.slow
def test_a_gradient_that_was_bad_before_its_reduction(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, "local")
    assert (verdict["rank"], verdict["batch"], verdict["cause"]) == (1, 3, "gradient")
    assert "(reduced)" not in verdict["reading"]
