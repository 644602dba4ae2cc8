"""The verdict's close-up, for people and for programs: operator, source line, recurrence, precision, capsule."""

from __future__ import annotations

import math
from typing import Any

from rankwatch.shared.closeup_text import fields_of, replay_fields
from rankwatch.shared.frame import Reading, State
from rankwatch.shared.trip import Operator

from ..decide.report import Report
from ..decide.verdict import Verdict


def fields(report: Report, verdict: Verdict) -> list[tuple[str, str]]:
    """The fields of a report from the operator to the close-up, the cause among them."""
    found = fields_of(f"{verdict.cause.value}: {verdict.evidence}", verdict.trip, report.closeup)
    if report.closeup is None and verdict.trip.has_closeup:
        found.append(("close-up", _none_arrived(verdict)))
    return found


def replay(report: Report, verdict: Verdict) -> list[tuple[str, str]]:
    """The command that runs the capsule again."""
    return replay_fields(report.closeup, report.folder, report.ranks[verdict.tripped].host)


def to_dict(report: Report, verdict: Verdict) -> dict[str, Any] | None:
    """None if there is neither a close-up nor an operator that the trip names."""
    closeup = report.closeup
    operator = (closeup.operator if closeup is not None else None) or verdict.trip.operator
    if closeup is None and operator is None and not verdict.trip.has_closeup:
        return None
    source = None if operator is None else operator.source
    return {
        "operator": None if operator is None else operator.name,
        "node": operator.node or None if operator is not None else None,
        "source": None if source is None else source._asdict(),
        "inputs": [] if operator is None else _inputs(operator),
        "recurred": None if closeup is None or not closeup.of else closeup.recurred,
        "of": None if closeup is None or not closeup.of else closeup.of,
        "eager": closeup is not None and closeup.is_eager,
        "precision": {
            one.dtype: {"state": _state(one.state), "abs_max": _finite(one.abs_max) if one.state is State.FINITE else None}
            for one in (closeup.precision if closeup is not None else ())
        },
        "machine": closeup.machine if closeup is not None else "",
        "note": closeup.note if closeup is not None else _none_arrived(verdict) if verdict.trip.has_closeup else "",
    }


def capsule(report: Report) -> str | None:
    """The path of the capsule below the run's folder, or where it lies on the culprit's host."""
    return (report.closeup.capsule or None) if report.closeup is not None else None


def text_of(report: Report, verdict: Verdict) -> dict[str, str]:
    """The same fields as in the text of the report, by title, without the cause."""
    found = dict([*fields(report, verdict), *replay(report, verdict)])
    del found["cause"]
    return found


def _none_arrived(verdict: Verdict) -> str:
    return f"rank {verdict.tripped} announced one within {verdict.trip.closeup_within:g} s, and none has arrived"


def _inputs(operator: Operator) -> list[dict[str, Any]]:
    shapes = [*operator.shapes, *[None] * (len(operator.inputs) - len(operator.shapes))]
    return [_input(reading, shape) for reading, shape in zip(operator.inputs, shapes, strict=False)]


def _input(reading: Reading, shape: tuple[int, ...] | None) -> dict[str, Any]:
    has_number = reading.state in (State.FINITE, State.NOT_FLOAT)
    return {
        "label": reading.label,
        "shape": None if shape is None else list(shape),
        "dtype": reading.dtype,
        "abs_max": _finite(reading.abs_max) if has_number else None,
        "state": _state(reading.state),
    }


def _finite(value: float) -> float | None:
    """What a rank calls finite may not be: JSON has no inf."""
    return value if math.isfinite(value) else None


def _state(state: State) -> str:
    return state.name.lower()
