"""Removes the detectors of each test, and gives their reruns the time that a busy machine may need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from notebook import unwatch


@pytest.fixture(autouse=True)
def _unwatch() -> Iterator[None]:
    yield
    unwatch()


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rerun is given up after a second of wall time, which the other workers of the tests may take away."""
    monkeypatch.setattr("rankwatch.judge.evidence.MAX_SECONDS", 60.0)
