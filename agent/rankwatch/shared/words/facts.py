"""What the rules of the causes ask of a trip."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..types.frame import ALL_FINITE, DTYPE_MAX, NON_FINITE, Frame, FrameSpec, Kind, Phase, Reading, State
from ..types.trip import BadWeight, Trip
from .operators import is_own

INPUTS = (Kind.INPUT, Kind.KEYWORD)
GRADIENTS = (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT, Kind.GRADIENT)

_NARROW = 1e6
"""In a dtype that ends before, a sum alone may overflow."""

_NEVER = 1e8
"""No initialisation makes such a number; memory that nobody has written to mostly holds one, beside small ones."""

_SUMMANDS = {State.INF: 1024, State.NAN: 16}
"""So many products may be added up in one element, as in a matmul."""


def is_loss(trip: Trip) -> bool:
    return trip.culprit.kind is Kind.LOSS


def is_nan(trip: Trip) -> bool:
    return trip.culprit.state is State.NAN


def is_made_here(trip: Trip) -> bool:
    """Whether an operator of the module is the origin, whatever came into the module."""
    return trip.operator is not None and is_own(trip.operator) and trip.culprit.kind is not Kind.MARKED


def is_given_nan(trip: Trip) -> bool:
    """Whether the trip's operator was given nan, other than by a constant of the code."""
    inputs = trip.operator.inputs if trip.operator is not None else ()
    return any(reading.state is State.NAN and reading.dtype != "float" for reading in inputs)


def given_bad(trip: Trip) -> list[Reading]:
    """What the trip's operator was given that was not finite, other than constants of the code."""
    inputs = trip.operator.inputs if trip.operator is not None else ()
    return [reading for reading in inputs if reading.state in NON_FINITE and reading.dtype != "float"]


def is_given_bad(trip: Trip) -> bool:
    """Whether the trip's operator made nothing bad of finite numbers: it was given what was bad, masks of -inf aside."""
    return bool(given_bad(trip)) and trip.operator is not None and not is_own(trip.operator)


def is_backward(trip: Trip) -> bool:
    return trip.frame.spec.phase is Phase.BACKWARD or trip.culprit.kind in GRADIENTS


def is_root_alone(trip: Trip) -> bool:
    """Whether the culprit is an output of the root, in a batch in which only the root's inputs and outputs were measured."""
    is_output = not trip.frame.spec.module and trip.culprit.kind is Kind.OUTPUT
    return is_output and bool(trip.root_inputs) and not any(r.kind in INPUTS for r in trip.frame.readings)


def earlier(trip: Trip) -> list[Frame]:
    """The frames of this batch before the tripped one."""
    return [frame for frame in trip.frames[:-1] if frame.position[:2] == trip.position[:2]]


def suspects(trip: Trip) -> list[Reading]:
    """What came into the module and was bad, masks of -inf and the like aside. Without any, the culprit if it is a mark."""
    bad = [r for r in trip.frame.readings if r.kind in INPUTS and r.state in NON_FINITE and not _is_tolerated(r, trip)]
    return bad or ([trip.culprit] if trip.culprit.kind is Kind.MARKED else [])


def bad_root_inputs(trip: Trip) -> list[Reading]:
    """The inputs of the root in this batch that were not finite, without masks. Those in the culprit's state come first."""
    bad = [r for r in trip.root_inputs if r.state in NON_FINITE and not _is_harmless_at_root(r, trip)]
    return sorted(bad, key=lambda reading: reading.state is not trip.culprit.state)


def was_given_bad(frame: Frame) -> bool:
    return any(reading.kind in INPUTS and reading.state in NON_FINITE for reading in frame.readings)


def last_finite(trip: Trip) -> Frame | None:
    """The last frame of the same batch and phase whose outputs were measured, and finite."""
    for frame in reversed(earlier(trip)):
        made = {r.state for r in frame.readings if r.kind in (Kind.OUTPUT, Kind.MARKED)}
        is_finite = not made.isdisjoint(ALL_FINITE) and made.isdisjoint((*NON_FINITE, State.UNMATERIALISED))
        if is_finite and frame.spec.phase is trip.frame.spec.phase:
            return frame
    return None


