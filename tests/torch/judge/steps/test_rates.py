"""The learning rates of the optimizers, as they were at first, at their highest, and lately."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rankwatch.judge.events import StepDone
from rankwatch.judge.steps.rates import OFTEN, Rates


def line(rate: Callable[[int], float], batches: int = 400) -> str:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    rates = Rates()
    for batch in range(batches):
        optimizer.param_groups[0]["lr"] = rate(batch)
        rates.on(StepDone(optimizer, batch))
    return rates.line


@pytest.mark.parametrize(
    ("rate", "told"),
    [
        (lambda batch: 0.1, "SGD 0.1 in batch 0"),
        (lambda batch: 0.1 if batch < 200 else 30.0, "SGD 0.1 in batch 0, 30 in batch 200"),
        (lambda batch: 0.1 * (1 + batch) if batch < 200 else 1.0, "SGD 0.1 in batch 0, 20 in batch 199, 1 in batch 200"),
        (lambda batch: 0.1 * (1.0 - batch / 400), "SGD 0.1 in batch 0, 2.5e-4 in batch 399"),
        (lambda batch: 0.0, "SGD 0 in batch 0"),
        (lambda batch: 0.1 + batch % 2 / 100, "SGD 0.1 in batch 0"),
    ],
)
def test_a_line_of_three_points(rate: Callable[[int], float], told: str) -> None:
    assert line(rate) == told


def test_groups_are_named_and_a_rate_on_a_device_is_left_out() -> None:
    layers = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
    groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, (0.1, 0.2, 0.3), strict=True)]
    optimizer = torch.optim.Adam(groups)
    optimizer.param_groups[2]["lr"] = torch.tensor(0.3)
    rates = Rates()
    rates.on(StepDone(optimizer, 7))
    assert rates.line == "Adam (group 0) 0.1 in batch 7; Adam (group 1) 0.2 in batch 7"


def test_a_rate_that_is_restarted_for_ever_is_told_ever_less_often() -> None:
    optimizer, rates = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1), Rates()
    told = set()
    for batch in range(20_000):
        optimizer.param_groups[0]["lr"] = 0.1 if batch % 2 else 0.01
        rates.on(StepDone(optimizer, batch))
        told.add(rates.line)
    assert len(told) <= OFTEN + 10
