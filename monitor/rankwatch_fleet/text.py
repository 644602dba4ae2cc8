"""What an archive says, for people on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

from rankwatch.shared.words.text import format_head

from .chance import FORMULA
from .findings import Fleet, Machine, Machines, Recurring

MOST = 10
"""Lines of a table; the rest is counted, and in JSON."""

WIDTH = 80
"""Columns of the text, where a terminal has as many."""

FEW = 3
"""Machines that are shown although chance explains them."""


def render(fleet: Fleet, width: int = WIDTH) -> str:
    """As text, newline at its end. What stands out comes last: that is what is seen on a terminal."""
    parts = [_head(fleet)]
    parts.append(_table("versions", ("runs", "verdicts", "suspects", "torch, driver, rankwatch"), _versions(fleet)))
    parts.append(_table("modules", ("runs", "jobs", "module", "class: cause", "last run"), _recurring(fleet.modules)))
    parts.append(_table("causes", ("runs", "jobs", "cause", "last run"), _causes(fleet.causes)))
    parts += [_machines("host", fleet.hosts, width), _machines("GPU", fleet.gpus, width)]
    return "\n".join(part for part in parts if part) + f"\n{fill(FORMULA, width)}\n"


def _head(fleet: Fleet) -> str:
    span = fleet.first_day if fleet.first_day == fleet.last_day else f"{fleet.first_day} to {fleet.last_day}"
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in fleet.outcomes.items())
    hosts, gpus = fleet.hosts, fleet.gpus
    fields = [
        ("runs", f"{fleet.runs:,} of {span}\n{outcomes}" if fleet.runs else "none"),
        ("hosts", f"{hosts.count:,}, {hosts.hours:,.0f} hours of their ranks, {hosts.incidents:,} incidents"),
        ("GPUs", f"{gpus.count:,}, {gpus.hours:,.0f} hours, {gpus.incidents:,} incidents"),
    ]
    if fleet.damaged:
        fields.append(("left out", f"{len(fleet.damaged):,} damaged file{'s' * (len(fleet.damaged) > 1)}"))
    return format_head(f"archive {fleet.url}", fields)


def describe_machines(what: str, machines: Machines) -> str:
    """``3 of 1,024 GPUs stand out (2 with their host); 28 others are within chance``."""
    bad, others = machines.standing_out, len(machines.by_chance)
    if not bad:
        within = f"; {others:,} {'have' if others > 1 else 'has'} incidents, within chance" if others else ""
        return f"no {what} of {machines.count:,} stands out{within}"
    text = f"{len(bad)} of {machines.count:,} {what}s stand{'s' if len(bad) == 1 else ''} out"
    if through := sum(bool(one.through) for one in bad):
        text += f" ({through} {'with their host' if what == 'GPU' else 'by a GPU'})"
    return f"{text}; {others:,} other{'s are' if others > 1 else ' is'} within chance" if others else text


def describe_kinds(what: str, machine: Machine) -> str:
    """``7 one-replica, 2 lost``, and how it came about where that says more."""
    text = ", ".join(f"{count} {kind}" for kind, count in sorted(machine.kinds.items(), key=lambda kind: -kind[1]))
    if machine.through:
        through = ", ".join(machine.through)
        return f"{text}; as others of {through}" if what == "GPU" else f"{text}; by {through}"
    return f"{text}; all of one job: look at the job, too" if machine.stands_out and machine.jobs == 1 else text


def describe_chance(chance: float) -> str:
    return f"{chance:.1e}" if chance < 0.001 else f"{chance:.3f}"


def _machines(what: str, machines: Machines, width: int) -> str:
    if not machines.count:
        return ""
    shown = [*machines.standing_out[:MOST], *machines.by_chance[:FEW]]
    rows = []
    for one in shown:
        numbers = (str(one.incidents), f"{one.expected:.1f}", f"{one.hours:,.0f}", describe_chance(one.chance))
        rows.append((*numbers, "*" if one.stands_out else "", one.name))
    where = [f"on {one.where}: " if what == "GPU" else "" for one in shown]
    notes = [fill(at + describe_kinds(what, one), width, **_NOTE) for at, one in zip(where, shown, strict=True)]
    title = describe_machines(what, machines)
    lines = _table(title, ("k", "expected", "hours", "P(X >= k)", "", what), rows, notes) or f"{title}\n"
    hidden = len(machines.standing_out) - MOST
    return lines + (f"  and {hidden} more that stand out: --json has them\n" if hidden > 0 else "")


def _recurring(found: Sequence[Recurring]) -> list[tuple[str, ...]]:
    return [(f"{one.runs:,}", f"{one.jobs:,}", one.name or "(root)", one.detail, one.last_run) for one in found]


def _causes(found: Sequence[Recurring]) -> list[tuple[str, ...]]:
    return [(f"{one.runs:,}", f"{one.jobs:,}", one.name, one.last_run) for one in found]


def _versions(fleet: Fleet) -> list[tuple[str, ...]]:
    return [
        (f"{one.runs:,}", f"{one.verdicts:,}", f"{one.suspects:,}", describe_version(one.torch, one.driver, one.rankwatch))
        for one in fleet.versions
    ]


def describe_version(torch: str, driver: str, rankwatch: str) -> str:
    return ", ".join(
        (f"torch {torch or 'unknown'}", f"driver {driver}" if driver else "no driver", f"rankwatch {rankwatch}")
    )


def _table(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]], after: Iterable[str] = ()) -> str:
    """``after``: for each row a line below it. Numbers stand to the right."""
    if not rows:
        return ""
    hidden, notes = len(rows) - MOST - FEW, list(after)
    rows = rows[: MOST + FEW]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head) - 1)]
    lines = [title]
    for index, row in enumerate((head, *rows)):
        cells = [
            cell.rjust(width) if _is_number(rows[0][column]) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  " + "  ".join([*cells, row[-1]]).rstrip())
        lines += [notes[index - 1]] if index and notes else []
    return "\n".join([*lines, *([f"  and {hidden} more: --json has them"] if hidden > 0 else [])]) + "\n"


_NOTE: dict[str, Any] = {"initial_indent": " " * 6, "subsequent_indent": " " * 6, "break_on_hyphens": False}


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit()
