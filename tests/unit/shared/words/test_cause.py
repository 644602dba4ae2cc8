"""Each rule of the table of causes, by a trip that it tells. ``judge/test_policy.py`` has what the sentences say in full."""

from __future__ import annotations

from dataclasses import replace

import pytest

import makers
from makers import INF, NAN, frame, reading, trip
from rankwatch.shared.types.frame import Kind, Phase, State
from rankwatch.shared.types.trip import BadWeight, Cause, Trip
from rankwatch.shared.words.cause import RULES, classify

GRADIENT = trip(reading("weight.grad", INF), module="layer", phase=Phase.BACKWARD)
LOSS = trip(reading("loss", INF, kind=Kind.LOSS), module="")
NAN_LOSS = trip(reading("loss", NAN, kind=Kind.LOSS), module="")
ROOT = trip(reading("output", INF), module="", root_inputs=(reading("input[0]"),))
NAN_ROOT = trip(reading("output", NAN), module="", root_inputs=(reading("input[0]"),))
FED = trip(reading("input[0]", NAN), reading("output", NAN))
MADE = trip(reading("input[0]"), reading("output", INF))
BAD_WEIGHT = (BadWeight("layer", "Linear", reading("weight", INF), -1),)
ELSEWHERE = (BadWeight("other", "Linear", reading("weight", INF), -1),)
GIVEN = replace(makers.made_by("aten.mul.Tensor"), inputs=(reading("other", NAN),), operands=())
BARELY = replace(GIVEN, inputs=(reading("other", INF),))
BAD_ROOT = (reading("input[0]", NAN),)


EMPTY = trip(reading("weight", 1.18e32, kind=Kind.PARAMETER), reading("input[0]"), reading("output", INF))


def after(*outputs: float, loss: Trip = LOSS) -> Trip:
    """The loss after a forward of the root with these outputs."""
    root = frame(*(reading("output", high) for high in outputs), module="")
    return replace(loss, frames=(root, *loss.frames))


def of(high: float, low: float = 0.5, output: float = INF) -> Trip:
    return trip(reading("input[0]", high, low=low), reading("output", output))


