"""What holds at the end of every test of the ledger."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from desk import DESKS


@pytest.fixture(autouse=True)
def records_tell_the_same() -> Iterator[None]:
    DESKS.clear()
    yield
    for desk in DESKS:
        desk.check_records()
