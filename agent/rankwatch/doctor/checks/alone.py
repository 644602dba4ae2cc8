"""The checks that run where torch is not installed."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from functools import partial

from ... import __version__
from ...shared.system.installed import to_add
from ..placement import Placement
from ..report import DoctorReport
from ..result import fail
from ..time_limit import Work, bounded
from . import machine, reach


def examine_alone(placement: Placement, env: Mapping[str, str], timeout: float) -> DoctorReport:
    """Checks this host as a job of one rank; that torch is missing is a failure."""
    began = time.monotonic()
    versions = {"Python": platform.python_version(), "rankwatch": __version__}
    report = DoctorReport(1, "no torch", {0: placement}, versions=versions)
    advice = f"{to_add('agent')} where ranks train; a head node needs none, and the rest holds for it"
    report.add([0], fail("torch", "it is not installed: GPU, rendezvous and collectives were not tried", advice))
    steps: list[tuple[str, Work]] = [
        ("open files", machine.open_files),
        ("shared memory", partial(machine.shared_memory, 1)),
        ("collector", partial(reach.collector, env.get("RANKWATCH_CONNECTION", ""), timeout / 2)),
    ]
    report.add([0], *(bounded(check, work, timeout) for check, work in steps))
    report.seconds = time.monotonic() - began
    return report