@pytest.mark.parametrize(
    ("told", "cause", "begins"),
    [
        (trip(reading("weight", NAN), reading("output", NAN)), Cause.WEIGHT, "weight was already nan"),
        (EMPTY, Cause.WEIGHT, "weight of layer (Linear) holds 1.18e32 before any optimizer step was seen"),
        (replace(GRADIENT, unfound="gone", received="all_reduce"), Cause.REDUCTION, "the weight.grad was inf before"),
        (replace(GRADIENT, unfound="gone"), Cause.GRADIENT, "the weight.grad was inf before"),
        (
            trip(reading("weight.grad (summed)", INF, kind=Kind.GRADIENT)),
            Cause.OVERFLOW,
            "the weight.grad of each forward in",
        ),
        (
            replace(FED, outside=frame(reading("input[0]", NAN), reading("output", NAN), module="vae")),
            Cause.DATA,
            "input[0] of vae (Linear), which is not trained and ran before, was nan",
        ),
        (
            replace(FED, outside=frame(reading("input[0]"), reading("output", INF), module="vae")),
            Cause.UPSTREAM,
            "vae (Linear), which is not trained and ran before, returned inf (output, float32), though what it was given",
        ),
        (trip(reading("weight.grad (reduced)", INF, kind=Kind.GRADIENT)), Cause.REDUCTION, "this rank's weight.grad was"),
        (replace(MADE, received="all_reduce"), Cause.UPSTREAM, "this rank's part was finite, and all_reduce returned nan"),
        (
            replace(MADE, collective="all_reduce"),
            Cause.REDUCTION,
            "this rank's part was finite, and all_reduce returned inf",
        ),
        (after(INF), Cause.UPSTREAM, "the model's output was inf, and the loss was made from it"),
        (replace(LOSS, weights=ELSEWHERE), Cause.WEIGHT, "weight of other (Linear) was already inf"),
        (replace(LOSS, operator=GIVEN), Cause.UPSTREAM, "the model's output is not at hand; aten.mul was given nan as its"),
        (replace(LOSS, operator=makers.made_by()), Cause.OVERFLOW, "the model's output is not at hand; aten.exp of 1,000"),
        (after(1.0, loss=NAN_LOSS), Cause.INVALID, "the model's output was finite (abs max 1): look at the loss"),
        (after(1.0, 2.0), Cause.SINGULAR, "the model's outputs were finite (largest abs max 2); no exp or product"),
        (after(1e3), Cause.OVERFLOW, "the model's output was finite (abs max 1,000): look at the loss"),
        (GRADIENT, Cause.GRADIENT, "the weight.grad is inf: born between the loss and layer"),
        (replace(FED, operator=makers.made_by()), Cause.OVERFLOW, "aten.exp of 1,000 is inf"),
        (replace(ROOT, root_inputs=BAD_ROOT), Cause.DATA, "input[0] of the root module was nan"),
        (replace(ROOT, weights=ELSEWHERE), Cause.WEIGHT, "weight of other (Linear) was already inf"),
        (NAN_ROOT, Cause.INVALID, "what the root module was fed was finite; the modules in it"),
        (ROOT, Cause.OVERFLOW, "what the root module was fed was finite; the modules in it"),
        (replace(FED, weights=BAD_WEIGHT), Cause.WEIGHT, "weight was already inf"),
        (replace(FED, root_inputs=BAD_ROOT), Cause.DATA, "input[0] of the root module was nan"),
        (
            replace(FED, changed="proj (Linear)"),
            Cause.UPSTREAM,
            "input[0] was nan: it was finite when proj (Linear) made it",
        ),
        (replace(FED, weights=ELSEWHERE), Cause.WEIGHT, "weight of other (Linear) was already inf"),
        (FED, Cause.UPSTREAM, "input[0] was nan and no watched module made it"),
        (trip(reading("mean", NAN, kind=Kind.BUFFER), reading("output", NAN)), Cause.WEIGHT, "the buffer mean is nan"),
        (replace(MADE, operator=GIVEN), Cause.UPSTREAM, "aten.mul was given nan (other)"),
        (replace(MADE, operator=BARELY), Cause.OVERFLOW, "aten.mul of abs max inf (other) is inf"),
        (trip(reading("input[0]", 1e5), reading("output", INF, dtype="float16")), Cause.OVERFLOW, "inputs and weights were"),
        (of(1e30), Cause.OVERFLOW, "inputs and weights were finite; input abs max 1e30 is less than 1%"),
        (replace(MADE, recurs=False), Cause.UNEXPLAINED, "inputs and weights were finite"),
        (of(1.0, output=NAN), Cause.INVALID, "inputs and weights were finite, but the output is nan"),
        (trip(reading("weight"), reading("output", INF)), Cause.OVERFLOW, "inputs and weights were finite; weight abs max"),
        (of(1e3), Cause.OVERFLOW, "inputs and weights were finite"),
        (of(1.0, low=0.0), Cause.SINGULAR, "inputs and weights were finite"),
        (MADE, Cause.OVERFLOW, "inputs and weights were finite"),
    ],
)
def test_a_rule_tells(told: Trip, cause: Cause, begins: str) -> None:
    found, sentence = classify(told)
    assert (found, sentence[: len(begins)]) == (cause, begins)


def test_each_rule_tells_one_of_these() -> None:
    (mark,) = (one for one in test_a_rule_tells.pytestmark if one.name == "parametrize")  # type: ignore[attr-defined]
    first = [next(place for place, rule in enumerate(RULES) if rule.when(told)) for told, _, _ in mark.args[1]]
    assert first == list(range(len(RULES)))


def test_an_output_whose_numbers_were_not_measured() -> None:
    seen = reading("output")._replace(state=State.SEEN_FINITE)
    cause, evidence = classify(replace(NAN_LOSS, frames=(frame(seen, module=""), *NAN_LOSS.frames)))
    assert cause is Cause.INVALID
    assert evidence.startswith("the model's output was finite: look at the loss")
