"""Settings and the order of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No test depends on how fast the machine is.
settings.register_profile("rankwatch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rankwatch")

HERE = Path(__file__).parent
FIRST = [
    "e2e/cluster/test_slurm.py",
    "e2e/test_faults.py",
    "e2e/test_main_job.py",
    "e2e/test_examples.py",
    "e2e/test_integrations.py",
    "e2e/test_attach.py",
    "e2e/test_doctor.py",
    "torch/test_zoo.py",
    "e2e/test_docs.py",
    "e2e/test_several_hosts.py",
    "e2e/test_page.py",
    "e2e/test_parallel.py",
    "e2e/test_top.py",
    "e2e/test_status.py",
    "e2e/test_daemon.py",
    "e2e/test_metrics.py",
    "torch/hook/test_compile.py",
    "torch/test_parity.py",
    "benchmarks/test_load.py",
    "e2e/test_network.py",
    "e2e/test_views.py",
    "unit/decide/test_verdict.py",
    "unit/decide/test_fuzz.py",
]
"""The files that take longest, the longest first: each file runs on one worker, so a long file must not start last. Some of them
have only slow tests."""


@pytest.fixture(autouse=True)
def _no_capsules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are watched in this process write none into the working directory; jobs do, into their runs."""
    monkeypatch.setenv("RANKWATCH_CAPSULE", "off")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turn = {HERE / name: number for number, name in enumerate(FIRST)}
    assert all(path.exists() for path in turn)
    items.sort(key=lambda item: turn.get(item.path, len(FIRST)))
