"""The sentences of the table of causes, if they depend on more than the rule. Each tells the evidence of a cause."""

from __future__ import annotations

from collections.abc import Sequence

from ..figures import end_of, figure
from ..types.frame import DTYPE_MAX, NON_FINITE, REDUCED, SUMMED, Frame, Kind, Phase, Reading, State
from ..types.trip import LOSS, BadWeight, Cause, Trip
from . import facts
from .facts import INPUTS, Numbers
from .operators import explain, explain_given, explain_gradient, operand
from .text import describe_module
from .weight_changes import tell

_LOSS = "look at the loss function and the loss scale"


def weight(trip: Trip, weights: Sequence[BadWeight]) -> str:
    """Which weight was bad, and since when: of the first one. The best answer to why lies before this batch."""
    bad, spec, batch = weights[0], trip.frame.spec, trip.position.batch
    run = "backward" if spec.phase is Phase.BACKWARD else "forward"
    name, state, last = bad.reading.label, bad.reading.state.word, bad.finite_in
    is_own_buffer = bad.reading.kind is Kind.BUFFER and bad.module == spec.module
    if bad.module != spec.module:
        name += f" of {bad.module or '(root)'} ({bad.module_class})"
    if last >= batch >= 0:
        return (
            f"{name} became {state} within batch {batch}, as it was finite before in this batch: look at what writes to it"
        )
    what = f"{name} was already {state} before this {run}"
    if is_own_buffer:
        what = f"the buffer {name} is {state}: it was bad before, or this {run} made it so"
    told = tell(bad).sentence
    if told:
        seen = f"; last seen finite in batch {last}, bad in batch {batch}" if last >= 0 else ""
        return f"{what}{seen}: {told}"
    if last >= 0:
        steps = f"optimizer step of batch {last}" if batch - last == 1 else f"optimizer steps from batch {last} on"
        return f"{what}; last seen finite in batch {last}, bad in batch {batch}: look at the gradients and the {steps}"
    if is_own_buffer:
        return what
    since = "it was never seen finite" if trip.optimizer_step else "no optimizer step was seen before it"
    return f"{what}, and {since}: look at the initialisation or the checkpoint"


def uninitialised(trip: Trip) -> str:
    """A weight that no code has set: memory as it was."""
    spec, reading = facts.uninitialised(trip)[0]
    holds = f"{reading.label} of {describe_module(spec)} holds {figure(reading.abs_max)} before any optimizer step was seen"
    return f"{holds}: it was never initialised (torch.empty, to_empty(), or a key that the checkpoint does not have)"


def unfound(trip: Trip, how: str = "") -> str:
    """A bad gradient whose origin the gradient guard did not find."""
    what = f"the {trip.culprit.label} was {trip.culprit.state.word} before the optimizer step, which was not taken"
    term = (
        "by a way that does not lead through the model's outputs, such as a term of the loss that is made of the parameters"
    )
    way = ""
    if trip.received:
        way = f": {how}it came from another rank, or {term}"
    elif trip.collective:  # what all ranks said, put together
        way = (
            f", and so was each other rank's: {how}made after the backwards, by the reduction ({trip.collective}), or by code "
            f"that changes .grad; or {term}"
        )
    return f"{what}; {trip.unfound}{way}{scale(trip)}"


def scale(trip: Trip) -> str:
    """The end of a sentence about a loss or a gradient: what is known of the loss scale."""
    text = f"; the loss scale was {trip.loss_scale:g}" if trip.loss_scale else ""
    if trip.bad_since >= 0:
        text += f"; the loss scaler has skipped steps without a break since batch {trip.bad_since}, for what was not finite"
    return text


def summed(trip: Trip) -> str:
    label, dtype = trip.culprit.label.removesuffix(SUMMED), trip.culprit.dtype
    what = f"the {label} of each forward in this step was finite, and their sum is {trip.culprit.state.word}"
    end = f": {dtype} ends at {end_of(dtype)}" if dtype in DTYPE_MAX else ""
    return f"{what}{end}{scale(trip)}"


def reduced(trip: Trip) -> str:
    label = trip.culprit.label.removesuffix(REDUCED)
    what = f"this rank's {label} was finite, and {trip.culprit.state.word} after it was reduced over the ranks"
    return f"{what}: the sum is beyond the dtype of the reduction, unless another rank's was bad"


def loss_of_bad(trip: Trip) -> str:
    bad = facts.bad_root_outputs(trip)[0]
    return f"the model's {bad.label} was {bad.state.word}, and the loss was made from it{scale(trip)}"


