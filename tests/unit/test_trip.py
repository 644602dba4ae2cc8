"""What trips under which policy, and the cause class with its evidence."""

from __future__ import annotations

import pytest

import makers
from makers import INF, NAN, frame, reading, trip
from rankwatch.frame import Frame, Kind
from rankwatch.trip import Cause, Judge, Policy, classify


def tripping(policy: Policy, judged: Frame, *ignore: str) -> list[str]:
    return [judged.readings[row].label for row in Judge(policy, ignore).tripping(judged.spec, judged.states)]


EVERY_KIND = frame(
    reading("weight", NAN),
    reading("running_mean", INF, kind=Kind.BUFFER),
    reading("running_var", NAN, kind=Kind.BUFFER),
    reading("input[0]", INF),
    reading("after layer_norm", INF, kind=Kind.MARKED),
    reading("output", NAN),
    module="block.0.norm",
)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy.FIRST, ["weight", "after layer_norm", "output"]),
        (Policy.STRICT, ["weight", "running_var", "input[0]", "after layer_norm", "output"]),
        (Policy.OFF, []),
    ],
)
def test_policies(policy: Policy, expected: list[str]) -> None:
    assert tripping(policy, EVERY_KIND) == expected
    assert tripping(policy, frame(reading("weight"), reading("output"))) == []


@pytest.mark.parametrize("pattern", ["block.0.norm", "block.*", "*:output", "block.0.norm:output"])
def test_ignore_takes_patterns_of_modules_and_labels(pattern: str) -> None:
    assert tripping(Policy.FIRST, frame(reading("output", INF), module="block.0.norm"), pattern) == []
    assert tripping(Policy.FIRST, frame(reading("output", INF), module="other"), pattern.replace("*:", "block*:")) == [
        "output"
    ]


def test_overflow_says_how_near_the_inputs_were() -> None:
    cause, evidence = classify(trip(reading("input[0]", 6.27e4, dtype="float16"), reading("output", INF, dtype="float16")))
    assert cause is Cause.OVERFLOW
    assert evidence == "inputs and weights were finite; input abs max 6.27e+04 is 96% of float16's max 6.55e+04"


def test_an_input_that_does_not_fit_what_the_module_computes_in_is_an_overflow() -> None:
    """Under autocast a float32 input is cast to float16 inside of the module: inf there, and inf - inf is nan."""
    cause, evidence = classify(trip(reading("weight"), reading("input[0]", 1.01e5), reading("output", NAN, dtype="float16")))
    assert cause is Cause.OVERFLOW
    assert evidence == "inputs and weights were finite; input abs max 1.01e+05 is 154% of float16's max 6.55e+04"


def test_the_largest_ingredient_is_named_weights_too() -> None:
    _, evidence = classify(trip(reading("weight", 9.5e37), reading("input[0]"), reading("output", INF)))
    assert evidence == "inputs and weights were finite; weight abs max 9.50e+37 is 28% of float32's max 3.40e+38"


def test_a_nan_from_finite_inputs_is_invalid() -> None:
    cause, evidence = classify(trip(reading("weight"), reading("input[0]"), reading("output", NAN)))
    assert cause is Cause.INVALID
    assert "the output is nan; input abs max 1.00e+00 is less than 1% of float32's max" in evidence


def test_a_bad_weight_explains_a_bad_output_and_input() -> None:
    bad = trip(reading("weight", INF), reading("input[0]", NAN), reading("output", NAN), at=(150, 0, 3), step=38)
    cause, evidence = classify(bad)
    assert cause is Cause.WEIGHT
    assert evidence == (
        "weight was already inf before this forward: look at the last optimizer step, number 37, "
        "and at the gradients of batch 149"
    )


def test_a_bad_weight_before_any_step_is_the_checkpoints() -> None:
    assert "the initialisation or the checkpoint" in classify(trip(reading("weight", NAN), reading("output", NAN)))[1]


def test_bad_data_is_seen_at_the_root() -> None:
    root = (reading("input[x]", NAN),)
    cause, evidence = classify(trip(reading("input[0]", NAN), reading("output", NAN), root_inputs=root))
    assert (cause, evidence) == (Cause.DATA, "input[x] of the root module was nan before any module ran")


def test_born_between_modules_names_the_last_finite_frame() -> None:
    before = (
        frame(at=(3, 0, 0), module="other_batch_is_not_meant"),
        frame(at=(4, 0, 0), module="encoder"),
        frame(at=(4, 0, 1), module="norm"),
    )
    cause, evidence = classify(trip(reading("input[0]", INF), reading("output", INF), at=(4, 0, 2), before=before))
    assert cause is Cause.UPSTREAM
    assert evidence == (
        "input[0] was inf and no watched module made it: it was born between modules; "
        "the last finite frame before it is norm (Linear)"
    )


def test_a_mask_that_did_no_harm_before_is_not_the_cause() -> None:
    masked = (reading("input[mask]", INF), reading("input[0]"))
    harmless = frame(*masked, reading("output"), module="layer.0")
    cause, _ = classify(trip(*masked, reading("output", INF), at=(0, 0, 1), before=(harmless,), root_inputs=masked[:1]))
    assert cause is Cause.OVERFLOW


def test_under_strict_a_bad_input_is_its_own_culprit() -> None:
    bad = trip(reading("input[0]", INF), reading("output"))
    assert (bad.culprit.label, classify(bad)[0]) == ("input[0]", Cause.UPSTREAM)


def test_a_mark_points_between_modules() -> None:
    cause, evidence = classify(trip(reading("after norm", INF, kind=Kind.MARKED), at=(0, 0, 1), before=(frame(),)))
    assert cause is Cause.UPSTREAM
    assert evidence == "born between layer (Linear), the last finite frame, and this mark"


def test_a_nan_buffer_is_told() -> None:
    bad = trip(reading("running_var", NAN, kind=Kind.BUFFER), reading("input[0]"), reading("output", NAN))
    cause, evidence = classify(makers.trip(*bad.frame.readings))
    assert (cause, "running_var is nan" in evidence) == (Cause.WEIGHT, True)
