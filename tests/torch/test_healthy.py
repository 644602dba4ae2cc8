"""Healthy trainings: nothing trips, nothing is noticed, and the training is bit by bit as without a watch."""

from __future__ import annotations

import pytest
import torch

from notebook import Notebook, unwatch, watched
from rankwatch.api import registry
from rankwatch.shared.types.notice import NoticeKind
from trainings.alone import HEALTHY
from trainings.case import Case
from trainings.truths import Peace

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")

QUICK = {
    "an_infinite_buffer_as_a_mask", "experts_with_empty_batches", "encode_and_decode", "fine_tuning_in_eval_mode", "a_scaler",
    "rewards_with_spikes",
}  # fmt: skip


def trained(case: Case[Peace], watch: bool) -> tuple[list[object], list[torch.Tensor], Notebook | None]:
    """The losses, the state at the end, and what the watch wrote down."""
    training, notebook, detector = case.make(), None, None
    if watch:
        detector, notebook = watched(training.root, **case.options)
        registry.remember(detector)  # type: ignore[arg-type]  # detect_overflow finds it there
    losses = [training.batch(number) for number in range(case.batches)]
    if detector is not None:
        unwatch()  # what waits is judged
        registry.forget(detector)  # type: ignore[arg-type]
        assert detector.fault == ""
    return losses, [value.detach().clone() for value in training.root.state_dict().values()], notebook


ALL = [pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in HEALTHY.items()]


@pytest.mark.parametrize("case", ALL)
@pytest.mark.filterwarnings("ignore")
def test_a_healthy_training_is_left_in_peace(case: Case[Peace]) -> None:
    losses, state, notebook = trained(case, watch=True)
    assert notebook is not None
    assert notebook.trips == []
    assert [one for one in notebook.notices if one.kind is not NoticeKind.SKIPPED] == []  # the others may have skipped, too
    numbers = [summary.batch for _, summary in notebook.batches]
    assert all(number >= 0 for number in numbers)
    if case.truth.forwards > 0:
        assert sorted(set(numbers)) == list(range(case.batches * case.truth.forwards))
    expected, expected_state, _ = trained(case, watch=False)
    assert losses == expected
    assert len(state) == len(expected_state)
    assert all(torch.equal(*pair) or _both_nan(*pair) for pair in zip(state, expected_state, strict=True))


def _both_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
