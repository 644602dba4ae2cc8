"""The advice of the table of causes, if it depends on more than the cause; so for its action. A close-up may know more."""

from __future__ import annotations

from ..types.action import Action
from ..types.closeup import CloseUp
from ..types.frame import NARROW_DTYPES, NON_FINITE, Kind, State
from ..types.trip import LOSS, OVERWRITTEN, Cause, Operator, Trip
from .facts import INPUTS, bad_root_inputs, is_grown_by_other_code
from .operators import COMPUTED, explain, explain_gradient
from .text import describe_position
from .weight_changes import tell

OPERANDS = "targets, labels, class weights, what a teacher made"
"""What a loss combines the model's output with."""

SHARD = "this rank's shard of the data, or in the code that makes it"
ALL_SHARDS = "what all ranks read: it is not one shard, so look at how the data are made, scaled and collated"

_PRODUCTS = (
    "Linear", "Bilinear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
)  # fmt: skip
"""Modules whose backward has no operator with an infinite slope."""

_COMMUNICATES = "not run again: it communicates"
"""Why the guard did not find a gradient: no rank runs a forward of FSDP again by itself."""

_SINCE = "look at the gradients and optimizer steps since it was last finite; if it never was, at the checkpoint"


def overflow(trip: Trip, closeup: CloseUp | None) -> str:
    module, operator, dtype = _module(trip), _operator(trip, closeup), trip.culprit.dtype
    precision = closeup.precision if closeup is not None else ()
    wider = [one.dtype for one in precision if one.state is State.FINITE and one.dtype != dtype]
    is_loss = trip.culprit.kind is Kind.LOSS
    if operator is not None and explain(operator).mend == COMPUTED:
        return f"{COMPUTED}, {_where(operator, 'the loss' if is_loss else module)}"
    if is_loss:
        narrow = "compute the loss in float32, or " if dtype in NARROW_DTYPES else ""
        return f"{narrow}scale or clamp the outputs that the loss is made from"
    if dtype in NARROW_DTYPES and (wider or not precision):
        if operator is not None and operator.source is not None and operator.source.function != "forward":
            place = f"{_where(operator, module)} ({operator.source.function})"
            return f"compute this in {wider[0] if wider else 'float32'} with autocast off around it, {place}"
        return f"run {module} in {wider[0] if wider else 'float32'} with autocast off around it, or train in bfloat16"
    if operator is None:
        return f'rankwatch.detect_overflow(x, "name") within the forward of {module}, to find the operation'
    return f"scale or clamp what goes into {module}; look at why it grows: learning rate, warm-up, clipping"


def singular(trip: Trip, closeup: CloseUp | None) -> str:
    return _of_operator(trip, closeup) or (
        "look at the loss function: its targets, and what it divides by or takes the log of"
        if trip.culprit.kind is Kind.LOSS
        else f"look for a division by 0, or a log or root of 0, in {_module(trip)}: add an epsilon there, or clamp what goes in"
    )


def invalid(trip: Trip, closeup: CloseUp | None) -> str:
    return _of_operator(trip, closeup) or (
        "look at the loss function: its targets, and what it divides by"
        if trip.culprit.kind is Kind.LOSS
        else f"look for 0 / 0, a root or log of a negative number, or a row that is masked throughout, in {_module(trip)}"
    )


def _of_operator(trip: Trip, closeup: CloseUp | None) -> str:
    """What the row of the operator says; empty: it is not known."""
    operator = _operator(trip, closeup)
    if operator is None:
        return ""
    return f"{explain(operator).mend}, {_where(operator, 'the loss' if trip.culprit.kind is Kind.LOSS else _module(trip))}"


def weight(trip: Trip, closeup: CloseUp | None) -> str:
    return _of_weight(trip)[0]


def after_weight(trip: Trip) -> Action:
    return _of_weight(trip)[1]


def _of_weight(trip: Trip) -> tuple[str, Action]:
    batch, seen = trip.position.batch, [one.finite_in for one in trip.weights]
    if not seen:
        return _SINCE, Action.RESTORE_CHECKPOINT
    told = tell(trip.weights[0])
    if told.mend:
        return told.mend, told.action
    if all(one.reading.kind is Kind.BUFFER for one in trip.weights):
        return "look at what updates this buffer: running statistics, an average, your own code", Action.FIX_CODE
    if min(seen) >= batch >= 0:
        return "look at what writes to it within the batch: a hook, x.data, another thread", Action.FIX_CODE
    if min(seen) >= 0 and max(seen) < batch:
        mend = "clip gradients, or lower the learning rate"
        if min(seen) == 0:  # there is nothing to go back to
            return mend, Action.FIX_CODE
        return f"load a checkpoint from before batch {min(seen)}; {mend}", Action.RESTORE_CHECKPOINT
    if max(seen) < 0 and trip.optimizer_step == 0:
        look = "torch.isfinite(...).all() of each parameter before the first batch"
        return f"check the checkpoint and the initialisation: {look}", Action.RESTORE_CHECKPOINT
    return _SINCE, Action.RESTORE_CHECKPOINT


def data(trip: Trip, closeup: CloseUp | None) -> str:
    bad = bad_root_inputs(trip)
    rows = "; rankwatch replay finds the rows" if closeup is not None and closeup.capsule else ""
    return f"look at {bad[0].label if bad else 'what'} of {describe_position(trip.position)} in {SHARD}{rows}"


def after_data(trip: Trip) -> Action:
    """Bad data from the first batch on are what the pipeline makes: there is no good batch to go on with. An eval has no step."""
    return Action.SKIP_BATCH if trip.position.batch > 0 and not trip.position.eval else Action.LOOK_AT_DATA