def first_written(trip: Trip) -> Frame | None:
    """The first frame of the same batch with an inf in its output, which did not trip: the code writes it."""
    return next((one for one in earlier(trip) if any(map(_is_made_inf, one.readings))), None)


def _is_made_inf(reading: Reading) -> bool:
    return reading.kind in (Kind.OUTPUT, Kind.MARKED) and reading.state is State.INF


def _is_tolerated(suspect: Reading, trip: Trip) -> bool:
    """Whether a module of this class had the same non-finite input before, and a finite output (as with a ``-inf`` mask)."""
    if trip.culprit.kind in INPUTS:
        return False
    spec = trip.frame.spec
    if f"{spec.module}:{suspect.label}" in trip.harmless or _is_mask(suspect):
        return True
    return any(
        reading.label == suspect.label and reading.state is suspect.state
        for frame in trip.frames[:-1]
        if frame.spec.module_class == spec.module_class and not _has_bad_output(frame)
        for reading in frame.readings
        if reading.kind in INPUTS
    )


def _is_harmless_at_root(reading: Reading, trip: Trip) -> bool:
    """Whether good batches had it as well, or it is inf and looks like a mask, or modules took it in before."""
    if reading.label in trip.harmless:
        return True
    if reading.state is not State.INF:
        return False
    return _is_mask(reading) or any(not _has_bad_output(frame) and _took_in(frame, reading) for frame in earlier(trip))


def _is_mask(reading: Reading) -> bool:
    """Whether it looks like a mask that is added to scores: 0 and -inf."""
    return reading.state is State.INF and reading.abs_min == 0 and "mask" in reading.label.lower()


def _has_bad_output(frame: Frame) -> bool:
    return any(reading.kind is Kind.OUTPUT and reading.state in NON_FINITE for reading in frame.readings)


def _took_in(frame: Frame, reading: Reading) -> bool:
    numbers = reading.dtype, reading.abs_min, reading.state
    return any(one.kind in INPUTS and (one.dtype, one.abs_min, one.state) == numbers for one in frame.readings) and any(
        one.kind is Kind.OUTPUT and one.state is State.FINITE for one in frame.readings
    )


def own_parameters(trip: Trip) -> list[BadWeight]:
    """The module's parameters that were bad as it was called."""
    spec, known = trip.frame.spec, {(one.module, one.reading.label): one for one in reversed(trip.weights)}
    bad = [r for r in trip.frame.readings if r.kind is Kind.PARAMETER and r.state in NON_FINITE]
    bad = [r for r in bad if r.state is State.NAN or f"{spec.module}:{r.label}" not in trip.harmless]
    return [known.get((spec.module, r.label)) or BadWeight(spec.module, spec.module_class, r, -1) for r in bad]


def uninitialised(trip: Trip) -> list[tuple[FrameSpec, Reading]]:
    """Parameters of this forward that were finite and far from any that an initialisation makes, before the first step."""
    if trip.optimizer_step:
        return []
    frames = [*earlier(trip), trip.frame]
    known = [(frame.spec, r) for frame in frames for r in frame.readings if r.kind is Kind.PARAMETER]
    return [(spec, r) for spec, r in known if r.state is State.FINITE and r.abs_max >= _NEVER > r.abs_min]


def weights_within(trip: Trip) -> list[BadWeight]:
    """The bad weights of the module, and of those below it. Without any: its buffers that are nan, maybe by this call."""
    spec, buffers = trip.frame.spec, [r for r in trip.frame.readings if r.kind is Kind.BUFFER and r.state is State.NAN]
    within = [weight for weight in trip.weights if _is_within(weight, spec.module)]
    return within or [BadWeight(spec.module, spec.module_class, reading, -1) for reading in buffers]


def parameters_within(trip: Trip) -> list[BadWeight]:
    return [weight for weight in weights_within(trip) if weight.reading.kind is Kind.PARAMETER]


def _is_within(weight: BadWeight, module: str) -> bool:
    """Whether the weight is the module's own, of a module below it, or FSDP's flat one of a unit around it."""
    if weight.reading.label.startswith("_flat_param") and (not weight.module or module.startswith(f"{weight.module}.")):
        return True
    return not module or weight.module == module or weight.module.startswith(f"{module}.")


