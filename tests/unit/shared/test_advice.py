"""What to try fits the cause and the case, in one line, whatever is known of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import makers
from makers import INF, NAN, reading, trip
from rankwatch.shared.advice import advise
from rankwatch.shared.cause import Cause, Trip
from rankwatch.shared.closeup import CloseUp, Precision
from rankwatch.shared.frame import Kind, State
from rankwatch.shared.trip import BadWeight

HALF = trip(reading("output", INF, dtype="float16"), module="decoder.wo")
FULL = trip(reading("output", INF), module="decoder.wo")
MATMUL = replace(
    makers.made_by("aten.mm.default"),
    inputs=(reading("self", 2e2, dtype="float16"), reading("mat2", 6e2, dtype="float16")),
    operands=(),
    shapes=((1, 64), (64, 64)),
    output=reading("output", INF, dtype="float16"),
)
SQRT = replace(
    makers.made_by("aten.div.Tensor", node="SqrtBackward0"),
    inputs=(reading("self", 1.0), reading("other", 0.0)),
    operands=(1.0, 0.0),
    shapes=((2,), (2,)),
)
FINITE = CloseUp(
    of=3, recurred=3, precision=(Precision("float32", State.FINITE, 7e4), Precision("float64", State.FINITE, 7e4))
)
NOWHERE = replace(FINITE, precision=(Precision("float32", State.INF, INF), Precision("float64", State.INF, INF)))


def weight(finite_in: int, step: int) -> Trip:
    bad = BadWeight("decoder.wo", "Linear", reading("weight", INF, kind=Kind.PARAMETER), finite_in)
    return replace(FULL, weights=(bad,), optimizer_step=step)


@pytest.mark.parametrize(
    ("cause", "case", "closeup", "said"),
    [
        (Cause.OVERFLOW, HALF, FINITE, "run decoder.wo in float32 with autocast off around it"),
        (Cause.OVERFLOW, HALF, None, "run decoder.wo in float32"),
        (Cause.OVERFLOW, replace(HALF, operator=makers.made_by()), NOWHERE, "scale or clamp what goes into decoder.wo"),
        (Cause.OVERFLOW, replace(FULL, operator=makers.made_by()), None, "scale or clamp what goes into decoder.wo"),
        (Cause.OVERFLOW, FULL, None, 'detect_overflow(x, "name") within the forward of decoder.wo'),
        (Cause.OVERFLOW, trip(reading("loss", INF, kind=Kind.LOSS)), None, "compute the loss in a wider dtype than float32"),
        (Cause.SINGULAR, replace(FULL, operator=makers.made_by()), None, "at model.py:87"),
        (Cause.SINGULAR, FULL, None, "in decoder.wo"),
        (Cause.INVALID, FULL, None, "clamp what goes in, in decoder.wo"),
        (Cause.WEIGHT, weight(-1, 0), None, "check decoder.wo.weight in the checkpoint or the initialisation"),
        (Cause.WEIGHT, weight(12, 13), None, "load a checkpoint from before batch 12"),
        (Cause.DATA, replace(FULL, root_inputs=(reading("input[x]", INF),)), None, "look at input[x] of batch"),
        (Cause.GRADIENT, replace(FULL, operator=SQRT), None, "add an epsilon at model.py:87"),
        (Cause.GRADIENT, replace(FULL, operator=makers.made_by()), None, "scale what goes into decoder.wo"),
        (Cause.GRADIENT, replace(HALF, operator=MATMUL), None, "train in bfloat16, or scale what goes into decoder.wo"),
        (Cause.GRADIENT, replace(FULL, loss_scale=65536.0), None, "lower the loss scale, which was 65536"),
        (Cause.GRADIENT, FULL, None, "look in decoder.wo for a sqrt"),
        (Cause.UNEXPLAINED, FULL, replace(FINITE, machine="node7, GPU-1"), "train on without node7, GPU-1"),
        (Cause.UPSTREAM, FULL, None, "leads to decoder.wo"),
    ],
)
def test_the_case_is_named(cause: Cause, case: Trip, closeup: CloseUp | None, said: str) -> None:
    assert said in advise(cause, case, closeup)


CASES = [HALF, FULL, weight(-1, 0), weight(3, 5), trip(reading("loss", NAN, kind=Kind.LOSS), module="")]


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("closeup", [None, FINITE, NOWHERE, CloseUp()])
def test_there_is_one_line_for_each(cause: Cause, case: Trip, closeup: CloseUp | None) -> None:
    for one in (case, replace(case, operator=makers.made_by())):
        line = advise(cause, one, closeup)
        assert line
        assert "\n" not in line
