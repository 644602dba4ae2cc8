"""Hostile trainings of two ranks: the verdict is true, or says that it is partial."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jobs import Nursery, run_job
from trainings.case import Case
from trainings.table import CULPRITS
from trainings.truths import Fate

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ALL = [pytest.param(case, id=name) for name, case in CULPRITS.items()]


def untrue(said: Mapping[str, Any], truth: Mapping[str, Any]) -> dict[str, Any]:
    """What is said other than it is."""
    return {key: said[key] for key, true in truth.items() if not is_true(said[key], true)}


def is_true(said: Any, true: Any) -> bool:
    if isinstance(true, range):
        return said is not None and bool(true.start <= said < true.stop)
    if isinstance(true, dict):
        return said is not None and untrue(said, true) == {}
    return bool(said == true)


@pytest.mark.parametrize("case", ALL)
def test_the_verdict_is_true(tmp_path: Path, nursery: Nursery, case: Case[Fate]) -> None:
    job = run_job(tmp_path, nursery.forked("training.py", "culprits", case.name, ranks=case.ranks))
    assert (job.code, job.left_behind) == (77, []), job.stderr
    verdict = job.verdict
    said = {"also": [one["rank"] for one in verdict["also"]], "operator": (verdict["closeup"] or {}).get("operator")}
    assert untrue(verdict | said, case.truth.verdict) == {}
    assert case.truth.says in verdict["evidence"]
    assert verdict["cause"] in job.stderr  # the exceptions of the ranks
