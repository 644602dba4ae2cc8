"""The first thing to try, in one line: by the cause, and by what the report knows of the case."""

from __future__ import annotations

from .closeup import CloseUp
from .frame import NARROW_DTYPES, Kind, State
from .operators import explain
from .trip import Cause, Operator, Trip


def advise(cause: Cause, trip: Trip, closeup: CloseUp | None) -> str:
    module = trip.frame.spec.module or "the root module"
    operator = (closeup.operator if closeup is not None else None) or trip.operator
    if cause is Cause.OVERFLOW:
        return _of_overflow(module, trip, operator, closeup)
    if cause is Cause.WEIGHT:
        return _of_weight(trip)
    if cause is Cause.DATA:
        bad = next((reading.label for reading in trip.root_inputs if reading.state in (State.INF, State.NAN)), "the input")
        return (
            f"look at {bad} of batch {trip.position.batch} in this rank's shard of the data; rankwatch replay finds the rows"
        )
    if cause is Cause.UPSTREAM:
        return (
            f'rankwatch.detect_overflow(x, "name") after each step of the code that leads to {module}: which one makes it?'
        )
    if cause is Cause.GRADIENT:
        return _of_gradient(module, trip, operator)
    if cause is Cause.UNEXPLAINED:
        machine = closeup.machine if closeup is not None and closeup.machine else "this machine"
        return (
            f"train on without {machine}; run the capsule again there and elsewhere: what recurs nowhere is the hardware's"
        )
    return _USUAL[cause].format(where=_where(operator, module))


_USUAL = {
    Cause.SINGULAR: "add an epsilon to what is divided by, or under the root or log, {where}; or clamp what goes in",
    Cause.INVALID: "clamp what goes in, {where}; leave each row of a mask one element that is not masked",
    Cause.REDUCTION: "reduce in float32 or bfloat16, or divide by the world size before the sum, not after it",
    Cause.DIVERGENCE: "lower the learning rate or lengthen its warm-up, and clip gradients before optimizer.step()",
}


def _of_overflow(module: str, trip: Trip, operator: Operator | None, closeup: CloseUp | None) -> str:
    dtype, precision = trip.culprit.dtype, closeup.precision if closeup is not None else ()
    wider = [one.dtype for one in precision if one.state is State.FINITE and one.dtype != dtype]
    if trip.culprit.kind is Kind.LOSS:
        return f"compute the loss in a wider dtype than {dtype}, or scale the outputs that it is made from"
    if dtype in NARROW_DTYPES and (wider or not precision):
        return f"run {module} in {wider[0] if wider else 'float32'} with autocast off around it, or train in bfloat16"
    if operator is None:
        return f'rankwatch.detect_overflow(x, "name") within the forward of {module}, to find the operation'
    return f"scale or clamp what goes into {module}; look at why it grows: learning rate, warm-up, clipping"


def _of_weight(trip: Trip) -> str:
    if trip.optimizer_step == 0 or not trip.weights or trip.weights[0].finite_in < 0:
        name = f"{trip.weights[0].module}.{trip.weights[0].reading.label}".strip(".") if trip.weights else "the weight"
        return f"check {name} in the checkpoint or the initialisation: torch.isfinite(...).all() before the first batch"
    batch = trip.weights[0].finite_in
    return (
        f"load a checkpoint from before batch {batch}; clip gradients, lower the learning rate or raise the optimizer's eps"
    )


def _of_gradient(module: str, trip: Trip, operator: Operator | None) -> str:
    scale = f", or lower the loss scale, which was {trip.loss_scale:g}" if trip.loss_scale else ""
    if operator is not None and explain(operator)[0] is Cause.OVERFLOW:
        narrow = "train in bfloat16, or " if operator.output.dtype in NARROW_DTYPES else ""
        return f"{narrow}scale what goes into {module} or into the loss{scale}"
    if operator is not None and operator.source is not None:
        return f"add an epsilon {_where(operator, module)}, where the slope is infinite, or clamp what goes in"
    if not trip.frame.spec.module or trip.loss_scale:
        return f"look at the loss function near its edges (log, sqrt, division){scale}"
    return f"look in {module} for a sqrt, norm, log or division near 0: add an epsilon inside"


def _where(operator: Operator | None, module: str) -> str:
    source = operator.source if operator is not None else None
    return f"at {source.file.rpartition('/')[2]}:{source.line}" if source is not None else f"in {module}"
