"""Healthy trainings of 200 batches: nothing trips, nothing is noticed, and the training is bit by bit as without a watch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from healthy import loops, nets, precisions  # noqa: F401  they fill the table
from healthy.case import BATCHES, CASES, Case
from notebook import Notebook, unwatch, watched
from rankwatch import registry

QUICK = {
    "an_infinite_buffer_as_a_mask", "experts_with_empty_batches", "encode_and_decode", "fine_tuning_in_eval_mode", "a_scaler",
    "rewards_with_spikes",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(case: Case, watch: bool) -> tuple[list[object], list[torch.Tensor], Notebook | None]:
    """The losses, the state at the end, and what the watch wrote down."""
    training, notebook, detector = case.make(), None, None
    if watch:
        detector, notebook = watched(training.root, **case.options)
        registry.remember(detector)  # type: ignore[arg-type]  # detect_overflow finds it there
    losses = [training.step(number) for number in range(BATCHES)]
    if detector is not None:
        unwatch()  # what waits is judged
        registry.forget(detector)  # type: ignore[arg-type]
        assert detector.fault == ""
    return losses, [value.detach().clone() for value in training.root.state_dict().values()], notebook


def marks(case: Case) -> list[pytest.MarkDecorator]:
    return [] if case.name in QUICK else [pytest.mark.slow]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks(case)) for case in CASES])
@pytest.mark.filterwarnings("ignore")
def test_a_healthy_training_is_left_in_peace(case: Case) -> None:
    losses, state, notebook = trained(case, watch=True)
    assert notebook is not None
    assert notebook.trips == []
    assert notebook.notices == []
    numbers = [summary.batch for _, summary in notebook.batches]
    assert all(number >= 0 for number in numbers)
    if case.forwards > 0:
        assert sorted(set(numbers)) == list(range(BATCHES * case.forwards))
    expected, expected_state, _ = trained(case, watch=False)
    assert losses == expected
    assert len(state) == len(expected_state)
    assert all(torch.equal(*pair) or _both_nan(*pair) for pair in zip(state, expected_state, strict=True))


def _both_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