def loss(trip: Trip, why: str = "") -> str:
    """A bad loss that was made from finite outputs."""
    finite = [r.abs_max for r in facts.root_outputs(trip) if r.state is State.FINITE]
    model = "the model's output is not at hand"
    if not finite and facts.root_outputs(trip):
        model = "the code writes an inf into the model's output"
    if finite:
        outputs = "output was finite (" if len(finite) == 1 else "outputs were finite (largest "
        model = f"the model's {outputs}abs max {figure(max(finite))})"
    elif any(r.state is State.SEEN_FINITE for r in facts.root_outputs(trip)):
        model = "the model's output was finite"
    evidence = "; ".join(filter(None, (model, why or by_operator(trip)[1])))
    return f"{evidence}: look at the loss function, its targets, and what it divides by{scale(trip)}"


def by_operator(trip: Trip) -> tuple[Cause, str]:
    """The cause that the trip's operator tells, and its evidence; no evidence if the operator is not known."""
    if trip.operator is None:
        return Cause.UNEXPLAINED, ""
    cause, evidence, _ = explain(trip.operator)
    if trip.operator.output.state is not trip.culprit.state:
        evidence += f"; it made the {trip.culprit.label} {trip.culprit.state.word}"
    if facts.is_root_alone(trip):
        evidence += "; found by repeating the whole forward, whose modules were not measured (every=K)"
    return cause, evidence


def combined(trip: Trip) -> str:
    """What a loss combined a finite output with."""
    operator, bad = trip.operator, facts.given_bad(trip)[0]
    assert operator is not None
    return f"{operator.title} was given {bad.state.word} as its {operand(bad)}, which the model did not make"


def given(trip: Trip) -> str:
    """What the trip's operator was given; empty if it is not known."""
    return explain_given(trip.operator) if trip.operator is not None else ""


def outside(trip: Trip) -> str:
    """A module that is no part of the model, and ran before it."""
    assert trip.outside is not None
    spec = trip.outside.spec
    bad = next(one for one in trip.outside.readings if one.kind is Kind.OUTPUT and one.state in NON_FINITE)
    who = f"{describe_module(spec)}, which is not trained and ran before"
    given = next((one for one in trip.outside.readings if one.kind in INPUTS and one.state in NON_FINITE), None)
    if given is not None:
        return f"{given.label} of {who}, was {given.state.word}, and so was what it returned"
    finite = [one.abs_max for one in trip.outside.readings if one.kind in INPUTS and one.state is State.FINITE]
    largest = f" (abs max {figure(max(finite))})" if finite else ""
    how = (
        f": {explain(trip.operator)[1]}" if trip.operator is not None else f", though what it was given was finite{largest}"
    )
    return f"{who}, returned {bad.state.word} ({bad.label}, {bad.dtype}){how}"


def data(trip: Trip) -> str:
    """An input of the root module; where the training calls the model's modules directly, of the first one that it called."""
    bad = facts.bad_root_inputs(trip)[0]
    what = f"{bad.label} of the root module" if ":" not in bad.label else bad.label
    return f"{what} was {bad.state.word} before any module ran"


def changed(trip: Trip) -> str:
    bad = facts.suspects(trip)[0]
    what = f"it was finite when {trip.changed} made it, and was changed in place afterwards, unseen by autograd"
    return f"{bad.label} was {bad.state.word}: {what}"


def between(trip: Trip) -> str:
    """What was born in code between modules."""
    bad, frame = facts.suspects(trip)[0], facts.last_finite(trip)
    if bad.kind is Kind.MARKED and frame:
        return f"born between {describe_module(frame.spec)}, the last finite frame, and this mark"
    written = facts.first_written(trip)
    if written and bad.state is State.INF:
        return f"{bad.label} was inf, as the code writes an inf into the output of {describe_module(written.spec)}"
    where = f", after {describe_module(frame.spec)}, the last finite frame" if frame else ""
    return f"{bad.label} was {bad.state.word} and no watched module made it: it was born between modules{where}"


def fed(trip: Trip) -> str:
    """The root alone was measured: whether what it was fed was finite."""
    unmeasured = [r.label for r in trip.root_inputs if r.state is State.UNMATERIALISED]
    bad = [r.label for r in trip.root_inputs if r.state in NON_FINITE]
    text = "what the root module was fed was finite"
    if unmeasured:
        text = f"{', '.join(unmeasured[:3])} of the root module could not be measured, what else it was fed was finite"
    elif bad:
        text += f" but for {', '.join(bad[:3])}, as in good batches"
    return f"{text}; the modules in it were not measured in this batch (every=K)"


def finite(trip: Trip, but: str = "") -> str:
    """That inputs and weights were finite, as far as they were measured, and how near to the end the largest one is."""
    rows = [r for r in trip.frame.readings if r.kind in (Kind.PARAMETER, Kind.BUFFER, *INPUTS)]
    unmeasured = [r.label for r in rows if r.state is State.UNMATERIALISED]
    masks = [r.label for r in rows if r.state in NON_FINITE]
    text = "inputs and weights were finite"
    if unmeasured:
        text = f"{', '.join(unmeasured[:3])} could not be measured, and the other inputs and weights were finite"
    elif any(r.state is State.NOT_A_TENSOR for r in rows):
        text = "all measured inputs and weights were finite"
    if masks:
        known = all(f"{trip.frame.spec.module}:{label}" in trip.harmless for label in masks)
        text += f" but for {', '.join(masks[:3])}, {'as in good batches' if known else 'a mask'}"
    largest = Numbers(trip).largest
    return f"{text}{but}; {_name(largest[0])} {_share(*largest)}" if largest else f"{text}{but}"


