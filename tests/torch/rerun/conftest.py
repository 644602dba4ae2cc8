"""No watch outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import notebook


@pytest.fixture(autouse=True)
def _unwatch() -> Iterator[None]:
    yield
    notebook.unwatch()
