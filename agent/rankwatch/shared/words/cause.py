"""The cause of a trip: a pure decision over the evidence, used by the collector, and by an agent without a collector."""

from __future__ import annotations

import math

from ..types.frame import DTYPE_MAX, REDUCED, Frame, FrameSpec, Kind, Phase, Reading, State
from ..types.trip import BadWeight, Cause, Operator, Trip
from .born_here import born_here, describe_share, fed, nearest
from .operators import explain, explain_given, explain_gradient, is_own

__all__ = ["PHASE_WORDS", "BadWeight", "Cause", "Operator", "Trip", "bad_root_inputs", "classify", "describe_module"]


_NON_FINITE = (State.INF, State.NAN)
_INPUTS = (Kind.INPUT, Kind.KEYWORD)
_GRADIENTS = (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT, Kind.GRADIENT)


def classify(trip: Trip) -> tuple[Cause, str]:
    """The cause of a trip, and its evidence in a sentence."""
    readings = trip.frame.readings
    weights = [r for r in readings if r.kind is Kind.PARAMETER and r.state in _NON_FINITE]
    if weights:
        return Cause.WEIGHT, _weight_evidence(_known_weight(weights[0], trip), trip)
    if trip.unfound:
        return _of_unfound(trip)
    if trip.collective or trip.received or trip.culprit.label.endswith(REDUCED):
        return _reduced(trip)
    if trip.culprit.kind is Kind.LOSS:
        cause, evidence = _of_loss(trip)
        return cause, evidence + _of_scale(trip)
    if trip.frame.spec.phase is Phase.BACKWARD or trip.culprit.kind in _GRADIENTS:
        made = f"{explain_gradient(trip.operator)}; " if trip.operator is not None else ""
        return Cause.GRADIENT, made + _gradient_evidence(trip) + _of_scale(trip)
    inputs = [r for r in readings if r.kind in _INPUTS]
    if not inputs and not trip.frame.spec.module and trip.culprit.kind is Kind.OUTPUT and trip.root_inputs:
        return _of_root_alone(trip)
    if trip.operator is not None and is_own(trip.operator) and trip.culprit.kind is not Kind.MARKED:
        return _of_operator(trip.operator, trip)
    within = [weight for weight in trip.weights if _is_within(weight, trip)]
    parameters = [weight for weight in within if weight.reading.kind is Kind.PARAMETER]
    if parameters:
        return Cause.WEIGHT, _weight_evidence(parameters[0], trip)
    suspects = [r for r in inputs if r.state in _NON_FINITE and not _tolerated(r, trip)]
    if suspects or trip.culprit.kind is Kind.MARKED:
        return _inherited(suspects[0] if suspects else trip.culprit, trip)
    buffers = [r for r in readings if r.kind is Kind.BUFFER and r.state is State.NAN]
    if buffers and not within:
        within = [BadWeight(trip.frame.spec.module, trip.frame.spec.module_class, buffers[0], -1)]
    if within:
        return Cause.WEIGHT, _weight_evidence(within[0], trip)
    if trip.operator is not None:
        return explain_given(trip.operator) if _was_given_nan(trip.operator) else _of_operator(trip.operator, trip)
    return born_here(trip)


def _was_given_nan(operator: Operator) -> bool:
    return any(reading.state is State.NAN and reading.dtype != "float" for reading in operator.inputs)


def _of_operator(operator: Operator, trip: Trip) -> tuple[Cause, str]:
    cause, evidence = explain(operator)
    same = operator.output.state is trip.culprit.state
    return cause, evidence if same else f"{evidence}; it made the {trip.culprit.label} {trip.culprit.state.name.lower()}"


def _reduced(trip: Trip) -> tuple[Cause, str]:
    culprit = trip.culprit
    if culprit.label.endswith(REDUCED):
        state = culprit.state.name.lower()
        what = (
            f"this rank's {culprit.label.removesuffix(REDUCED)} was finite, and {state} after it was reduced over the ranks"
        )
        return Cause.REDUCTION, f"{what}: the sum is beyond the dtype of the reduction, unless another rank's was bad"
    if trip.received:
        return Cause.UPSTREAM, f"this rank's part was finite, and {trip.received} returned nan: another rank's part was bad"
    what = f"this rank's part was finite, and {trip.collective} returned inf"
    return Cause.REDUCTION, f"{what}: the sum over the ranks is beyond its dtype, unless another rank's part was inf"


