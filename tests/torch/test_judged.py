"""Trainings that end without a verdict: of a healthy one nothing bad is said, and of one that went badly what is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from judged import report_of
from rankwatch_monitor.decide.ending.judgement import Doubt
from rankwatch_monitor.decide.next.how_it_went import judgement_of
from rankwatch_monitor.record.course import find_signs
from trainings.case import Case
from trainings.judged import JUDGED
from trainings.judged.truth import Went

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {
    "a_classifier", "a_curriculum", "rewards_that_are_found_at_once", "a_hinge_that_is_satisfied", "a_divergence_in_bfloat16",
    "units_that_are_dead", "a_rate_of_zero",
}  # fmt: skip

ALL = [pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in JUDGED.items()]


@pytest.mark.parametrize("case", ALL)
@pytest.mark.filterwarnings("ignore")
def test_how_a_training_went(case: Case[Went], tmp_path: Path) -> None:
    on_the_way: list[Doubt] = []
    judged = judgement_of(
        report_of(case, tmp_path / "train-0", lambda record: on_the_way.extend(find_signs(record, 1).reasons))
    )
    assert judged is not None
    if case.truth.badly:
        assert (judged.healthy, judged.reasons[0].kind) == (False, case.truth.badly)
    else:
        assert judged.reasons == ()
        assert on_the_way == []  # wherever it had been stopped
        assert judged.healthy or not case.truth.well
