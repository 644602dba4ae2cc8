"""The largest weight of a trip, beside what it was before the last optimizer steps."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from notebook import learn, watched
from rankwatch.errors import TrainingAborted

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("check", ["frame", "batch"])
@pytest.mark.parametrize("weights_every", [1, 10])
def test_the_weight_that_a_step_threw_away_is_told_with_the_rates_of_all_groups(check: str, weights_every: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    groups: list[dict[str, Any]] = [
        {"params": list(model[:4].parameters())},
        {"params": list(model[4].parameters()), "lr": 2.0},
    ]
    optimizer = torch.optim.Adam(groups, lr=1e20)
    _, notebook = watched(model, check=check, weights_every=weights_every)
    with suppress(TrainingAborted):
        for _ in range(4):
            learn(model(torch.randn(3, 4)).square().mean(), optimizer)
    trip = notebook.trip
    assert trip.rates == (1e20, 2.0)
    assert trip.grown is not None
    assert (trip.grown.batch, trip.grown.largest, trip.grown.before <= 1.0) == (0, 1.0, True)
    assert trip.grown.now >= 0.9e20


def test_without_a_step_no_weight_has_grown() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    _, notebook = watched(model)
    with pytest.raises(TrainingAborted):
        model(torch.full((2, 4), torch.inf))
    assert (notebook.trip.grown, notebook.trip.rates) == (None, ())
