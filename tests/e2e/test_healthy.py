"""Healthy trainings of several ranks: nothing is said of them, and replicas were compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import COMES_BACK, Nursery, run_job
from trainings.case import Case
from trainings.ranks import HEALTHY
from trainings.truths import Alike

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nursery"), "trainings.ranks") as nursery:
        yield nursery


@pytest.mark.parametrize("case", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_training_is_left_in_peace(tmp_path: Path, nursery: Nursery, case: Case[Alike]) -> None:
    job = run_job(tmp_path, nursery.forked("training.py", "Alike", case.name, ranks=case.ranks), "--abort-grace", COMES_BACK)
    assert (job.code, job.left_behind) == (0, []), job.stdout + job.stderr
    report, compared = job.report, job.report["replicas"]
    assert (report["verdict"], report["notices"], report["desync"]) == (None, [], [])
    assert (compared["equal"], compared["parameters"]) == (True, case.truth.compared)