def data_outside(trip: Trip, closeup: CloseUp | None) -> str:
    assert trip.outside is not None
    given = next(one.label for one in trip.outside.readings if one.kind in INPUTS and one.state in NON_FINITE)
    return f"look at {given} of {trip.outside.spec.module} in {describe_position(trip.position)} in {SHARD}"


def outside(trip: Trip, closeup: CloseUp | None) -> str:
    """What helps within a module that is not trained: its precision, and what it is given."""
    assert trip.outside is not None
    name, operator = trip.outside.spec.module, _operator(trip, closeup)
    reason = explain(operator) if operator is not None else None
    bad = next(one for one in trip.outside.readings if one.kind is Kind.OUTPUT and one.state in NON_FINITE)
    is_narrow = (operator.output.dtype if operator is not None else bad.dtype) in NARROW_DTYPES
    if is_narrow and (reason is None or reason.cause is Cause.OVERFLOW):
        weights = f"call {name} in float32, with autocast off around it"
        return f"{weights}; look at whether batch {trip.position.batch} is scaled as the others"
    if reason is not None:
        return f"{reason.mend}, {_where(operator, name)}"
    return f"look at what {name} is given in batch {trip.position.batch}, and at its weights"


def upstream(trip: Trip, closeup: CloseUp | None) -> str:
    operator = _operator(trip, closeup)
    if trip.changed:
        return f"look for what changes the output of {trip.changed} in place: x.data, numpy(), another thread"
    if trip.culprit.kind is Kind.LOSS:
        return "watch all modules (no modules=) in every batch, to see which one makes the output bad"
    if trip.operator is not None:
        return "look for a tensor that the module keeps or makes by itself, and that is no parameter or buffer"
    if operator is not None:  # the close-up has found where it was born
        return f"{explain(operator).mend}, {_where(operator, operator.module or 'the root module')}"
    steps = f"each step of the code that leads to {_module(trip)}"
    return f'rankwatch.detect_overflow(x, "name") after {steps}: which one makes it?'


def gradient(trip: Trip, closeup: CloseUp | None) -> str:
    operator = _operator(trip, closeup)
    module = LOSS if operator is not None and operator.module == LOSS else _module(trip)
    reason = explain_gradient(operator) if operator is not None else None
    if operator is not None and reason is not None:
        if reason.cause is not Cause.OVERFLOW:
            return f"{reason.mend}, {_where(operator, module)}"
        narrow = "train in bfloat16, or " if operator.output.dtype in NARROW_DTYPES else ""
        return f"{narrow}scale what goes into {module} or into the loss{scale(trip)}"
    if not trip.frame.spec.module or any(r.kind is Kind.GRAD_OUTPUT and r.state in NON_FINITE for r in trip.frame.readings):
        return f"look where the cause says that it was born, and at the edges of the loss (log, sqrt, division){scale(trip)}"
    if trip.frame.spec.module_class in _PRODUCTS:
        changes = "and at what changes gradients: a communication hook, register_hook, code that writes to .grad"
        return f"the backward of {module} is a product: look at the gradient that comes into it, {changes}{scale(trip)}"
    return f"look in {module} for a sqrt, norm, log or division near 0: add an epsilon inside{scale(trip)}"


def unfound(trip: Trip) -> str:
    """Of a bad gradient whose origin the guard did not find."""
    if _COMMUNICATES in trip.unfound and not trip.gradients:
        return f"set RANKWATCH_GRADIENTS=1: each backward is measured as it runs, which names rank and module{scale(trip)}"
    if OVERWRITTEN in trip.unfound:
        return "give the model a copy: look for what writes to this memory, by NumPy, x.data or a loader that uses a buffer again"
    where = "the other ranks" if trip.received else "what changes .grad between the backward and the optimizer step"
    if trip.collective:
        where = f"{trip.collective}, at the dtype that it sums in and what it divides by, at {where}"
    return f"look at {where}, and at terms of the loss that are made of the parameters{scale(trip)}"


def other_code(trip: Trip, closeup: CloseUp | None) -> str:
    assert trip.grown is not None
    where = f"{trip.grown.label} of {trip.grown.module or 'the root module'}"
    what = "a decay of the wrong sign, an average (EMA) whose factors do not add up to 1, a projection, a clamp"
    return f"look at code that writes to {where} beside the optimizer: {what}"


def divergence(trip: Trip, closeup: CloseUp | None) -> str:
    if is_grown_by_other_code(trip):
        return other_code(trip, closeup)
    return "lower the learning rate or lengthen its warm-up, and clip gradients before optimizer.step()"


def scale(trip: Trip) -> str:
    return f", or lower the loss scale, which was {trip.loss_scale:g}" if trip.loss_scale > 1 else ""


def reduction(trip: Trip, closeup: CloseUp | None) -> str:
    wider = "reduce in float32 or bfloat16, or " if trip.culprit.dtype in NARROW_DTYPES else ""
    return f"{wider}divide by the world size before the sum, not after it; look at the other ranks' parts"


def unexplained(trip: Trip, closeup: CloseUp | None) -> str:
    machine = closeup.machine if closeup is not None and closeup.machine else "this machine"
    again = "; run the capsule again there and elsewhere" if closeup is not None and closeup.capsule else ""
    return f"train on without {machine}{again}: what never recurs is the hardware's"


def _module(trip: Trip) -> str:
    return trip.frame.spec.module or "the root module"


def _operator(trip: Trip, closeup: CloseUp | None) -> Operator | None:
    """The operator that the close-up names, else the trip's."""
    return (closeup.operator if closeup is not None else None) or trip.operator


def _where(operator: Operator | None, module: str) -> str:
    source = operator.source if operator is not None else None
    return f"at {source.file.rpartition('/')[2]}:{source.line}" if source is not None else f"in {module}"
