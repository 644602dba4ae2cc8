"""The cause of a trip: a pure decision over the evidence, used by the collector, and by an agent without a collector."""

from __future__ import annotations

from collections.abc import Sequence

from .frame import DTYPE_MAX, Frame, FrameSpec, Kind, Phase, Reading, State
from .operators import explain, is_own
from .trip import BadWeight, Cause, Operator, Trip

__all__ = ["PHASE_WORDS", "BadWeight", "Cause", "Operator", "Trip", "classify", "describe_module"]


_NON_FINITE = (State.INF, State.NAN)
_INPUTS = (Kind.INPUT, Kind.KEYWORD)
_GRADIENTS = (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT, Kind.GRADIENT)


def classify(trip: Trip) -> tuple[Cause, str]:
    """The cause of a trip, and its evidence in a sentence."""
    readings = trip.frame.readings
    weights = [r for r in readings if r.kind is Kind.PARAMETER and r.state in _NON_FINITE]
    if weights:
        return Cause.WEIGHT, _weight_evidence(weights[0], trip)
    if trip.collective or trip.received:
        return _reduced(trip)
    if trip.frame.spec.phase is Phase.BACKWARD or trip.culprit.kind in _GRADIENTS:
        scale = f"; the loss scale was {trip.loss_scale:g}" if trip.loss_scale else ""
        return Cause.GRADIENT, _gradient_evidence(trip) + scale
    inputs = [r for r in readings if r.kind in _INPUTS]
    if not inputs and not trip.frame.spec.module and trip.culprit.kind is Kind.OUTPUT and trip.root_inputs:
        return _of_root_alone(trip)
    if trip.operator is not None and is_own(trip.operator):
        return _of_operator(trip.operator, trip)
    suspects = [r for r in inputs if r.state in _NON_FINITE and not _tolerated(r, trip)]
    if suspects or trip.culprit.kind is Kind.MARKED:
        return _inherited(suspects[0] if suspects else trip.culprit, trip)
    if trip.operator is not None:
        return _of_operator(trip.operator, trip)
    buffers = [r for r in readings if r.kind is Kind.BUFFER and r.state is State.NAN]
    if buffers:
        return Cause.WEIGHT, f"the buffer {buffers[0].label} is nan: it was bad before, or this forward made it so"
    largest = _largest([r for r in readings if r.kind in (Kind.PARAMETER, *_INPUTS)])
    near, too_large = _nearness(largest, trip.culprit.dtype) if largest else ("", False)
    if trip.culprit.state is State.NAN and not too_large:
        return Cause.INVALID, f"inputs and weights were finite, but the {trip.culprit.label} is nan{near}"
    return Cause.OVERFLOW, f"inputs and weights were finite{near}"


def _of_operator(operator: Operator, trip: Trip) -> tuple[Cause, str]:
    cause, evidence = explain(operator)
    same = operator.output.state is trip.culprit.state
    return cause, evidence if same else f"{evidence}; it made the {trip.culprit.label} {trip.culprit.state.name.lower()}"


def _reduced(trip: Trip) -> tuple[Cause, str]:
    if trip.received:
        return Cause.UPSTREAM, f"this rank's part was finite, and {trip.received} returned nan: another rank's part was bad"
    what = f"this rank's part was finite, and {trip.collective} returned inf"
    return Cause.REDUCTION, f"{what}: the sum over the ranks is beyond its dtype, unless another rank's part was inf"


def _of_root_alone(trip: Trip) -> tuple[Cause, str]:
    """The cause in a batch in which only the root module's inputs and outputs were measured (every=K)."""
    bad = [r for r in trip.root_inputs if r.state in _NON_FINITE]
    nans = [r for r in bad if r.state is State.NAN]
    if nans or (bad and trip.culprit.state is State.INF):
        worst = (nans or bad)[0]
        return Cause.DATA, f"{_describe_given(worst)} was {worst.state.name.lower()} before any module ran"
    cause = Cause.INVALID if trip.culprit.state is State.NAN else Cause.OVERFLOW
    return cause, "what the root module was fed was finite; the modules in it were not measured in this batch (every=K)"


def _weight_evidence(weight: Reading, trip: Trip) -> str:
    run = "backward" if trip.frame.spec.phase is Phase.BACKWARD else "forward"
    bad = f"{weight.label} was already {weight.state.name.lower()} before this {run}"
    if trip.optimizer_step == 0:
        return f"{bad}, and no optimizer step was seen before it: look at the initialisation or the checkpoint"
    return (
        f"{bad}: look at the last optimizer step, number {trip.optimizer_step - 1}, "
        f"and at the gradients of batch {trip.position.batch - 1}"
    )


def _gradient_evidence(trip: Trip) -> str:
    culprit, spec = trip.culprit, trip.frame.spec
    came_in = _came_in(trip)
    bad = [r for r in came_in if r.state in _NON_FINITE]
    if bad and not spec.module:
        state = bad[0].state.name.lower()
        return f"the gradient of the loss with respect to the model's output was {state}: {_LOSS}"
    if bad:
        return f"{bad[0].label} was {bad[0].state.name.lower()} already as it arrived: {_born_before(trip)}"
    if any(r.state is State.FINITE for r in came_in):
        largest = _largest(came_in)
        share = f" ({_share(largest, largest.dtype)})" if largest else ""
        how = f"the gradient that came in was finite{share}"
        return f"born in the backward of this module: {how}, the {culprit.label} is {culprit.state.name.lower()}"
    return f"the {culprit.label} is {culprit.state.name.lower()}: {_born_before(trip)}"


