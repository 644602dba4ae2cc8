"""A close-up in words: what a report says of the operator, the line, whether it recurs, and in which precision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from makers import INF, NAN, closeup, evidenced_trip, made_by, reading, trip
from rankwatch.shared.types.closeup import CloseUp, Precision
from rankwatch.shared.types.frame import Kind, Reading, State
from rankwatch.shared.types.trip import Source
from rankwatch.shared.words.closeup_text import (
    describe_closeup,
    describe_operator,
    describe_precision,
    describe_recurrence,
    fields_of,
    replay_fields,
)


def test_the_fields_come_in_the_order_of_a_report() -> None:
    found = closeup(is_eager=False)
    assert fields_of("overflow: because", evidenced_trip(), found) == [
        (
            "operator",
            "aten.exp at model.py:87, in forward: e = torch.exp(scores)\nself (2, 3) float32, abs max 1,000 -> inf",
        ),
        ("cause", "overflow: because"),
        ("recurs", "recurred 3 of 3"),
        ("precision", "finite in float32: abs max 120,000; inf in float64"),
        ("close-up", "not run again in bfloat16: out of memory"),
    ]


def test_without_a_closeup_the_trip_alone_names_the_operator() -> None:
    assert [title for title, _ in fields_of("overflow", evidenced_trip(), None)] == ["operator", "cause"]
    assert fields_of("overflow", trip(), None) == [("cause", "overflow")]


def test_a_list_of_events_has_it_in_one_line() -> None:
    assert describe_closeup(closeup(is_eager=False)) == (
        "aten.exp at model.py:87, in forward: e = torch.exp(scores), self (2, 3) float32, abs max 1,000 -> inf; "
        "recurred 3 of 3; finite in float32: abs max 120,000; inf in float64; not run again in bfloat16: out of memory"
    )
    assert describe_closeup(CloseUp()) == "nothing was run again"


def test_an_operator_that_only_the_closeup_found_is_named() -> None:
    found = CloseUp(operator=made_by("aten.log.default"))
    titles = dict(fields_of("singular", trip(), found))
    assert titles["operator"].startswith("aten.log at model.py:87")
    assert "recurs" not in titles  # nothing was counted


def test_what_was_made_between_modules_is_told_before_what_the_trip_knew() -> None:
    found = CloseUp(operator=made_by("aten.div.Tensor"))
    told = dict(fields_of("upstream: input[0] was inf", trip(), found))["cause"]
    assert told.startswith("upstream: aten.div ")
    assert told.endswith("; input[0] was inf")
    given = replace(made_by(), inputs=(reading("self", NAN),), operands=())
    for trip_, closeup_ in ((evidenced_trip(), found), (trip(), CloseUp(operator=given)), (trip(), None)):
        assert dict(fields_of("upstream: it was inf", trip_, closeup_))["cause"] == "upstream: it was inf"


def test_a_closeup_that_was_refused_says_why() -> None:
    assert fields_of("invalid", trip(), CloseUp(note="SyncBatchNorm communicates")) == [
        ("cause", "invalid"),
        ("close-up", "SyncBatchNorm communicates"),
    ]


def test_the_operator_of_a_backward_is_named_with_the_line_of_its_forward() -> None:
    text = describe_operator(made_by("aten.div.Tensor", node="SqrtBackward0"))
    assert text.startswith("aten.div in SqrtBackward0, the backward of model.py:87, in forward: e = torch.exp(scores)\n")


def test_the_module_in_which_it_ran_is_named_where_it_is_not_the_culprit() -> None:
    inner = replace(made_by(), module="blocks.2")
    assert describe_operator(inner).startswith("aten.exp in blocks.2 at model.py:87, in forward: ")
    backward = replace(inner, node="ExpBackward0")
    assert describe_operator(backward).startswith("aten.exp in ExpBackward0 of blocks.2, the backward of model.py:87, in")


def test_a_line_that_is_not_known_is_said_to_be_not_known() -> None:
    unknown = replace(made_by(), source=None)
    assert describe_operator(unknown).startswith("aten.exp; the line that called it is not known\n")
    backward = replace(unknown, node="ExpBackward0")
    assert describe_operator(backward).startswith("aten.exp in ExpBackward0; the line of its forward is not known\n")
    no_text = replace(made_by(), source=Source("<string>", 3, "", ""))
    assert describe_operator(no_text).startswith("aten.exp at <string>:3\n")


def test_inputs_are_named_with_shape_dtype_and_state() -> None:
    inputs = (
        reading("self", NAN),
        Reading("other", Kind.INPUT, "float", 0.0, 0.0, State.FINITE),
        *(reading(f"input[{number}]") for number in range(4)),
    )
    text = describe_operator(replace(made_by(), inputs=inputs, shapes=((4,),)))
    one = "float32, abs max 1"
    assert text.endswith(f"self (4) float32, nan, other 0, input[0] {one}, input[1] {one}, 2 more -> inf")


@pytest.mark.parametrize(("operands", "expected"), [((0.0, -1.0), "exponent -1"), ((), "|exponent| 1")])
def test_a_number_has_its_sign_where_that_is_known(operands: tuple[float, ...], expected: str) -> None:
    inputs = (reading("self"), Reading("exponent", Kind.INPUT, "float", 1.0, 1.0, State.FINITE))
    text = describe_operator(replace(made_by("aten.pow_.Scalar"), inputs=inputs, operands=operands))
    assert text.endswith(f", {expected} -> inf")


@pytest.mark.parametrize(
    ("recurred", "is_eager", "text"),
    [
        (3, False, "recurred 3 of 3"),
        (3, True, "recurred 3 of 3, run eagerly: the training runs it compiled"),
        (1, False, "recurred 1 of 3: suspect a race, an operator that is not deterministic, or the hardware of {}"),
        (0, False, "did not recur: suspect the hardware of {} (finite 3 of 3 times with the same inputs), "
         "or code that was not run again, such as a global hook or another thread"),
        (0, True, "did not recur eagerly (finite 3 of 3 times): suspect the compiled graph, or the hardware of {}"),
    ],
)  # fmt: skip
def test_whether_it_recurs(recurred: int, is_eager: bool, text: str) -> None:
    found = CloseUp(recurred=recurred, of=3, machine="gpu07, GPU-5f3a", is_eager=is_eager)
    assert describe_recurrence(found) == text.format("gpu07, GPU-5f3a")


F32, F64 = "float32", "float64"


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        ([(F32, State.FINITE, 1.2e5), (F64, State.FINITE, 1.2e5)], "finite in float32 and float64: abs max 120,000"),
        ([(F32, State.NAN, 0.0), (F64, State.NAN, 0.0)], "bad in every precision: nan in float32 and float64"),
        ([(F32, State.INF, 0.0), (F64, State.NAN, 0.0)], "bad in every precision: inf in float32; nan in float64"),
        ([(F32, State.INF, 0.0), (F64, State.FINITE, 1e60)], "inf in float32; finite in float64: abs max 1e60"),
        ([(F32, State.INF, 0.0)], "inf in float32"),  # float64 was not tried
    ],
)
def test_in_which_precision_it_is_finite(precision: list[tuple[str, State, float]], text: str) -> None:
    assert describe_precision(tuple(Precision(*one) for one in precision)) == text


def test_the_command_that_runs_the_capsule_again() -> None:
    assert replay_fields(None) == replay_fields(CloseUp()) == []
    assert replay_fields(closeup(), "rankwatch-runs/train-0") == [("replay", "rankwatch replay rankwatch-runs/train-0")]
    assert replay_fields(closeup(), "my runs/train-0") == [("replay", "rankwatch replay 'my runs/train-0'")]
    assert replay_fields(closeup()) == [("replay", "capsule in the run's folder")]
    local = closeup(capsule="/tmp/capsule-1")
    assert replay_fields(local) == [("replay", "rankwatch replay /tmp/capsule-1")]
    assert replay_fields(local, "runs/train-0", "gpu07") == [("replay", "rankwatch replay /tmp/capsule-1 (on gpu07)")]


def test_an_output_that_overflows_has_a_state() -> None:
    assert describe_operator(replace(made_by(), inputs=(), output=reading("output", INF))).endswith("\n-> inf")
