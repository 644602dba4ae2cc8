"""What replay says of the rows of a batch: whether one stands out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from capsules import opened, trial_of
from models import Calls
from rankwatch.replay.session import _find_rows
from rankwatch.replay.summary import ReplayFindings, _rows


def inverse(x: torch.Tensor) -> torch.Tensor:
    return 1 / x


@pytest.mark.parametrize(
    ("zeros", "said"),
    [
        ((2,), "row 2 of 6 is enough (counted from 0); the others without it are finite"),
        (range(6), "row 0 of 6 is enough (counted from 0); the others are bad without it, too"),
    ],
)
def test_whether_a_row_stands_out(zeros: tuple[int, ...], said: str, tmp_path: Path) -> None:
    x = torch.ones(6, 2)
    x[list(zeros)] = 0
    capsule = opened(tmp_path, Calls(inverse), x)
    found = ReplayFindings(capsule.path, capsule.manifest, "cpu")
    _find_rows(trial_of(capsule), torch.device("cpu"), 6, found)
    assert _rows(found) == said
