"""A check at the end of every test of the ledger."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from desk import DESKS


@pytest.fixture(autouse=True)
def replays_give_the_same_runs() -> Iterator[None]:
    DESKS.clear()
    yield
    for desk in DESKS:
        desk.check_records()
