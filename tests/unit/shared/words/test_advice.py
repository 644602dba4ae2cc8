"""What to try fits the cause and the case, in one line, whatever is known of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import makers
from makers import INF, NAN, reading, trip
from rankwatch.shared.types.action import Action
from rankwatch.shared.types.closeup import CloseUp, Precision
from rankwatch.shared.types.frame import Kind, State
from rankwatch.shared.types.trip import BadWeight, Cause, Trip
from rankwatch.shared.words.cause import action_of, advise

HALF = trip(reading("output", INF, dtype="float16"), module="decoder.wo")
FULL = trip(reading("output", INF), module="decoder.wo")
LOSS = trip(reading("loss", INF, kind=Kind.LOSS))
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
FINITE = CloseUp(of=3, recurred=3, precision=tuple(Precision(wide, State.FINITE, 7e4) for wide in ("float32", "float64")))
NOWHERE = replace(FINITE, precision=tuple(one._replace(state=State.INF, abs_max=INF) for one in FINITE.precision))


FED = replace(FULL, root_inputs=(reading("input[mask]", INF, low=0.0), reading("input[x]", NAN)))
ARRIVED = trip(
    reading("grad_output", NAN, kind=Kind.GRAD_OUTPUT), reading("weight.grad", NAN, kind=Kind.GRADIENT), module="decoder.wo"
)
LOG = replace(makers.made_by("aten.log.default"), operands=(0.0,))
CONSTANT = replace(makers.made_by("aten.lift_fresh.default"), inputs=(), operands=(), shapes=())
GIVEN = replace(makers.made_by("aten.mul.Tensor"), inputs=(reading("self", 2.0), reading("other", INF, dtype="float")))
UNREAD = replace(makers.made_by("aten.exp.default"), inputs=(), operands=(), shapes=())
"""Of a loss: autograd has not saved what went in."""
NAN_TIMES = replace(
    makers.made_by("aten.mul.Tensor"),
    inputs=(reading("self", 0.0, low=0.0), reading("other", INF)),
    operands=(0.0, INF),
    shapes=((2,), (2,)),
    output=reading("output", NAN),
)


def test_data_that_all_ranks_have_are_of_no_shard() -> None:
    said = advise(Cause.DATA, FED, None, is_everywhere=True)
    assert said.startswith("look at input[x] of batch 0 in what all ranks read: it is not one shard")
    assert advise(Cause.OVERFLOW, FULL, None, is_everywhere=True) == advise(Cause.OVERFLOW, FULL, None)


def test_bad_data_of_an_evaluation_are_not_left_out_of_a_step() -> None:
    fed = trip(reading("output", NAN), module="rnn", at=(11, 1, 0), step=12)
    fed = replace(fed, root_inputs=(reading("input[x]", NAN),))
    said = advise(Cause.DATA, fed, None)
    assert said.startswith("look at input[x] of eval 1 after batch 11 in this rank's shard of the data")
    assert action_of(Cause.DATA, fed) is Action.LOOK_AT_DATA
    assert action_of(Cause.DATA, replace(fed, position=fed.position._replace(eval=0))) is Action.SKIP_BATCH


def test_a_gradient_that_no_rank_runs_again_alone_is_measured_as_it_comes() -> None:
    unfound = replace(ARRIVED, unfound="not run again: it communicates (FSDPModule)", guarded=True)
    assert advise(Cause.GRADIENT, unfound, None).startswith(
        "set RANKWATCH_GRADIENTS=1: each backward is measured as it runs"
    )
    assert "RANKWATCH_GRADIENTS" not in advise(Cause.GRADIENT, replace(unfound, gradients=True), None)


OWN = replace(FULL, frames=(replace(FULL.frame, spec=replace(FULL.frame.spec, module="mine", module_class="Mine")),))


def made_nan(name: str, *operands: float) -> Trip:
    state = INF if "ctc" in name else NAN
    operator = replace(makers.made_by(name), operands=operands, output=reading("output", state))
    return replace(FULL, operator=replace(operator, inputs=(reading("self", 2.0),), shapes=((4,),)))


def weights(*finite_in: int, at: int, step: int | None = None, kind: Kind = Kind.PARAMETER) -> Trip:
    bad = tuple(BadWeight("decoder.wo", "Linear", reading("weight", INF, kind=kind), last) for last in finite_in)
    one = trip(reading("output", INF), module="decoder.wo", at=(at, 0, 0), step=at if step is None else step)
    return replace(one, weights=bad)


@pytest.mark.parametrize(
    ("cause", "case", "closeup", "said"),
    [
        (Cause.OVERFLOW, HALF, FINITE, "run decoder.wo in float32 with autocast off around it"),
        (Cause.OVERFLOW, HALF, None, "run decoder.wo in float32"),
        (Cause.OVERFLOW, replace(HALF, operator=makers.made_by()), NOWHERE, "scale or clamp what goes into decoder.wo"),
        (Cause.OVERFLOW, replace(FULL, operator=makers.made_by()), None, "scale or clamp what goes into decoder.wo"),
        (Cause.OVERFLOW, FULL, None, 'detect_overflow(x, "name") within the forward of decoder.wo'),
        (Cause.OVERFLOW, LOSS, None, "scale or clamp the outputs that the loss is made"),
        (Cause.OVERFLOW, trip(reading("loss", INF, dtype="float16", kind=Kind.LOSS)), None, "compute the loss in float32"),
        (Cause.OVERFLOW, replace(FULL, operator=CONSTANT), None, "the numbers that the code puts there, at model.py:87"),
        (Cause.OVERFLOW, replace(FULL, operator=GIVEN), None, "the numbers that the code puts there, at model.py:87"),
        (Cause.OVERFLOW, replace(LOSS, operator=UNREAD), None, "scale or clamp the outputs that the loss is made from"),
        (Cause.SINGULAR, replace(FULL, operator=makers.made_by()), None, "at model.py:87"),
        (Cause.SINGULAR, FULL, None, "in decoder.wo"),
        (Cause.SINGULAR, LOSS, None, "look at the loss function"),
        (Cause.INVALID, FULL, None, "0 / 0, a root or log of a negative number, or a row that is masked"),
        (Cause.WEIGHT, weights(-1, at=0), None, "check the checkpoint and the initialisation"),
        (Cause.WEIGHT, weights(12, at=13), None, "load a checkpoint from before batch 12"),
        (Cause.WEIGHT, weights(5, at=6, step=0), None, "load a checkpoint from before batch 5"),
        (Cause.WEIGHT, weights(6, at=6), None, "look at what writes to it within the batch"),
        (Cause.WEIGHT, weights(-1, 5, at=6), None, "since it was last finite; if it never was"),
        (Cause.WEIGHT, weights(5, at=6, kind=Kind.BUFFER), None, "what updates this buffer"),
        (Cause.WEIGHT, FULL, None, "since it was last finite; if it never was"),
        (
            Cause.DATA,
            FED,
            None,
            "look at input[x] of batch 0 in this rank's shard of the data, or in the code that makes it",
        ),
        (Cause.DATA, FED, replace(FINITE, capsule="capsule"), "rankwatch replay finds the rows"),
        (Cause.UPSTREAM, FULL, None, "leads to decoder.wo"),
        (Cause.UPSTREAM, FULL, makers.closeup(), "subtract the largest value first, or clamp what goes in, at model.py:87"),
        (Cause.UPSTREAM, FULL, makers.closeup(operator=LOG), "clamp what goes in, or add an epsilon, at model.py:87"),
        (Cause.UPSTREAM, replace(FULL, received="all_reduce"), None, "look at the ranks whose parts went into it"),
        (Cause.UPSTREAM, replace(FULL, changed="proj (Linear)"), None, "what changes the output of proj (Linear) in place"),
        (Cause.UPSTREAM, LOSS, None, "which one makes the output bad"),
        (Cause.UPSTREAM, replace(FULL, operator=makers.made_by()), None, "a tensor that the module keeps"),
        (Cause.REDUCTION, HALF, None, "reduce in float32 or bfloat16, or divide by the world size before"),
        (Cause.REDUCTION, FULL, None, "divide by the world size before the sum"),
        (Cause.DIVERGENCE, FULL, None, "lower the learning rate"),
        (
            Cause.GRADIENT,
            replace(FULL, operator=SQRT),
            None,
            "below the root, or clamp what goes in, at model.py:87",
        ),
        (Cause.GRADIENT, replace(FULL, operator=makers.made_by()), None, "scale what goes into decoder.wo"),
        (Cause.GRADIENT, replace(HALF, operator=MATMUL), None, "train in bfloat16, or scale what goes into decoder.wo"),
        (Cause.GRADIENT, replace(FULL, operator=NAN_TIMES), None, "where this inf was put in, or clamp what goes in, at"),
        (Cause.GRADIENT, replace(FULL, loss_scale=65536.0), None, "lower the loss scale, which was 65536"),
        (Cause.GRADIENT, replace(FULL, unfound="gone"), None, "look at what changes .grad between the backward and the"),
        (Cause.GRADIENT, ARRIVED, None, "look where the cause says that it was born"),
        (Cause.GRADIENT, FULL, None, "the backward of decoder.wo is a product"),
        (Cause.GRADIENT, OWN, None, "look in mine for a sqrt"),
        (Cause.INVALID, made_nan("aten.div.Tensor", 0.0, 0.0), None, "add an epsilon to the divisor, at model.py:87"),
        (Cause.INVALID, made_nan("aten.std.correction"), None, "use correction=0, or more elements, at model.py:87"),
        (Cause.INVALID, made_nan("aten.acos.default", 1.0000001), None, "clamp what goes in, at model.py:87"),
        (Cause.SINGULAR, made_nan("aten._ctc_loss.default"), None, "drop such rows, or give it zero_infinity=True, at"),
        (Cause.UNEXPLAINED, FULL, replace(FINITE, machine="node7, GPU-1"), "train on without node7, GPU-1: what never"),
        (Cause.UNEXPLAINED, FULL, replace(FINITE, capsule="capsule"), "run the capsule again"),
    ],
)
def test_the_case_is_named(cause: Cause, case: Trip, closeup: CloseUp | None, said: str) -> None:
    assert said in advise(cause, case, closeup)


CASES = [HALF, FULL, weights(-1, at=0), weights(3, at=5), trip(reading("loss", NAN, kind=Kind.LOSS), module="")]


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("closeup", [None, FINITE, NOWHERE, CloseUp()])
def test_there_is_one_line_for_each(cause: Cause, case: Trip, closeup: CloseUp | None) -> None:
    for one in (case, replace(case, operator=makers.made_by())):
        line = advise(cause, one, closeup)
        assert line
        assert "\n" not in line