def _of_loss(trip: Trip) -> tuple[Cause, str]:
    """The cause of a bad loss, which the user's code computes from what the root returned."""
    batch = trip.position[:2]
    frames = [f for f in trip.frames[:-1] if f.position[:2] == batch and not f.spec.module and f.spec.phase is Phase.FORWARD]
    outputs = [r for frame in frames[-1:] for r in frame.readings if r.kind is Kind.OUTPUT]
    bad = [r for r in outputs if r.state in _NON_FINITE]
    if bad:
        return Cause.UPSTREAM, f"the model's {bad[0].label} was {bad[0].state.name.lower()}, and the loss was made from it"
    if trip.weights:
        return Cause.WEIGHT, _weight_evidence(trip.weights[0], trip)
    cause, evidence = _of_operator(trip.operator, trip) if trip.operator is not None else (None, "")
    finite = [r for r in outputs if r.state is State.FINITE]
    if cause is None:
        cause = Cause.INVALID if trip.culprit.state is State.NAN else Cause.OVERFLOW
        if cause is Cause.OVERFLOW and finite and not trip.loss_scale and all(_is_moderate(reading) for reading in finite):
            cause, evidence = (
                Cause.SINGULAR,
                "no exp or product of such numbers is inf: a log of 0 or a division by zero is likely",
            )
    if not finite:
        model = "the model's output is not at hand"
    elif len(finite) == 1:
        model = f"the model's output was finite (abs max {finite[0].abs_max:.2e})"
    else:
        model = f"the model's outputs were finite (largest abs max {max(r.abs_max for r in finite):.2e})"
    advice = "look at the loss function, its targets, and what it divides by"
    return cause, "; ".join(filter(None, (model, evidence))) + f": {advice}"


def _is_moderate(reading: Reading) -> bool:
    """Whether the square of its exponential is still far from the end of its dtype, and so is a sum of many such numbers."""
    limit = DTYPE_MAX.get(reading.dtype, 2.0)
    return limit > _NARROW and reading.abs_max < math.log(limit) / 2


_NARROW = 1e6
"""In a dtype that ends before, a sum alone may overflow."""


def _of_scale(trip: Trip) -> str:
    text = f"; the loss scale was {trip.loss_scale:g}" if trip.loss_scale else ""
    if trip.bad_since >= 0:
        text += f"; the loss scaler has skipped steps without a break since batch {trip.bad_since}, for what was not finite"
    return text


def _of_root_alone(trip: Trip) -> tuple[Cause, str]:
    """The cause in a batch in which only the root module's inputs and outputs were measured (every=K)."""
    bad = bad_root_inputs(trip)
    if trip.operator is not None and is_own(trip.operator):
        cause, evidence = _of_operator(trip.operator, trip)
        return cause, f"{evidence}; found by repeating the whole forward, whose modules were not measured (every=K)"
    if bad:
        return Cause.DATA, _data_evidence(bad[0])
    if trip.weights:
        return Cause.WEIGHT, _weight_evidence(trip.weights[0], trip)
    cause = Cause.INVALID if trip.culprit.state is State.NAN else Cause.OVERFLOW
    return cause, f"{fed(trip)}; the modules in it were not measured in this batch (every=K)"


def bad_root_inputs(trip: Trip) -> list[Reading]:
    """What the root was fed in this batch and was not finite, those with the culprit's state first, without masks."""
    bad = [r for r in trip.root_inputs if r.state in _NON_FINITE and not _is_harmless_at_root(r, trip)]
    return sorted(bad, key=lambda reading: reading.state is not trip.culprit.state)


def _is_harmless_at_root(reading: Reading, trip: Trip) -> bool:
    """Whether good batches had it as well, or it is inf and looks like a mask, or modules took it in before."""
    if reading.label in trip.harmless:
        return True
    if reading.state is not State.INF:
        return False
    return is_mask(reading) or any(
        frame.position[:2] == trip.position[:2] and not _bad_outputs(frame) and _took_in(frame, reading)
        for frame in trip.frames[:-1]
    )


def is_mask(reading: Reading) -> bool:
    """Whether it looks like a mask that is added to scores: 0 and -inf."""
    return reading.state is State.INF and reading.abs_min == 0 and "mask" in reading.label.lower()


def _took_in(frame: Frame, reading: Reading) -> bool:
    numbers = reading.dtype, reading.abs_min, reading.state
    return any(one.kind in _INPUTS and (one.dtype, one.abs_min, one.state) == numbers for one in frame.readings) and any(
        one.kind is Kind.OUTPUT and one.state is State.FINITE for one in frame.readings
    )


def _data_evidence(reading: Reading) -> str:
    return f"{_describe_given(reading)} was {reading.state.name.lower()} before any module ran"


def _is_within(weight: BadWeight, trip: Trip) -> bool:
    """Whether the weight is the tripping module's own, of a module below it, or FSDP's flat one of a unit around it."""
    module = trip.frame.spec.module
    if weight.reading.label.startswith("_flat_param") and (not weight.module or module.startswith(f"{weight.module}.")):
        return True
    return not module or weight.module == module or weight.module.startswith(f"{module}.")


def _known_weight(reading: Reading, trip: Trip) -> BadWeight:
    """The bad weight that is this reading of the tripping module."""
    spec = trip.frame.spec
    same = [one for one in trip.weights if (one.module, one.reading.label) == (spec.module, reading.label)]
    return same[0] if same else BadWeight(spec.module, spec.module_class, reading, -1)


