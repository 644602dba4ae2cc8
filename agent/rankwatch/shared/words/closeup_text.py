"""A close-up in words: the fields of a report, printed by the collector, and by an agent without a collector."""

from __future__ import annotations

import math
from shlex import quote

from ..figures import end_of, figure
from ..types.closeup import CloseUp, Precision
from ..types.frame import DTYPE_MAX, NON_FINITE, Reading, State
from ..types.trip import Cause, Operator, Trip
from .operators import explain, is_own

_MOST_INPUTS = 4

_HIGHEST = "float64"


def fields_of(cause: str, trip: Trip, closeup: CloseUp | None) -> list[tuple[str, str]]:
    """The fields from the operator to the precision, in the order of a report.

    Args:
        cause: the text of that field; empty: it is left out.
        closeup: None if there is none, or it has not arrived. Without it the trip may still name the operator.
    """
    operator = (closeup.operator if closeup is not None else None) or trip.operator
    fields = [("operator", describe_operator(operator))] if operator is not None else []
    if (made := made_between(trip, closeup)) is not None:
        reason = explain(made)
        why = reason.sentence.removesuffix(f": {reason.mend}")  # which is the advice, too
        cause = cause.replace(f"{Cause.UPSTREAM.value}: ", f"{Cause.UPSTREAM.value}: {why}; ", 1)
    fields += [("cause", cause)] if cause else []
    return fields if closeup is None else [*fields, *_findings(closeup, trip.culprit.dtype)]


def made_between(trip: Trip, closeup: CloseUp | None) -> Operator | None:
    """The operator that the close-up has found outside of the modules, of a trip that was told before it was known."""
    found = closeup.operator if closeup is not None and trip.operator is None else None
    return found if found is not None and is_own(found) else None


def replay_fields(closeup: CloseUp | None, folder: str = "", host: str = "") -> list[tuple[str, str]]:
    """The command that runs the capsule again, the last field of a report.

    Args:
        folder: the run's folder; empty: it is not known here.
        host: where a capsule outside of that folder lies; empty: on this host.
    """
    if closeup is None or not closeup.capsule:
        return []
    if closeup.capsule.startswith("/"):
        return [("replay", f"rankwatch replay {quote(closeup.capsule)}" + (f" (on {host})" if host else ""))]
    if not folder:
        return [("replay", f"{closeup.capsule} in the run's folder")]
    return [("replay", f"rankwatch replay {quote(folder)}")]


def describe_closeup(closeup: CloseUp) -> str:
    """In one line, for lists of events."""
    operator = [describe_operator(closeup.operator)] if closeup.operator is not None else []
    texts = [*operator, *(text for _, text in _findings(closeup))]
    return "; ".join(texts).replace("\n", ", ") or "nothing was run again"


def describe_operator(operator: Operator) -> str:
    """Two lines: ``aten.exp at model.py:87, in forward: e = torch.exp(scores)``; what went in, and what came out."""
    what = operator.title
    if operator.node:
        what += f" in {operator.node}"
    if operator.module:
        what += f" {'of' if operator.node else 'in'} {operator.module}"
    source = operator.source
    if source is None:
        at = f"; the line {'of its forward' if operator.node else 'that called it'} is not known"
    else:
        function = f", in {source.function}" if source.function else ""
        text = f": {source.text.strip()}" if source.text.strip() else ""
        at = f"{', the backward of' if operator.node else ' at'} {source.file}:{source.line}{function}{text}"
    shapes = operator.shapes + ((),) * (len(operator.inputs) - len(operator.shapes))
    operands = operator.operands + (None,) * len(operator.inputs)
    inputs = list(map(_describe_input, operator.inputs, shapes, operands))
    hidden = [f"{len(inputs) - _MOST_INPUTS} more"] if len(inputs) > _MOST_INPUTS else []
    given = ", ".join([*inputs[:_MOST_INPUTS], *hidden])
    flow = f"{given} -> {operator.output.state.word}" if given else f"-> {operator.output.state.word}"
    return f"{what}{at}\n{flow}"


def describe_recurrence(closeup: CloseUp) -> str:
    """``recurred 3 of 3``; what to suspect if it did not, or not always."""
    machine = f"the hardware of {closeup.machine}" if closeup.machine else "the hardware"
    counts = f"{closeup.recurred} of {closeup.of}"
    eagerly = ", run eagerly: the training runs it compiled" if closeup.is_eager else ""
    if closeup.recurred >= closeup.of:
        return f"recurred {counts}{eagerly}"
    finite = f"finite {closeup.of - closeup.recurred} of {closeup.of} times"
    if closeup.recurred:
        return f"recurred {counts}{eagerly}: suspect a race, an operator that is not deterministic, or {machine}"
    if closeup.is_eager:
        return f"did not recur eagerly ({finite}): suspect the compiled graph, or {machine}"
    unseen = "or code that was not run again, such as a global hook or another thread"
    return f"did not recur: suspect {machine} ({finite} with the same inputs), {unseen}"


def describe_precision(precision: tuple[Precision, ...], trained_in: str = "") -> str:
    """``finite in float32 and float64: abs max 120,000``, or ``bad in every precision: nan in float32 and float64``.

    ``trained_in``: the dtype of what was bad, whose end is told where it is too small for these numbers.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for one in precision:
        value = f": abs max {figure(one.abs_max)}" if one.state is State.FINITE else ""
        groups.setdefault((one.state.word, value), []).append(one.dtype)
    text = "; ".join(f"{state} in {' and '.join(dtypes)}{value}" for (state, value), dtypes in groups.items())
    largest = max((one.abs_max for one in precision if one.state is State.FINITE), default=0.0)
    if largest > DTYPE_MAX.get(trained_in, math.inf):
        text = f"{text.replace('abs max ', '')} ({trained_in} ends at {end_of(trained_in)})"
    is_bad = all(one.state in NON_FINITE for one in precision)
    has_highest = any(one.dtype == _HIGHEST for one in precision)
    return f"bad in every precision: {text}" if is_bad and has_highest else text


def _findings(closeup: CloseUp, trained_in: str = "") -> list[tuple[str, str]]:
    fields = [("recurs", describe_recurrence(closeup))] if closeup.of else []
    fields += [("precision", describe_precision(closeup.precision, trained_in))] if closeup.precision else []
    return [*fields, ("close-up", closeup.note)] if closeup.note else fields


def _describe_input(reading: Reading, shape: tuple[int, ...], operand: float | None) -> str:
    if reading.dtype == "float":  # a number, whose sign only the operand has
        sign_matters = operand is None and reading.abs_max
        return f"|{reading.label}| {reading.abs_max:,g}" if sign_matters else f"{reading.label} {operand or 0.0:,g}"
    size = f" ({', '.join(map(str, shape))})" if shape else ""
    if reading.state is State.FINITE or reading.state is State.NOT_FLOAT:
        return f"{reading.label}{size} {reading.dtype}, abs max {figure(reading.abs_max)}"
    return f"{reading.label}{size} {reading.dtype}, {reading.state.word}"
