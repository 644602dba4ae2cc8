"""The verdict's close-up, for people and for programs: operator, source line, recurrence, precision, capsule."""

from __future__ import annotations

from typing import Any

from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.frame import Reading, State
from rankwatch.shared.types.trip import Operator, Trip
from rankwatch.shared.words.closeup_text import fields_of, replay_fields

from ..decide.core.report import Report
from ..decide.trip.verdict import Verdict


def fields(report: Report, verdict: Verdict) -> list[tuple[str, str]]:
    """The fields of a report from the operator to the close-up, the cause among them."""
    found = fields_of(f"{verdict.cause.value}: {verdict.evidence}", verdict.trip, report.closeup)
    missing = _missing(verdict.tripped, verdict.trip, report.closeup)
    whose = looked(report, verdict)
    if whose != verdict.tripped and not missing:
        found.append(("looked", f"rank {whose} ran it again: of the ranks that tripped alike, its close-up is the fullest"))
    return [*found, ("close-up", missing)] if missing else found


def looked(report: Report, verdict: Verdict) -> int:
    """The rank of the close-up."""
    return verdict.tripped if report.looked < 0 else report.looked


def replay(report: Report, verdict: Verdict) -> list[tuple[str, str]]:
    """The command that runs the capsule again."""
    return replay_fields(report.closeup, report.folder, report.ranks[looked(report, verdict)].host)


def text_of(report: Report, verdict: Verdict) -> dict[str, str]:
    """The same fields as in the text of the report, by title, without the cause."""
    found = dict([*fields(report, verdict), *replay(report, verdict)])
    del found["cause"]
    return found


def to_dict(rank: int, trip: Trip, closeup: CloseUp | None) -> dict[str, Any] | None:
    """None if there is neither a close-up of this rank's trip, nor an operator that the trip names."""
    if closeup is None and trip.operator is None and not trip.has_closeup:
        return None
    missing = _missing(rank, trip, closeup)
    closeup = closeup or CloseUp()
    operator = closeup.operator or trip.operator
    return {
        "operator": operator.name if operator is not None else None,
        "node": (operator.node or None) if operator is not None else None,
        "module": (operator.module or None) if operator is not None else None,
        "source": operator.source if operator is not None else None,
        "inputs": _inputs(operator) if operator is not None else [],
        "recurred": closeup.recurred if closeup.of else None,
        "of": closeup.of or None,
        "eager": closeup.is_eager,
        "precision": {
            one.dtype: {"state": one.state, "abs_max": one.abs_max if one.state is State.FINITE else None}
            for one in closeup.precision
        },
        "machine": closeup.machine,
        "note": closeup.note or missing,
        "rank": rank,
    }


def capsule_of(closeup: CloseUp | None) -> str | None:
    """The path of the capsule below the run's folder, or where it lies on the rank's host."""
    return (closeup.capsule or None) if closeup is not None else None


def _missing(rank: int, trip: Trip, closeup: CloseUp | None) -> str:
    if closeup is not None or not trip.has_closeup:
        return ""
    return f"rank {rank} announced one within {trip.closeup_within:g} s, and none has arrived"


def _inputs(operator: Operator) -> list[dict[str, Any]]:
    shapes = [*operator.shapes, *[None] * (len(operator.inputs) - len(operator.shapes))]
    return [_input(reading, shape) for reading, shape in zip(operator.inputs, shapes, strict=False)]


def _input(reading: Reading, shape: tuple[int, ...] | None) -> dict[str, Any]:
    has_number = reading.state in (State.FINITE, State.NOT_FLOAT)
    abs_max = reading.abs_max if has_number else None
    return {"label": reading.label, "shape": shape, "dtype": reading.dtype, "abs_max": abs_max, "state": reading.state}
