"""How far one step of an optimizer can change a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rankwatch.judge.steps.updates import Updates

Make = Callable[[Any], torch.optim.Optimizer]

KNOWN: dict[str, Make] = {
    "sgd": lambda own: torch.optim.SGD(own, 0.3),
    "momentum": lambda own: torch.optim.SGD(own, 0.3, momentum=0.9, nesterov=True),
    "decay": lambda own: torch.optim.SGD(own, 0.3, weight_decay=4.0),
    "adam": lambda own: torch.optim.Adam(own, 0.3),
    "adamw": lambda own: torch.optim.AdamW(own, 0.3, weight_decay=4.0),
    "nadam": lambda own: torch.optim.NAdam(own, 0.3),
    "adamax": lambda own: torch.optim.Adamax(own, 0.3),
}


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, updates: Updates, scale: float) -> None:
    optimizer.zero_grad()
    (model(torch.randn(4, 3)) * scale).square().mean().backward()
    updates.begin(optimizer, 0, are_finite=True)
    optimizer.step()


@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_no_step_goes_further(make: Make) -> None:
    """Large gradients after small ones are the longest steps."""
    torch.manual_seed(0)
    model, updates = nn.Linear(3, 3), Updates()
    optimizer = make(model.parameters())
    for number in range(40):
        before = model.weight.detach().clone()
        train(model, optimizer, updates, 1e3 if number % 10 == 9 else 1.0)
        assert float((model.weight.detach() - before).abs().max()) <= 1.01 * updates.reach(
            model.weight, float(before.abs().max())
        )


def test_of_a_gradient_that_is_gone_nothing_is_known() -> None:
    model, updates = nn.Linear(3, 3), Updates()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, updates, 1.0)
    optimizer.zero_grad(set_to_none=False)
    assert updates.reach(model.weight, 1.0) == -1.0
    assert updates.reach(nn.Parameter(torch.ones(1)), 1.0) == -1.0


def test_a_gradient_of_exactly_0_changes_nothing() -> None:
    model, updates = nn.Linear(3, 3), Updates()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, updates, 1.0)
    assert model.weight.grad is not None
    model.weight.grad.zero_()
    assert updates.reach(model.weight, 1.0) == 0.0


def test_a_decay_that_makes_weights_larger_has_no_bound() -> None:
    """The weight is multiplied by 1 - 0.3 * 9 at each step: no other code has to write for it to run away."""
    model, updates = nn.Linear(3, 3), Updates()
    train(model, torch.optim.AdamW(model.parameters(), 0.3, weight_decay=9.0), updates, 1.0)
    assert updates.reach(model.weight, 1.0) == -1.0
