"""What must be said of a recorded training. Free of torch, so that decisions are tested without it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwatch_monitor.decide.replicas.desync import DesyncPattern

FILE = Path(__file__).parent / "truths.json"
"""What the tables call true, which import torch: a line for each training."""

ANY = -1
ROTATION = 16
"""The default of ``fingerprints``: a parameter is compared once in so many optimizer steps."""

OF_REPLICAS = ("initialisation", "unsynchronised", "subset", "one-rank", "load", "buffer", "unknown")

Alike = Mapping[int, Mapping[str, Sequence[int]]]
"""By optimizer step and parameter: a number for each rank. Ranks with the same number had the same values."""


@dataclass(frozen=True)
class Healthy:
    """``compared``: how many parameters the report must call compared, and equal. ANY: some; 0: there is nothing to compare, or
    what there is differs by right.
    """

    compared: int

    def complaints(self, report: Mapping[str, Any]) -> list[str]:
        """What a report says that is not as it should be."""
        found = [f"{name}: {report[name]}" for name in ("verdict", "notices", "desync") if report[name]]
        compared = report["replicas"]
        if self.compared == 0 or compared is None:
            is_right = self.compared == 0 and compared is None
        else:
            is_right = compared["equal"] and compared["times"] > 0 and self.compared in (ANY, compared["parameters"])
        return found if is_right else [*found, f"compared: {compared}, not {self.compared} parameters"]


@dataclass(frozen=True)
class Truth:
    """What the report should say of a training with a silent fault.

    ``step``: the first optimizer step after which the fault can be seen; ``within``: it is named at most as many steps later.
    ``ranks``: those that differ. ``parameter``: all entries name parameters that begin so. ``entries``, ``lines``: how many
    parameters are named, and in how many lines; -1: at least one. ``pattern``: several values: any of them is true.
    """

    pattern: tuple[str, ...]
    ranks: tuple[int, ...]
    step: int
    parameter: tuple[str, ...] = ("",)
    entries: int = -1
    lines: int = 1
    within: int = ROTATION
    is_declared: bool = True

    def complaints(self, entries: Sequence[Mapping[str, Any]], said: Iterable[str]) -> list[str]:
        """What is not as it should be in the entries of a report, and in what was ``said`` as the job ran."""
        if not entries:
            return ["nothing is named"]
        first, found = entries[0], []
        if not all(entry["pattern"] in self.pattern for entry in entries):
            found.append(f"pattern {sorted({entry['pattern'] for entry in entries})}, not {self.pattern}")
        if self.ranks and tuple(first["ranks"]) != self.ranks:
            found.append(f"ranks {first['ranks']}, not {self.ranks}")
        wrong = [entry["parameter"] for entry in entries if not entry["parameter"].startswith(self.parameter)]
        if wrong:
            found.append(f"{wrong} named, which do not begin by {self.parameter}")
        if self.entries >= 0 and len(entries) != self.entries:
            found.append(f"{len(entries)} entries, not {self.entries}")
        if not self.step <= first["step"] <= self.step + self.within:
            found.append(f"step {first['step']}, not {self.step} to {self.step + self.within}")
        lines = desync_lines(said)
        if len(lines) != self.lines if self.lines >= 0 else not lines:
            found.append(f"{len(lines)} lines, not {self.lines}: {lines}")
        if not self.is_declared and any("inferred" not in line for line in lines):
            found.append(f"what is only inferred is said as if it were declared: {lines}")
        return found


def desync_lines(said: Iterable[str]) -> list[str]:
    """Those of the lines that speak of replicas."""
    return [line for line in said if any(f"; {pattern.value}: " in line for pattern in DesyncPattern)]


def untrue(entries: Iterable[Mapping[str, Any]], groups: Sequence[Sequence[int]], alike: Alike) -> list[str]:
    """Entries that are not true: at its step, an entry's ranks had other values than the other replicas, or than each other.

    ``groups``: the ranks of one group must be equal.
    """
    found = []
    for entry in entries:
        if entry["pattern"] not in OF_REPLICAS:
            continue
        around = [group for group in groups if set(entry["ranks"]) <= set(group)]
        around = around or [group for group in groups if set(group) & set(entry["ranks"])]
        values = alike.get(entry["step"], {}).get(entry["parameter"])
        if values is None or not any(_differ(entry["ranks"], group, values) for group in around):
            found.append(f"untrue: {dict(entry)}")
    return found


def _differ(ranks: Sequence[int], group: Sequence[int], values: Sequence[int]) -> bool:
    own = {values[rank] for rank in group if rank in ranks}
    others = {values[rank] for rank in group if rank not in ranks}
    return len(others) == 1 and not others & own if others else len(own) > 1


def read_truths() -> tuple[dict[str, Healthy], dict[str, tuple[Truth, list[list[int]]]]]:
    """Of the healthy trainings; of the others, with the groups of ranks that must be equal."""
    written = json.loads(FILE.read_text())
    return (
        {name: Healthy(**truth) for name, truth in written["agreeing"].items()},
        {name: (_truth(one["truth"]), one["groups"]) for name, one in written["desynced"].items()},
    )


def _truth(written: Mapping[str, Any]) -> Truth:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in written.items()}
    return Truth(**fields)
