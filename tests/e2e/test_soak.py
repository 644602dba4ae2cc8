"""Random faults in eight parts, checked against what the ranks themselves say.

pytest -m soak                               each part for its share of ten minutes
RANKWATCH_SOAK_PARTS=storms,floods pytest .  these parts alone
RANKWATCH_SOAK_SECONDS, RANKWATCH_SOAK_SEED  the length of all parts together, and the faults
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.site import Forge
from e2e.soaking.disk import FlakyDisk, FullDisk
from e2e.soaking.faults import Faults
from e2e.soaking.floods import Floods
from e2e.soaking.launches import Launches
from e2e.soaking.part import Part
from e2e.soaking.relaunches import Relaunches
from e2e.soaking.signals import Signals
from e2e.soaking.storms import Storms

pytestmark = pytest.mark.e2e

PARTS: dict[str, type[Part]] = {
    "faults": Faults,
    "storms": Storms,
    "relaunches": Relaunches,
    "launches": Launches,
    "signals": Signals,
    "floods": Floods,
    "full-disk": FullDisk,
    "flaky-disk": FlakyDisk,
}
CHOSEN = [name for name in os.environ.get("RANKWATCH_SOAK_PARTS", ",".join(PARTS)).split(",") if name]
SECONDS = float(os.environ.get("RANKWATCH_SOAK_SECONDS", "600")) / len(CHOSEN)


def run(part: type[Part], forge: Forge, folder: Path, seconds: float) -> None:
    soaked = part(forge, folder)
    try:
        soaked.run(seconds)
    finally:
        soaked.end()


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("name", CHOSEN)
def test_soak(name: str, forge: Forge, tmp_path: Path) -> None:
    run(PARTS[name], forge, tmp_path, SECONDS)
