"""What can be checked where torch is not installed."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from functools import partial

from .. import __version__
from . import machine, reach
from .bounded import Work, bounded
from .finding import fail
from .place import Place
from .report import Report


def examine_alone(place: Place, env: Mapping[str, str], timeout: float) -> Report:
    """A single process; what needs torch is missing, and that is a failure."""
    began = time.monotonic()
    report = Report(1, "no torch", {0: place}, versions={"Python": platform.python_version(), "rankwatch": __version__})
    advice = "pip install 'rankwatch[agent]' where ranks train; a head node needs none, and the rest holds for it"
    report.tell([0], fail("torch", "it is not installed: GPU, rendezvous and collectives were not tried", advice))
    steps: list[tuple[str, Work]] = [
        ("open files", machine.open_files),
        ("shared memory", partial(machine.shared_memory, 1)),
        ("collector", partial(reach.collector, env.get("RANKWATCH_CONNECTION", ""), timeout / 2)),
    ]
    report.tell([0], *(bounded(check, work, timeout) for check, work in steps))
    report.seconds = time.monotonic() - began
    return report
