"""The first thing to try, in one line: by the cause, and by what the report knows of the case."""

from __future__ import annotations

from ..types.closeup import CloseUp
from ..types.frame import NARROW_DTYPES, Kind, State
from ..types.trip import Cause, Operator, Trip
from .cause import bad_root_inputs
from .operators import explain

_BAD = (State.INF, State.NAN)


def advise(cause: Cause, trip: Trip, closeup: CloseUp | None) -> str:
    """It says nothing that the evidence of the cause does not bear out: where that names the place, it is left to it."""
    module = trip.frame.spec.module or "the root module"
    operator = (closeup.operator if closeup is not None else None) or trip.operator
    if cause is Cause.OVERFLOW:
        return _of_overflow(module, trip, operator, closeup)
    if cause in (Cause.SINGULAR, Cause.INVALID):
        return _of_undefined(cause, module, trip, operator)
    if cause is Cause.WEIGHT:
        return _of_weight(trip)
    if cause is Cause.DATA:
        bad = bad_root_inputs(trip)
        rows = "; rankwatch replay finds the rows" if closeup is not None and closeup.capsule else ""
        return f"look at {bad[0].label if bad else 'what'} of batch {trip.position.batch} in this rank's shard of the data{rows}"
    if cause is Cause.UPSTREAM:
        return _of_upstream(module, trip, operator)
    if cause is Cause.GRADIENT:
        return _of_gradient(module, trip, operator)
    if cause is Cause.REDUCTION:
        wider = "reduce in float32 or bfloat16, or " if trip.culprit.dtype in NARROW_DTYPES else ""
        return f"{wider}divide by the world size before the sum, not after it; look at the other ranks' parts"
    if cause is Cause.DIVERGENCE:
        return "lower the learning rate or lengthen its warm-up, and clip gradients before optimizer.step()"
    machine = closeup.machine if closeup is not None and closeup.machine else "this machine"
    again = "; run the capsule again there and elsewhere" if closeup is not None and closeup.capsule else ""
    return f"train on without {machine}{again}: what never recurs is the hardware's"


def _of_overflow(module: str, trip: Trip, operator: Operator | None, closeup: CloseUp | None) -> str:
    dtype, precision = trip.culprit.dtype, closeup.precision if closeup is not None else ()
    wider = [one.dtype for one in precision if one.state is State.FINITE and one.dtype != dtype]
    if operator is not None and not operator.inputs:
        return f"look at the numbers that the code puts there, {_where(operator, module)}"
    if trip.culprit.kind is Kind.LOSS:
        narrow = "compute the loss in float32, or " if dtype in NARROW_DTYPES else ""
        return f"{narrow}scale or clamp the outputs that the loss is made from"
    if dtype in NARROW_DTYPES and (wider or not precision):
        return f"run {module} in {wider[0] if wider else 'float32'} with autocast off around it, or train in bfloat16"
    if operator is None:
        return f'rankwatch.detect_overflow(x, "name") within the forward of {module}, to find the operation'
    return f"scale or clamp what goes into {module}; look at why it grows: learning rate, warm-up, clipping"


def _of_undefined(cause: Cause, module: str, trip: Trip, operator: Operator | None) -> str:
    if trip.culprit.kind is Kind.LOSS and operator is None:
        return "look at the loss function: its targets, and what it divides by or takes the log of"
    if cause is Cause.SINGULAR:
        return f"add an epsilon below the division, or within the root or log, {_where(operator, module)}; or clamp what goes in"
    return f"clamp what goes in, {_where(operator, module)}; leave each row of a mask one element that is not masked"


def _of_weight(trip: Trip) -> str:
    batch, seen = trip.position.batch, [weight.finite_in for weight in trip.weights]
    if trip.weights and all(weight.reading.kind is Kind.BUFFER for weight in trip.weights):
        return "look at what updates this buffer: running statistics, an average, your own code"
    if seen and all(last >= batch >= 0 for last in seen):
        return "look at what writes to it within the batch: a hook, x.data, another thread"
    if seen and all(0 <= last < batch for last in seen):
        since = f"load a checkpoint from before batch {min(seen)}"
        return f"{since}; clip gradients, lower the learning rate or raise the optimizer's eps"
    if seen and max(seen) < 0 and trip.optimizer_step == 0:
        return (
            "check the checkpoint and the initialisation: torch.isfinite(...).all() of each parameter before the first batch"
        )
    return "look at the gradients and optimizer steps since it was last finite; if it never was, at the checkpoint"


def _of_upstream(module: str, trip: Trip, operator: Operator | None) -> str:
    if trip.received:
        return "look at the ranks whose parts went into it: `also` names those that tripped"
    if trip.changed:
        return f"look for what changes the output of {trip.changed} in place: x.data, numpy(), another thread"
    if trip.culprit.kind is Kind.LOSS:
        return "watch all modules (no modules=) in every batch, to see which one makes the output bad"
    if trip.operator is not None:
        return "look for a tensor that the module keeps or makes by itself, and that is no parameter or buffer"
    if operator is not None:  # the close-up has found where it was born
        kind, place = explain(operator)[0], operator.module or "the root module"
        if kind in (Cause.SINGULAR, Cause.INVALID):
            return _of_undefined(kind, place, trip, operator)
        return f"scale or clamp what goes in, {_where(operator, place)}"
    return f'rankwatch.detect_overflow(x, "name") after each step of the code that leads to {module}: which one makes it?'


def _of_gradient(module: str, trip: Trip, operator: Operator | None) -> str:
    scale = f", or lower the loss scale, which was {trip.loss_scale:g}" if trip.loss_scale > 1 else ""
    if trip.unfound:
        return "look at the other ranks, and at terms of the loss that are made of the parameters" + scale
    if operator is not None:
        kind = explain(operator)[0]
        if kind is Cause.OVERFLOW:
            narrow = "train in bfloat16, or " if operator.output.dtype in NARROW_DTYPES else ""
            return f"{narrow}scale what goes into {module} or into the loss{scale}"
        if kind is Cause.SINGULAR:
            return f"add an epsilon {_where(operator, module)}, where the slope is infinite, or clamp what goes in"
        return f"clamp what goes in, {_where(operator, module)}"
    if not trip.frame.spec.module or any(r.kind is Kind.GRAD_OUTPUT and r.state in _BAD for r in trip.frame.readings):
        return f"look where the cause says that it was born, and at the edges of the loss (log, sqrt, division){scale}"
    return f"look in {module} for a sqrt, norm, log or division near 0: add an epsilon inside{scale}"


def _where(operator: Operator | None, module: str) -> str:
    source = operator.source if operator is not None else None
    return f"at {source.file.rpartition('/')[2]}:{source.line}" if source is not None else f"in {module}"
