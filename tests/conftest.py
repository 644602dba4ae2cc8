"""Settings and the order of all tests."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gate import times

# No test depends on how fast the machine is.
settings.register_profile("rankwatch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rankwatch")

# A shell that runs the tests in the background has them ignore these, and so would each process that a test starts.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

os.environ["RANKWATCH_BUDGET"] = "0"
"""All batches of a model that is watched in this process are measured in full, whatever that costs on this machine."""


@pytest.fixture(autouse=True)
def _no_capsules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are watched in this process write none into the working directory; jobs do, into their runs."""
    monkeypatch.setenv("RANKWATCH_CAPSULE", "off")


def pytest_itemcollected(item: pytest.Item) -> None:
    if times.is_core(item.nodeid.removeprefix("tests/")):
        item.add_marker(pytest.mark.core)


@pytest.hookimpl(trylast=True)  # after those that are not asked for are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first: each file runs on one worker, so a long file must not start last."""
    known = times.read()
    kinds = {(item.path, "slow" if item.get_closest_marker("slow") else "quick") for item in items}
    seconds: Counter[Path] = Counter()
    for path, kind in kinds:
        seconds[path] += known.get((kind, path.relative_to(times.TESTS).as_posix()), 0.0)  # type: ignore[assignment]
    items.sort(key=lambda item: -seconds[item.path])
