"""A collector in this process, a context for the sockets of a test, and the time that links may need on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from collectors import Running
from rankwatch.api.registry import open_watches
from rankwatch.tell import link


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training waits a few seconds for its collector, which other processes may take away. Tests of these limits set them."""
    for limit in ("CONNECT_TIMEOUT", "FAREWELL_TIMEOUT", "VERDICT_MARGIN"):
        monkeypatch.setattr(link, limit, 60.0)


@pytest.fixture(autouse=True)
def _no_other_model() -> None:
    """A model that is still watched, of a test before, has the number and name that the test's own is to have."""
    for watch in open_watches():
        watch.close()


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def watched(collector: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The collector of the models that the test watches in this process."""
    monkeypatch.setenv("RANKWATCH_CONNECTION", str(collector.folder / "connection.json"))
    monkeypatch.setenv("RANKWATCH_JOB", "train")
    # The deadline would end the tests' own process.
    monkeypatch.setattr("rankwatch.tell.deadline.Deadline.start", lambda deadline: None)
    return collector


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)
