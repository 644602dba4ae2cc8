"""What replay says of the rows of a batch: whether one stands out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import makers
from models import Calls
from rankwatch.replay.code import UsersCode
from rankwatch.replay.opened import open_capsule
from rankwatch.replay.session import _find_rows
from rankwatch.replay.summary import ReplayFindings, _rows
from rankwatch.replay.trial import Trial
from rankwatch.rerun.capsule.capsule import CapsuleRules, write
from rankwatch.rerun.forward import Forward


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
    written = write(CapsuleRules(tmp_path), Forward(Calls(inverse), (x,), {}, "output"), makers.trip())
    assert written.path is not None, written.why_not
    capsule = open_capsule(written.path)
    trial = Trial(capsule, UsersCode(capsule.manifest["code"], capsule.sources, []))
    found = ReplayFindings(capsule.path, capsule.manifest, "cpu")
    _find_rows(trial, torch.device("cpu"), 6, found)
    assert _rows(found) == said
