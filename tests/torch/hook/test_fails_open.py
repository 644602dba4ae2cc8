"""An error of ours, wherever it comes, never stops a healthy training, and changes no number of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwatch
from notebook import sgd, take_step, unwatch, watched

OURS = str(Path(rankwatch.__file__).parent)

DOORS = {
    "backward.py:_call_reached",
    "backward.py:is_running",
    "fails_open.py:hook",
    "fingerprints.py:__call__",
    "hooks.py:__call__",
    "hooks.py:_call",
    "hooks.py:call",
    "known_norms.py:observed",
    "loss.py:observed",
    "unseen.py:quietly",
}
"""What torch calls itself, and what hands that on to where errors are caught. Each is a few lines, to be kept without errors."""


class InjectedError(RuntimeError):
    pass


def trained(options: dict[str, Any] | None, trace: Callable[..., None] | None = None) -> list[Tensor]:
    """The weights after a few batches; ``trace`` sees each call of a Python function in them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.Linear(3, 3))
    optimizer = sgd(model, 0.1)
    close = closer(model, options)
    sys.settrace(trace)
    try:
        for _ in range(3):
            model.load_state_dict(model.state_dict())
            model(torch.randn(4, 3)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            take_step(optimizer)
    finally:
        sys.settrace(None)
    close()
    return [value.detach() for value in model.parameters()]


def closer(model: nn.Module, options: dict[str, Any] | None) -> Callable[[], None]:
    """Watches the model with these options; with fingerprints, as if there were a collector. Returns what ends the watch."""
    if options is None:
        return lambda: None
    if "fingerprints" not in options:
        return rankwatch.watch(model, **options).close
    watched(model, **options)
    return unwatch


def called(options: dict[str, Any]) -> list[CodeType]:
    """Our functions that a healthy training calls."""
    found: dict[CodeType, None] = {}

    def trace(frame: Any, event: str, arg: Any) -> None:
        if frame.f_code.co_filename.startswith(OURS):
            found[frame.f_code] = None

    trained(options, trace)
    return list(found)


def raising(code: CodeType) -> Callable[..., None]:
    """Makes the first call of a function raise."""
    calls = 0

    def trace(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        if frame.f_code is code:
            calls += 1
            if calls == 1:
                raise InjectedError

    return trace


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a generator that is thrown away raises, too
@pytest.mark.parametrize(
    "options",
    [{}, {"gradients": True}, {"check": "async"}, {"check": "batch", "every": 2}, {"guard": False}, {"fingerprints": 1}],
    ids=str,
)
def test_whichever_function_raises(options: dict[str, Any]) -> None:
    expected = trained(None)
    stopped = set()
    functions = called(options)
    assert len(functions) > 200
    logging.disable(logging.CRITICAL)
    try:
        for code in functions:
            try:
                weights = trained(options, raising(code))
            except InjectedError:
                stopped.add(f"{Path(code.co_filename).name}:{code.co_name}")
            else:
                assert all(map(torch.equal, weights, expected)), code
    finally:
        logging.disable(logging.NOTSET)
    assert stopped <= DOORS