def root_outputs(trip: Trip) -> list[Reading]:
    """What the root returned in this batch, finite or not."""
    frames = [one for one in earlier(trip) if not one.spec.module and one.spec.phase is Phase.FORWARD]
    return [r for frame in frames[-1:] for r in frame.readings if r.kind is Kind.OUTPUT]


def bad_root_outputs(trip: Trip) -> list[Reading]:
    """Without those in which the code itself writes an inf."""
    return [r for r in root_outputs(trip) if r.state in NON_FINITE and not _is_meant(r, trip)]


def _is_meant(reading: Reading, trip: Trip) -> bool:
    return reading.state is State.INF and f":{reading.label}" in trip.harmless


def has_moderate_outputs(trip: Trip) -> bool:
    """Whether no exp of a finite output of the root, and no sum of many such exps, comes near to the end of its dtype."""
    finite = [(r.abs_max, DTYPE_MAX.get(r.dtype, 2.0)) for r in root_outputs(trip) if r.state is State.FINITE]
    return bool(finite) and all(end > _NARROW and largest < math.log(end) / 2 for largest, end in finite)


class Numbers:
    """The finite numbers that a culprit was made of. Readings have extremes, no values: what they say is likely.

    Attributes:
        dtype: in which the culprit was computed.
        inputs: the finite inputs of the module, and the finite outputs of the modules inside.
        largest: the number that is nearest to the end of its dtype; None: no number is known, or the dtype has no end.
    """

    def __init__(self, trip: Trip) -> None:
        readings, module = trip.frame.readings, trip.frame.spec.module
        own = [r for r in readings if r.state is State.FINITE and r.dtype in DTYPE_MAX]
        inside = [
            frame for frame in earlier(trip)
            if frame.spec.phase is not Phase.BACKWARD and frame.spec.module != module
            and (not module or frame.spec.module.startswith(f"{module}."))
        ]  # fmt: skip
        self.inputs = [r for r in own if r.kind in INPUTS]
        self.inputs += [r for f in inside for r in f.readings if r.kind is Kind.OUTPUT and r.state is State.FINITE]
        weights = [r for r in own if r.kind is Kind.PARAMETER]
        # Under autocast a module computes in a narrower dtype than its inputs have: in that of its output.
        self.dtype = min(
            [trip.culprit.dtype, *(r.dtype for r in readings if r.kind in INPUTS and r.dtype in DTYPE_MAX)], key=_end
        )
        found = nearest([(r, min(r.dtype, self.dtype, key=_end)) for r in [*self.inputs, *weights]])
        self.largest = found if self.dtype in DTYPE_MAX else None
        self.share = found[0].abs_max / _end(found[1]) if found and self.largest else 0.0
        # A forward may multiply an input with itself, or with a weight.
        highest = max((r.abs_max for r in self.inputs), default=1.0)
        self.factors = highest, max([highest, *(r.abs_max for r in weights)])
        self._summands = _SUMMANDS.get(trip.culprit.state, 1)
        self.has_zero = any(r.abs_min == 0 for r in [*self.inputs, *weights])

    def can_multiply_past_end(self) -> bool:
        return self.largest is not None and math.prod(self.factors) * self._summands >= _end(self.dtype)

    def can_exp_pass_end(self) -> bool:
        return max((r.abs_max for r in self.inputs), default=0.0) >= 0.99 * math.log(_end(self.dtype))


def nearest(readings: Sequence[tuple[Reading, str]]) -> tuple[Reading, str] | None:
    """The finite reading nearest to the largest number of the dtype beside it; an input before an equal weight."""
    finite = [(r, dtype) for r, dtype in readings if r.state is State.FINITE and dtype in DTYPE_MAX]
    return max(finite, key=lambda one: (one[0].abs_max / DTYPE_MAX[one[1]], one[0].kind), default=None)


def _end(dtype: str) -> float:
    return DTYPE_MAX.get(dtype, math.inf)


def is_grown_by_other_code(trip: Trip) -> bool:
    """Whether the largest weight has grown by far more than the steps of its optimizer can have changed it."""
    grown = trip.grown
    if grown is None or trip.reach < 0:
        return False
    steps = max(1, trip.position.batch - grown.batch)
    return grown.now - grown.before > _BEYOND * steps * trip.reach


_BEYOND = 8.0
"""Times the largest change of a step that is known: the gradients of the steps before may have been larger."""
