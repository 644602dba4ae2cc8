"""Healthy trainings of several ranks whose numbers go up and down, or differ by rank: nothing is said of them.

What ranks send of their batches is in no recording: these run for real.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import Nursery
from recorded.replicas import complaints

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REAL = [
    "replicas_with_gradients",
    "unused_parameters",
    "scaler_that_skips",
    "a_growing_norm",
    "spikes",
    "lengths_that_vary",
    "tensor_parallel",
]


@pytest.mark.parametrize("name", REAL)
def test_a_healthy_training_is_left_in_peace(tmp_path: Path, nursery: Nursery, name: str) -> None:
    assert complaints(nursery.forked, "agreeing", name, tmp_path) == []