def _weight_evidence(weight: BadWeight, trip: Trip) -> str:
    """Which weight was bad, and since when. The best answer to why lies before this batch."""
    run = "backward" if trip.frame.spec.phase is Phase.BACKWARD else "forward"
    state, batch = weight.reading.state.name.lower(), trip.position.batch
    is_own = weight.module == trip.frame.spec.module
    name = weight.reading.label
    if not is_own:
        name += f" of {weight.module or '(root)'} ({weight.module_class})"
    if weight.finite_in >= batch >= 0:
        return (
            f"{name} became {state} within batch {batch}, as it was finite before in this batch: look at what writes to it"
        )
    bad = f"{name} was already {state} before this {run}"
    if weight.reading.kind is Kind.BUFFER and is_own:
        bad = f"the buffer {name} is {state}: it was bad before, or this {run} made it so"
    if weight.finite_in >= 0:
        when = f"last seen finite in batch {weight.finite_in}, bad in batch {batch}"
        is_next = batch - weight.finite_in == 1
        steps = (
            f"optimizer step of batch {weight.finite_in}" if is_next else f"optimizer steps from batch {weight.finite_in} on"
        )
        return f"{bad}; {when}: look at the gradients and the {steps}"
    if weight.reading.kind is Kind.BUFFER and is_own:
        return bad
    if trip.optimizer_step == 0:
        return f"{bad}, and no optimizer step was seen before it: look at the initialisation or the checkpoint"
    return f"{bad}, and it was never seen finite: look at the initialisation or the checkpoint"


def _of_unfound(trip: Trip) -> tuple[Cause, str]:
    """The cause where the gradient guard did not find where a gradient came from."""
    culprit = trip.culprit
    what = f"the {culprit.label} was {culprit.state.name.lower()} before the optimizer step, which was not taken"
    if not trip.received:
        return Cause.GRADIENT, f"{what}; {trip.unfound}" + _of_scale(trip)
    cause = Cause.REDUCTION if culprit.state is State.INF else Cause.GRADIENT
    how = "the sum over the ranks may be beyond its dtype, or " if cause is Cause.REDUCTION else ""
    return cause, (
        f"{what}; {trip.unfound}: {how}it came from another rank, or by a way that does not lead through the model's outputs, "
        "such as a term of the loss that is made of the parameters"
    ) + _of_scale(trip)


def _gradient_evidence(trip: Trip) -> str:
    culprit, spec = trip.culprit, trip.frame.spec
    came_in = _came_in(trip)
    bad = [r for r in came_in if r.state in _NON_FINITE]
    if bad and not spec.module:
        state = bad[0].state.name.lower()
        if trip.operator is not None:  # what the loss handed over was finite, or the backward would not have been run again
            return f"{bad[0].label} became {state} there, as the model makes another output from this one"
        return f"the gradient of the loss with respect to the model's output was {state}: {_LOSS}"
    if bad:
        return f"{bad[0].label} was {bad[0].state.name.lower()} already as it arrived: {_born_before(trip)}"
    if any(r.state is State.FINITE for r in came_in):
        largest = nearest([(reading, reading.dtype) for reading in came_in])
        share = f" ({describe_share(*largest)})" if largest else ""
        how = f"the gradient that came in was finite{share}"
        # The gradient of a tensor is the sum over all its uses, and a residual connection is a second use.
        is_summed = culprit.kind is Kind.GRAD_INPUT
        where = (
            "this module's backward, unless its input is used elsewhere, too" if is_summed else "the backward of this module"
        )
        return f"born in {where}: {how}, the {culprit.label} is {culprit.state.name.lower()}"
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
    """The cause where what came in was bad."""
    state = suspect.state.name.lower()
    bad_root = bad_root_inputs(trip)
    if bad_root:
        return Cause.DATA, _data_evidence(bad_root[0])
    if trip.changed:
        return Cause.UPSTREAM, (
            f"{suspect.label} was {state}: it was finite when {trip.changed} made it, and was changed in place afterwards, "
            "unseen by autograd"
        )
    if trip.weights:
        return Cause.WEIGHT, _weight_evidence(trip.weights[0], trip)
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
    if f"{frame.spec.module}:{suspect.label}" in trip.harmless or is_mask(suspect):
        return True
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
    """The last frame of the same batch and phase whose outputs were measured, and finite."""
    for frame in reversed(trip.frames[:-1]):
        alike = frame.position[:2] == trip.position[:2] and frame.spec.phase is trip.frame.spec.phase
        made = {r.state for r in frame.readings if r.kind in (Kind.OUTPUT, Kind.MARKED)}
        if alike and State.FINITE in made and made.isdisjoint((*_NON_FINITE, State.UNMATERIALISED)):
            return frame
    return None


PHASE_WORDS = {Phase.RECOMPUTE: "recomputed", Phase.BACKWARD: "backward"}
"""The mark of a frame that is no plain forward."""


def describe_module(spec: FrameSpec) -> str:
    """The module as reports name it: qualified name (``(root)`` for the root), class, further names, phase."""
    aliases = f", also {', '.join(spec.aliases)}" if spec.aliases else ""
    phase = f", {PHASE_WORDS[spec.phase]}" if spec.phase in PHASE_WORDS else ""
    return f"{spec.module or '(root)'} ({spec.module_class}{aliases}{phase})"