_LOSS = "look at the loss function and the loss scale"


def _came_in(trip: Trip) -> list[Reading]:
    """The gradients that the culprit's module received. A parameter's gradient is a frame apart from its module's call."""
    for frame in reversed(trip.frames):
        if frame is trip.frame or (_is_of_this_backward(frame, trip) and frame.spec.module == trip.frame.spec.module):
            found = [r for r in frame.readings if r.kind is Kind.GRAD_OUTPUT]
            if found:
                return found
    return []


def _born_before(trip: Trip) -> str:
    here = describe_module(trip.frame.spec)
    for frame in reversed(trip.frames[:-1]):
        gradients = [r for r in frame.readings if r.kind in _GRADIENTS] if _is_of_this_backward(frame, trip) else []
        states = {r.state for r in gradients}
        if State.FINITE not in states or not states.isdisjoint(_NON_FINITE):
            continue
        if frame.spec.module == trip.frame.spec.module:
            return f"born in the backward of this module, whose {gradients[0].label} was finite"
        return f"born between {describe_module(frame.spec)}, the last module whose gradients were finite, and {here}"
    return f"born between the loss and {here}, as no backward frame at hand has finite gradients: {_LOSS}"


def _is_of_this_backward(frame: Frame, trip: Trip) -> bool:
    return frame.spec.phase is Phase.BACKWARD and frame.position[:2] == trip.position[:2]


def _inherited(suspect: Reading, trip: Trip) -> tuple[Cause, str]:
    state = suspect.state.name.lower()
    bad_root = [r for r in trip.root_inputs if r.state is suspect.state]
    if bad_root:
        return Cause.DATA, f"{_describe_given(bad_root[0])} was {state} before any module ran"
    if trip.changed:
        return Cause.UPSTREAM, (
            f"{suspect.label} was {state}: it was finite when {trip.changed} made it, and was changed in place afterwards, "
            "unseen by autograd"
        )
    finite = _last_finite_frame(trip)
    if suspect.kind is Kind.MARKED and finite:
        return Cause.UPSTREAM, f"born between {describe_module(finite.spec)}, the last finite frame, and this mark"
    where = f"; the last finite frame before it is {describe_module(finite.spec)}" if finite else ""
    return (
        Cause.UPSTREAM,
        f"{suspect.label} was {state} and no watched module made it: it was born between modules{where}",
    )


def _describe_given(reading: Reading) -> str:
    """An input of the root module; where the training calls the model's modules directly, of the first one that it called."""
    return f"{reading.label} of the root module" if ":" not in reading.label else reading.label


def _tolerated(suspect: Reading, trip: Trip) -> bool:
    """Whether a module of this class had the same non-finite input before, and a finite output (as with a ``-inf`` mask)."""
    if trip.culprit.kind in _INPUTS:
        return False
    frame = trip.frame
    return any(
        reading.label == suspect.label and reading.state is suspect.state
        for earlier in trip.frames[:-1]
        if earlier.spec.module_class == frame.spec.module_class and not _bad_outputs(earlier)
        for reading in earlier.readings
        if reading.kind in _INPUTS
    )


def _bad_outputs(frame: Frame) -> bool:
    return any(reading.kind is Kind.OUTPUT and reading.state in _NON_FINITE for reading in frame.readings)


def _last_finite_frame(trip: Trip) -> Frame | None:
    """The last frame of the same batch and phase whose outputs were finite."""
    for frame in reversed(trip.frames[:-1]):
        alike = frame.position[:2] == trip.position[:2] and frame.spec.phase is trip.frame.spec.phase
        if alike and not _bad_outputs(frame):
            return frame
    return None


def _largest(readings: Sequence[Reading]) -> Reading | None:
    """The finite reading nearest to the largest number of its dtype; an input before an equal weight."""
    finite = [r for r in readings if r.state is State.FINITE and r.dtype in DTYPE_MAX]
    return max(finite, key=lambda r: (r.abs_max / DTYPE_MAX[r.dtype], r.kind), default=None)


def _nearness(largest: Reading, output_dtype: str) -> tuple[str, bool]:
    """How near a reading is to the largest number of the dtype in which the module computes, and whether it is larger.

    Under autocast a module computes in a narrower dtype than its inputs have: in that of its output.
    """
    dtype = min((largest.dtype, output_dtype), key=lambda name: DTYPE_MAX.get(name, float("inf")))
    what = "input" if largest.kind in _INPUTS else largest.label
    return f"; {what} {_share(largest, dtype)}", largest.abs_max > DTYPE_MAX[dtype]


def _share(reading: Reading, dtype: str) -> str:
    limit = DTYPE_MAX[dtype]
    share = "less than 1%" if reading.abs_max < 0.01 * limit else f"{reading.abs_max / limit:.0%}"
    return f"abs max {reading.abs_max:.2e} is {share} of {dtype}'s max {limit:.2e}"


PHASE_WORDS = {Phase.RECOMPUTE: "recomputed", Phase.BACKWARD: "backward"}
"""The mark of a frame that is no plain forward."""


def describe_module(spec: FrameSpec) -> str:
    """The module as reports name it: qualified name (``(root)`` for the root), class, further names, phase."""
    aliases = f", also {', '.join(spec.aliases)}" if spec.aliases else ""
    phase = f", {PHASE_WORDS[spec.phase]}" if spec.phase in PHASE_WORDS else ""
    return f"{spec.module or '(root)'} ({spec.module_class}{aliases}{phase})"
