"""Patterns of ``modules`` and ``ignore`` that match nothing are said, once, with what was meant."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import rankwatch


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def trained(batches: int = 6, *, model: nn.Module | None = None, **options: object) -> None:
    model = model or nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.LSTM(4, 4)))
    with rankwatch.watch(model, **options):  # type: ignore[arg-type]
        for _ in range(batches):
            out = model(torch.ones(3, 4))
            (out[0] if isinstance(out, tuple) else out).sum().backward()


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["1.*", "0"], []),
        (
            ["1.2"],
            ["modules: '1.2' matches no module of Sequential", "modules: no pattern matches, so the root alone is watched"],
        ),
        (["0", "module.1.*"], ["modules: 'module.1.*' matches no module of Sequential; did you mean '1.*'?"]),
        (["*"], []),
    ],
)
def test_modules_are_looked_at_before_the_first_batch(
    patterns: Sequence[str], expected: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    trained(0, modules=patterns)
    assert said(caplog) == [f"rankwatch: {line}" for line in expected]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["1.1:output[0]", "*:weight", "0", "loss", "*:grad_output"], []),  # of one of two outputs, the loss, the backward
        (["*:outptu"], ["'*:outptu' matches no module, and no reading of the first batches; did you mean '*:output'?"]),
        (
            ["1.1:output[1]"],
            ["'1.1:output[1]' matches no module, and no reading of the first batches; did you mean '1.1:output[1]*'?"],
        ),
        (["*.rotary"], ["'*.rotary' matches no module, and no reading of the first batches"]),
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_what_is_ignored_is_looked_at_once_a_batch_is_known(
    patterns: Sequence[str], expected: Sequence[str], every: int, caplog: pytest.LogCaptureFixture
) -> None:
    trained(12, ignore=patterns, every=every, first_batch=1, gradients=True)
    assert said(caplog) == [f"rankwatch: ignore: {line}" for line in expected]


def test_the_options_of_the_environment_are_looked_at_by_one_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANKWATCH_MODULES", "0,encoder.*")
    monkeypatch.setenv("RANKWATCH_IGNORE", "nothing")
    for rank in ("1", "0"):
        for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, value)
        trained()
        assert len(said(caplog)) == (2 if rank == "0" else 0)
    assert said(caplog)[0] == "rankwatch: modules: 'encoder.*' matches no module of Sequential"


def test_names_are_those_without_wrappers(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    trained(model=nn.DataParallel(model), modules=["0"], ignore=["0:output"])
    assert said(caplog) == []
