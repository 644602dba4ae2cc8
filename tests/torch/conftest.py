"""Removes the detectors of each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from notebook import unwatch


@pytest.fixture(autouse=True)
def _unwatch() -> Iterator[None]:
    yield
    unwatch()
