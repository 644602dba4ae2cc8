"""A collector and ranks that do what they are told, and jobs that have ended for tests to look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.ended import Ended
from e2e.site import Forge, Site
from jobs import Job, forked, torchrun


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


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Ended:
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "ended"
    folder.mkdir(exist_ok=True)
    return Ended(folder)


@pytest.fixture(scope="session")
def bad(ended: Ended) -> Job:
    """Rank 1 overflowed in batch 5: run ``bad-0``."""
    return ended.job("bad", torchrun, "overflow")


@pytest.fixture(scope="session")
def good(ended: Ended) -> Job:
    """It finished: run ``good-0``."""
    return ended.job("good", forked, "healthy")
