"""Hostile trainings: what is said of the first inf or nan is true. ``hostile/`` has the trainings, and their truth."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hostile.case import CASES, Case
from hostile.verdicts import judged, said

SLOW = {"in_a_compiled_model", "data_of_a_compiled_model", "a_weight_of_a_compiled_model"}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """One thread, and a fresh compiler."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()


def marks(case: Case) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if case.name in SLOW else []


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks(case)) for case in CASES])
@pytest.mark.filterwarnings("ignore")
def test_the_verdict_is_true(case: Case) -> None:
    found = said(case)
    assert judged(case, found) == "right", f"{found}\n{case.truth}"


def test_each_training_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
