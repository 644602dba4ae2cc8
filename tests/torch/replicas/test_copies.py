"""Whose optimizer steps are the model's, where no parameter of it is. ``trainings/alone/engines.py`` has the trainings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from notebook import unwatch, watched
from trainings.alone import HEALTHY


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("an_engine_with_flat_copies", 1),
        ("an_engine_with_copies_of_32_bits", 1),
        ("an_engine_that_accumulates", 4),
        ("an_engine_that_steps_once_a_group", 1),
    ],
)
def test_the_steps_of_an_engine_are_those_of_its_model(name: str, every: int) -> None:
    training = HEALTHY[name].make()
    detector, notebook = watched(training.root)
    for number in range(24):
        training.batch(number)
    training.root(torch.rand(4, 4).to(next(training.root.parameters()).dtype))
    unwatch()
    assert detector.optimizer_step == 24 // every
    steps = {summary.batch: summary.optimizer_step for _, summary in notebook.batches}
    assert steps == {number: number // every for number in range(25)}


def test_the_steps_of_another_model_are_not() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    detector, _ = watched(model)
    for _ in range(8):
        optimizer.zero_grad()
        model(other(torch.rand(4, 4))).square().mean().backward()
        optimizer.step()
    unwatch()
    assert detector.optimizer_step == 0


def test_where_the_model_has_an_optimizer_no_other_one_counts() -> None:
    """A temperature that is learned, of no module, steps before the model does."""
    model, temperature = nn.Linear(4, 4), torch.ones(1, requires_grad=True)
    optimizers = [torch.optim.SGD(values, 0.1) for values in ([temperature], model.parameters())]
    detector, _ = watched(model)
    for _ in range(8):
        (model(torch.rand(4, 4)) * temperature).square().mean().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    unwatch()
    assert detector.optimizer_step == 8