def product(trip: Trip) -> str:
    numbers = Numbers(trip)
    reach = ", and products such as {} * {} can reach the end".format(*map(figure, numbers.factors))
    return finite(trip) + (reach if numbers.share < 0.1 else "")


def unreached(trip: Trip, advice: str) -> str:
    """What no product of the numbers at hand explains."""
    return f"{finite(trip)}; no product of them can reach {Numbers(trip).dtype}'s end{advice}"


def _share(reading: Reading, dtype: str) -> str:
    limit = DTYPE_MAX[dtype]
    share = "less than 1%" if reading.abs_max < 0.01 * limit else f"{reading.abs_max / limit:.0%}"
    return f"abs max {figure(reading.abs_max)} is {share} of {dtype}'s max {end_of(dtype)}"


def _name(reading: Reading) -> str:
    return {Kind.PARAMETER: reading.label, Kind.OUTPUT: "a module inside made"}.get(reading.kind, "input")


def gradient(trip: Trip) -> str:
    """Where a gradient was born."""
    made = f"{explain_gradient(trip.operator).sentence}; " if trip.operator is not None else ""
    came_in, culprit = _came_in(trip), f"the {trip.culprit.label} is {trip.culprit.state.word}"
    bad = [r for r in came_in if r.state in NON_FINITE]
    if bad and trip.frame.spec.module:
        born = f"{bad[0].label} was {bad[0].state.word} already as it arrived: {_born_before(trip)}"
    elif bad and trip.operator is not None and trip.operator.module != LOSS:
        # What the loss handed over was finite, or the backward would not have been run again.
        born = f"{bad[0].label} became {bad[0].state.word} there, as the model makes another output from this one"
    elif bad:
        is_handed = bad[0].label == "grad_output"
        what = "gradient of the loss with respect to the model's output" if is_handed else bad[0].label
        born = f"the {what} was {bad[0].state.word}"
        born += "" if made else f": {_LOSS}"
    elif any(r.state is State.FINITE for r in came_in):
        largest = facts.nearest([(reading, reading.dtype) for reading in came_in])
        share = f" ({_share(*largest)})" if largest else ""
        # The gradient of a tensor is the sum over all its uses, and a residual connection is a second use.
        is_summed = trip.culprit.kind is Kind.GRAD_INPUT
        where = (
            "this module's backward, unless its input is used elsewhere, too" if is_summed else "the backward of this module"
        )
        born = f"born in {where}: the gradient that came in was finite{share}, {culprit}"
    else:
        born = f"{culprit}: {_born_before(trip)}"
    return made + born + scale(trip)


def _came_in(trip: Trip) -> list[Reading]:
    """The gradients that the culprit's module received. A parameter's gradient is a frame apart from its module's call."""
    own = [frame for frame in _backwards(trip) if frame.spec.module == trip.frame.spec.module]
    received = ([r for r in frame.readings if r.kind is Kind.GRAD_OUTPUT] for frame in (trip.frame, *own))
    return next(filter(None, received), [])


def _born_before(trip: Trip) -> str:
    here = describe_module(trip.frame.spec)
    for frame in _backwards(trip):
        gradients = [r for r in frame.readings if r.kind in facts.GRADIENTS]
        states = {r.state for r in gradients}
        if State.FINITE not in states or not states.isdisjoint(NON_FINITE):
            continue
        if frame.spec.module == trip.frame.spec.module:
            return f"born in the backward of this module, whose {gradients[0].label} was finite"
        return f"born between {describe_module(frame.spec)}, the last module whose gradients were finite, and {here}"
    return f"born between the loss and {here}, as no backward frame at hand has finite gradients: {_LOSS}"


def _backwards(trip: Trip) -> list[Frame]:
    """The frames of this backward before the tripped one, the last one first."""
    return [frame for frame in reversed(facts.earlier(trip)) if frame.spec.phase is Phase.BACKWARD]


def by_other_code(trip: Trip) -> str:
    """Of a weight that other code than an optimizer's step makes larger."""
    grown = trip.grown
    assert grown is not None
    reach = max(1, trip.position.batch - grown.batch) * trip.reach
    changes = (
        f"its optimizer changes it by {figure(reach)} at most in that time" if reach else "no optimizer's step does that"
    )
    where = f"{grown.label} of {grown.module or '(root)'} ({grown.module_class})"
    went = f"{where} went from {figure(grown.before)} in batch {grown.batch} to {figure(grown.now)}"
    return f"{went}, and {changes}: other code writes to the weights"
