"""Writes to weights outside of an optimizer's step: when they came, and those that are a habit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from notebook import unwatch, watched

BATCHES = 100
AT = 70


def line(write: Callable[[nn.Linear, int], object], optimizers: int = 1) -> str:
    """What is told of a training in which this is called after each step."""
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Linear(4, 1))
    detector, _ = watched(model)
    steps = [torch.optim.AdamW(layer.parameters(), 1e-3) for layer in model][:optimizers]
    for number in range(BATCHES):
        model(torch.randn(2, 4)).square().mean().backward()
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            write(first, number)
    told = detector.whereabouts.writes
    unwatch()
    return told


def loaded(layer: nn.Linear, number: int) -> None:
    if number in (AT, AT + 1):
        layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda layer, number: None, ""),
        (lambda layer, number: number == AT and layer.weight.mul_(30.0), f"after the step of batch {AT}"),
        (loaded, f"after the step of batch {AT}"),
        (lambda layer, number: number in (AT, AT + 1 - 40) and layer.bias.zero_(), f"after the step of batch {AT}"),
        (lambda layer, number: layer.weight.clamp_(-1.0, 1.0), ""),
        (lambda layer, number: number % 5 == 0 and layer.weight.clamp_(-1.0, 1.0), ""),
    ],
    ids=["none", "once", "loaded", "early", "clipped", "clipped at times"],
)
def test_what_is_no_habit_is_told(write: Callable[[nn.Linear, int], object], told: str, optimizers: int) -> None:
    assert line(write, optimizers) == told
