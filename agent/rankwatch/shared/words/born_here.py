"""The cause of an inf or nan that arose in a module, inferred from its readings: where no operator is known.

Readings have extremes, no values: the answer is the likely one, and its sentence says what it rests on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..types.frame import DTYPE_MAX, Kind, Phase, Reading, State
from ..types.trip import Cause, Trip

_INPUTS = (Kind.INPUT, Kind.KEYWORD)

_SUMMANDS = {State.INF: 1024, State.NAN: 16}
"""So many products may be added up in one element, as in a matmul."""


def born_here(trip: Trip) -> tuple[Cause, str]:
    """The cause of a culprit that nothing bad went into."""
    dtype = _computed_in(trip)
    inputs, weights = _ingredients(trip)
    largest = nearest([(reading, _narrower(reading.dtype, dtype)) for reading in [*inputs, *weights]])
    clean = _describe_clean(trip)
    near = f"; {_name(largest[0])} {describe_share(*largest)}" if largest else ""
    is_nan = trip.culprit.state is State.NAN
    if largest is None or dtype not in DTYPE_MAX:
        cause = Cause.INVALID if is_nan else Cause.OVERFLOW
        return cause, f"{clean}, but the {trip.culprit.label} is nan" if is_nan else clean
    reading, limited = largest
    if reading.abs_max > DTYPE_MAX[limited]:
        return Cause.OVERFLOW, f"{clean}{near}"
    product, factors = _largest_product(inputs, weights)
    if product * _SUMMANDS.get(trip.culprit.state, 1) >= DTYPE_MAX[dtype]:
        reach = f", and products such as {factors} can reach the end" if reading.abs_max < 0.1 * DTYPE_MAX[limited] else ""
        return Cause.OVERFLOW, f"{clean}{near}{reach}"
    if trip.recurs is False:
        return Cause.UNEXPLAINED, (
            f"{clean}{near}; no product of them can reach {dtype}'s end, and the same forward, run again, was finite: suspect "
            "the hardware, or code that was not run again"
        )
    if is_nan:
        return Cause.INVALID, f"{clean}, but the {trip.culprit.label} is nan{near}"
    if not inputs:
        return Cause.OVERFLOW, f"{clean}{near}"
    if max((one.abs_max for one in inputs), default=0.0) >= 0.99 * math.log(DTYPE_MAX[dtype]):
        return Cause.OVERFLOW, f"{clean}{near}, which exp would take past the end"
    # A pole needs a zero. Else a number that no reading shows may have been multiplied in.
    has_zero = any(one.abs_min == 0 for one in (*inputs, *weights))
    return Cause.SINGULAR if has_zero else Cause.OVERFLOW, (
        f"{clean}{near}; no product of them can reach {dtype}'s end: "
        "look for a division by zero, a log of 0, or a number that is neither input nor weight"
    )


def fed(trip: Trip) -> str:
    """Whether what the root was fed was finite, in words."""
    unmeasured = [reading.label for reading in trip.root_inputs if reading.state is State.UNMATERIALISED]
    if unmeasured:
        return f"{', '.join(unmeasured[:3])} of the root module could not be measured, what else it was fed was finite"
    bad = [reading.label for reading in trip.root_inputs if reading.state in (State.INF, State.NAN)]
    but = f" but for {', '.join(bad[:3])}, as in good batches" if bad else ""
    return f"what the root module was fed was finite{but}"


def nearest(readings: Sequence[tuple[Reading, str]]) -> tuple[Reading, str] | None:
    """The finite reading nearest to the largest number of the dtype beside it; an input before an equal weight."""
    finite = [(r, dtype) for r, dtype in readings if r.state is State.FINITE and dtype in DTYPE_MAX]
    return max(finite, key=lambda one: (one[0].abs_max / DTYPE_MAX[one[1]], one[0].kind), default=None)


def describe_share(reading: Reading, dtype: str) -> str:
    limit = DTYPE_MAX[dtype]
    share = "less than 1%" if reading.abs_max < 0.01 * limit else f"{reading.abs_max / limit:.0%}"
    return f"abs max {reading.abs_max:.2e} is {share} of {dtype}'s max {limit:.2e}"


def _computed_in(trip: Trip) -> str:
    """Under autocast a module computes in a narrower dtype than its inputs have: in that of its output."""
    dtypes = [trip.culprit.dtype, *(r.dtype for r in trip.frame.readings if r.kind in _INPUTS and r.dtype in DTYPE_MAX)]
    return min(dtypes, key=lambda name: DTYPE_MAX.get(name, math.inf))


def _narrower(dtype: str, other: str) -> str:
    return min(dtype, other, key=lambda name: DTYPE_MAX.get(name, math.inf))


def _ingredients(trip: Trip) -> tuple[list[Reading], list[Reading]]:
    """The finite readings that the culprit is made of: inputs and what modules inside made of them, and weights."""
    inner = [
        frame
        for frame in trip.frames[:-1]
        if frame.position[:2] == trip.position[:2]
        and frame.spec.phase is not Phase.BACKWARD
        and frame.spec.module != trip.frame.spec.module
        and (not trip.frame.spec.module or frame.spec.module.startswith(f"{trip.frame.spec.module}."))
    ]
    own = [r for r in trip.frame.readings if r.state is State.FINITE and r.dtype in DTYPE_MAX]
    inputs = [r for r in own if r.kind in _INPUTS]
    inputs += [r for frame in inner for r in frame.readings if r.kind is Kind.OUTPUT and r.state is State.FINITE]
    weights = [r for r in own if r.kind is Kind.PARAMETER]
    return inputs, weights


def _largest_product(inputs: list[Reading], weights: list[Reading]) -> tuple[float, str]:
    """The largest product of two numbers that a forward may multiply: an input with itself, or with a weight."""
    highest = max((reading.abs_max for reading in inputs), default=1.0)
    weight = max((reading.abs_max for reading in weights), default=0.0)
    other = max(highest, weight)
    return highest * other, f"{highest:.2e} * {other:.2e}"


def _name(reading: Reading) -> str:
    return {Kind.PARAMETER: reading.label, Kind.OUTPUT: "a module inside made"}.get(reading.kind, "input")


def _describe_clean(trip: Trip) -> str:
    """That inputs and weights were finite, as far as they were measured."""
    rows = [r for r in trip.frame.readings if r.kind in (Kind.PARAMETER, Kind.BUFFER, *_INPUTS)]
    unmeasured = [r.label for r in rows if r.state is State.UNMATERIALISED]
    masks = [r.label for r in rows if r.state in (State.INF, State.NAN)]
    clean = "inputs and weights were finite"
    if unmeasured:
        clean = f"{', '.join(unmeasured[:3])} could not be measured, and the other inputs and weights were finite"
    elif any(r.state is State.NOT_A_TENSOR for r in rows):
        clean = "all measured inputs and weights were finite"
    known = all(f"{trip.frame.spec.module}:{label}" in trip.harmless for label in masks)
    return clean + (f" but for {', '.join(masks[:3])}, {'as in good batches' if known else 'a mask'}" if masks else "")
