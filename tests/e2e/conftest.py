"""Fixtures: a collector with ranks that a test controls, hosts, a training that runs, and jobs that have ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.ended import Ended
from e2e.hosts import NODES, Hosts
from e2e.site import Forge, Site
from jobs import Job, Nursery, Training, forked, torchrun


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


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(["head", *NODES])
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Forks the ranks of the trainings of ``tests/trainings``."""
    with Nursery(tmp_path_factory.mktemp("nursery"), "trainings.table", "recorded.noting") as nursery:
        yield nursery


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path)
    yield training
    training.overflow()


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Ended:
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "ended"
    folder.mkdir(exist_ok=True)
    return Ended(folder)


@pytest.fixture(scope="session")
def bad(ended: Ended) -> Job:
    """Run ``bad-0``: rank 1 overflowed in batch 5."""
    return ended.job("bad", torchrun, "overflow")


@pytest.fixture(scope="session")
def good(ended: Ended) -> Job:
    """Run ``good-0``: it finished."""
    return ended.job("good", forked, "healthy")
