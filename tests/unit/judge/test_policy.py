"""Which readings trip under which policy, and the cause with its evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import makers
from makers import INF, NAN, frame, reading, trip
from rankwatch.judge.policy import Judge
from rankwatch.shared.types.config import Policy
from rankwatch.shared.types.frame import Frame, Kind, Phase, Reading
from rankwatch.shared.types.trip import BadWeight, Cause
from rankwatch.shared.words.cause import classify


def tripping(policy: Policy, judged: Frame, *ignore: str) -> list[str]:
    return [judged.readings[row].label for row in Judge(policy, ignore).tripping(judged.spec, judged.states)]


EVERY_KIND = frame(
    reading("weight", NAN),
    reading("running_mean", INF, kind=Kind.BUFFER),
    reading("running_var", NAN, kind=Kind.BUFFER),
    reading("input[0]", INF),
    reading("input[mask]", INF, kind=Kind.KEYWORD),
    reading("input[scale]", NAN, kind=Kind.KEYWORD),
    reading("after layer_norm", INF, kind=Kind.MARKED),
    reading("output", NAN),
    module="block.0.norm",
)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy.FIRST, ["weight", "after layer_norm", "output"]),
        (Policy.STRICT, ["weight", "running_var", "input[0]", "input[scale]", "after layer_norm", "output"]),
        (Policy.OFF, []),
    ],
)
def test_policies(policy: Policy, expected: list[str]) -> None:
    assert tripping(policy, EVERY_KIND) == expected
    assert tripping(policy, frame(reading("weight"), reading("output"))) == []


GRADIENTS = (reading("grad_output", NAN), reading("grad_input[0]", INF), reading("weight.grad", NAN))


@pytest.mark.parametrize(
    ("policy", "module", "expected"),
    [
        (Policy.FIRST, "block", ["grad_input[0]", "weight.grad"]),
        (Policy.FIRST, "", ["grad_output", "grad_input[0]", "weight.grad"]),
        (Policy.STRICT, "block", ["grad_output", "grad_input[0]", "weight.grad"]),
        (Policy.OFF, "", []),
    ],
)
def test_policies_for_gradients(policy: Policy, module: str, expected: list[str]) -> None:
    judged = frame(*GRADIENTS, module=module, phase=Phase.BACKWARD)
    assert tripping(policy, judged) == expected
    assert tripping(policy, judged, "*:grad_*", "*:weight.grad") == []


def test_a_root_has_its_own_rules_only_for_gradients() -> None:
    assert tripping(Policy.FIRST, frame(*EVERY_KIND.readings, module="")) == tripping(Policy.FIRST, EVERY_KIND)


@pytest.mark.parametrize("pattern", ["block.0.norm", "block.*", "*:output", "block.0.norm:output"])
def test_ignore_takes_patterns_of_modules_and_labels(pattern: str) -> None:
    assert tripping(Policy.FIRST, frame(reading("output", INF), module="block.0.norm"), pattern) == []
    other = frame(reading("output", INF), module="other")
    assert tripping(Policy.FIRST, other, pattern.replace("*:", "block*:")) == ["output"]


@pytest.mark.parametrize("pattern", ["*:weight", "layer:weight", "layer:weight (shard of 4)"])
def test_a_pattern_names_a_parameter_however_it_is_sharded(pattern: str) -> None:
    cut = frame(reading("weight (shard of 4)", NAN), reading("bias (shard)", NAN))
    assert tripping(Policy.FIRST, cut) == ["weight (shard of 4)", "bias (shard)"]
    assert tripping(Policy.FIRST, cut, pattern) == ["bias (shard)"]


def test_overflow_reports_how_near_the_inputs_were() -> None:
    cause, evidence = classify(trip(reading("input[0]", 6.27e4, dtype="float16"), reading("output", INF, dtype="float16")))
    assert cause is Cause.OVERFLOW
    assert evidence == "inputs and weights were finite; input abs max 62,700 is 96% of float16's max 65,504"


def test_an_input_that_does_not_fit_the_modules_compute_dtype_is_an_overflow() -> None:
    """Under autocast the module casts its float32 input to float16: it becomes inf, and inf - inf is nan."""
    cause, evidence = classify(trip(reading("weight"), reading("input[0]", 1.01e5), reading("output", NAN, dtype="float16")))
    assert cause is Cause.OVERFLOW
    assert evidence == "inputs and weights were finite; input abs max 101,000 is 154% of float16's max 65,504"


def test_the_largest_ingredient_is_named_even_a_weight() -> None:
    _, evidence = classify(trip(reading("weight", 9.5e37), reading("input[0]"), reading("output", INF), step=1))
    assert evidence == "inputs and weights were finite; weight abs max 9.5e37 is 28% of float32's max 3.4e38"


def test_a_nan_from_finite_inputs_is_invalid() -> None:
    cause, evidence = classify(trip(reading("weight"), reading("input[0]"), reading("output", NAN)))
    assert cause is Cause.INVALID
    assert "the output is nan; input abs max 1 is less than 1% of float32's max" in evidence


def test_a_bad_weight_explains_a_bad_output_and_input() -> None:
    bad = trip(reading("weight", INF), reading("input[0]", NAN), reading("output", NAN), at=(150, 0, 3), step=38)
    known = replace(bad, weights=(BadWeight("layer", "Linear", reading("weight", INF), finite_in=146),))
    cause, evidence = classify(known)
    assert cause is Cause.WEIGHT
    assert evidence == (
        "weight was already inf before this forward; last seen finite in batch 146, bad in batch 150: "
        "look at the gradients and the optimizer steps from batch 146 on"
    )
    assert "it was never seen finite: look at the initialisation or the checkpoint" in classify(bad)[1]
    changed = replace(bad, weights=(BadWeight("layer", "Linear", reading("weight", INF), finite_in=150),))
    assert "weight became inf within batch 150, as it was finite before in this batch" in classify(changed)[1]


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
        "input[0] was inf and no watched module made it: it was born between modules, "
        "after norm (Linear), the last finite frame"
    )


def test_a_mask_that_was_harmless_before_is_not_the_cause() -> None:
    masked = (reading("input[mask]", INF), reading("input[0]"))
    harmless = frame(*masked, reading("output"), module="layer.0")
    cause, _ = classify(trip(*masked, reading("output", INF), at=(0, 0, 1), before=(harmless,), root_inputs=masked[:1]))
    assert cause is Cause.OVERFLOW
    harmed = frame(*masked, reading("output", INF), module="layer.0")
    cause, _ = classify(trip(*masked, reading("output", INF), at=(0, 0, 1), before=(harmed,), root_inputs=masked[:1]))
    assert cause is Cause.DATA


def test_under_strict_a_bad_input_is_its_own_culprit() -> None:
    bad = trip(reading("input[0]", INF), reading("output"))
    assert (bad.culprit.label, classify(bad)[0]) == ("input[0]", Cause.UPSTREAM)


def test_a_mark_points_between_modules() -> None:
    cause, evidence = classify(trip(reading("after norm", INF, kind=Kind.MARKED), at=(0, 0, 1), before=(frame(),)))
    assert cause is Cause.UPSTREAM
    assert evidence == "born between layer (Linear), the last finite frame, and this mark"


def test_a_nan_buffer_is_named() -> None:
    bad = trip(reading("running_var", NAN, kind=Kind.BUFFER), reading("input[0]"), reading("output", NAN))
    cause, evidence = classify(makers.trip(*bad.frame.readings))
    assert (cause, "running_var is nan" in evidence) == (Cause.WEIGHT, True)


# --- born in backward -----------------------------------------------------------------------------------------------------


def backward(*readings: Reading, **changes: Any) -> tuple[Cause, str]:
    return classify(trip(*readings, phase=Phase.BACKWARD, **changes))


def test_a_gradient_born_in_a_modules_backward() -> None:
    came_in = reading("grad_output", 6.27e4, dtype="float16")
    cause, evidence = backward(came_in, reading("weight.grad", INF, dtype="float16"), loss_scale=65536.0)
    assert cause is Cause.GRADIENT
    assert evidence == (
        "born in the backward of this module: the gradient that came in was finite "
        "(abs max 62,700 is 96% of float16's max 65,504), the weight.grad is inf; the loss scale was 65536"
    )


def test_a_parameters_gradient_is_explained_by_the_call_it_belongs_to() -> None:
    before = (
        frame(reading("grad_output", 2.0), at=(0, 0, 0), module="head", phase=Phase.BACKWARD),
        frame(reading("grad_output", 3.0), at=(0, 0, 1), module="first", phase=Phase.BACKWARD),
    )
    cause, evidence = backward(reading("weight.grad", NAN), at=(0, 0, 2), module="first", before=before)
    assert cause is Cause.GRADIENT
    assert evidence == (
        "born in the backward of this module: the gradient that came in was finite "
        "(abs max 3 is less than 1% of float32's max 3.4e38), the weight.grad is nan"
    )


def test_a_parameters_gradient_that_comes_before_its_call_was_born_after_the_last_finite_frame() -> None:
    bad = reading("weight.grad", INF)
    root = frame(reading("grad_output"), module="", phase=Phase.BACKWARD)
    assert backward(bad, at=(0, 0, 1), module="head", before=(root,))[1] == (
        "the weight.grad is inf: born between (root) (Linear, backward), the last module whose gradients were finite, "
        "and head (Linear, backward)"
    )
    bias = frame(reading("bias.grad", kind=Kind.GRADIENT), module="head", phase=Phase.BACKWARD)
    assert backward(bad, at=(0, 0, 1), module="head", before=(bias,))[1] == (
        "the weight.grad is inf: born in the backward of this module, whose bias.grad was finite"
    )
    assert "the weight.grad is inf: born between the loss and layer (Linear, backward)" in backward(bad)[1]


def test_a_gradient_without_a_known_range_is_still_finite() -> None:
    complex_one = reading("grad_output", dtype="complex64")
    assert "that came in was finite, the grad_input[0] is nan" in backward(complex_one, reading("grad_input[0]", NAN))[1]


def test_a_gradient_that_arrived_bad_was_born_between_two_modules() -> None:
    finite, bad = reading("grad_output"), reading("grad_output", INF)
    before = (
        frame(at=(4, 0, 0), module="forward_is_not_meant"),
        frame(finite, at=(3, 0, 9), module="other_batch_is_not_meant", phase=Phase.BACKWARD),
        frame(finite, reading("weight.grad"), at=(4, 0, 1), module="head", phase=Phase.BACKWARD),
        frame(bad, at=(4, 0, 2), module="bad_is_not_meant", phase=Phase.BACKWARD),
        frame(at=(4, 0, 3), module="recomputed_is_not_meant", phase=Phase.RECOMPUTE),
    )
    cause, evidence = backward(bad, reading("grad_input", NAN), at=(4, 0, 4), before=before, module="norm")
    assert cause is Cause.GRADIENT
    assert evidence == (
        "grad_output was inf already as it arrived: born between head (Linear, backward), "
        "the last module whose gradients were finite, and norm (Linear, backward)"
    )


def test_the_first_gradient_of_all_points_at_the_loss() -> None:
    bad = (reading("grad_output", NAN), reading("grad_input", NAN))
    assert backward(*bad, before=(frame(),))[1] == (
        "grad_output was nan already as it arrived: born between the loss and layer (Linear, backward), "
        "as no backward frame at hand has finite gradients: look at the loss function and the loss scale"
    )
    cause, evidence = backward(*bad, module="", loss_scale=INF)
    assert cause is Cause.GRADIENT
    assert evidence == (
        "the gradient of the loss with respect to the model's output was nan: look at the loss function and the loss scale; "
        "the loss scale was inf"
    )


def test_a_bad_weight_explains_a_bad_gradient() -> None:
    cause, evidence = backward(reading("weight", NAN), reading("grad_output"), reading("weight.grad", NAN), step=3)
    assert cause is Cause.WEIGHT
    assert evidence.startswith("weight was already nan before this backward, and it was never seen finite")


def test_the_origin_of_a_recomputed_input_is_searched_in_recomputed_frames() -> None:
    before = (
        frame(at=(4, 0, 0), module="norm", phase=Phase.RECOMPUTE),
        frame(reading("grad_output"), at=(4, 0, 1), module="head", phase=Phase.BACKWARD),
    )
    bad = reading("input[0]", INF), reading("output", INF)
    cause, evidence = classify(trip(*bad, at=(4, 0, 2), before=before, phase=Phase.RECOMPUTE, module="wi"))
    assert cause is Cause.UPSTREAM
    assert evidence.endswith(", after norm (Linear, recomputed), the last finite frame")


def test_when_only_the_root_was_measured_its_inputs_decide() -> None:
    bad, good = reading("input[0]", NAN), reading("input[0]", 3.0)
    assert classify(trip(reading("output", NAN), module="", root_inputs=(bad,))) == (
        Cause.DATA,
        "input[0] of the root module was nan before any module ran",
    )
    cause, evidence = classify(trip(reading("output", NAN), module="", root_inputs=(good,)))
    assert cause is Cause.INVALID
    assert "were not measured in this batch" in evidence
    mask = reading("input[mask]", INF)._replace(abs_min=0.0)
    assert classify(trip(reading("output", NAN), module="", root_inputs=(good, mask)))[0] is Cause.INVALID
    assert classify(trip(reading("output", INF), module="inner", root_inputs=(mask,)))[0] is Cause.OVERFLOW
