"""A collector and ranks that do what they are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.site import Forge, Site


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    forge = Forge()
    yield forge
    forge.close()


@pytest.fixture
def site(forge: Forge, tmp_path: Path) -> Iterator[Site]:
    site = Site([forge], tmp_path)
    yield site
    site.clear()
