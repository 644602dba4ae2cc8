"""A list of runs, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..record.replay import Snapshot

_HEAD = ("run", "ended", "ranks", "batches", "why")


def render(snapshots: Sequence[Snapshot]) -> str:
    """One line for each run under a line of names, newline at its end."""
    rows = [_HEAD, *map(_row, snapshots)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)] + [0]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)


def to_json(snapshots: Sequence[Snapshot]) -> str:
    """As JSON; ``outcome`` is null while a run goes on."""
    return json.dumps([to_dict(snapshot) for snapshot in snapshots], indent=2) + "\n"


def to_dict(snapshot: Snapshot) -> dict[str, Any]:
    report, is_over = snapshot
    return {
        "run": report.run,
        "job": report.job,
        "restart": report.restart,
        "is_over": is_over,
        "outcome": report.outcome.value if is_over else None,
        "reason": report.reason,
        "world_size": report.world_size,
        "batches": report.batches,
    }


def _row(snapshot: Snapshot) -> tuple[str, ...]:
    report = snapshot.report
    ended = report.outcome.value if snapshot.is_over else "goes on"
    return report.run, ended, str(report.world_size), str(report.batches), report.reason
