"""Gives the links of this process the time that a busy machine may need."""

from __future__ import annotations

import pytest

from rankwatch.tell import link


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training waits a few seconds for its collector, which other processes may take away. Tests of these limits set them."""
    for limit in ("CONNECT_TIMEOUT", "FAREWELL_TIMEOUT", "VERDICT_MARGIN"):
        monkeypatch.setattr(link, limit, 60.0)
