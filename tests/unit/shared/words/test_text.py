"""Frames as text in phases other than forward (the parity tests cover the forward), and tunings in words."""

from __future__ import annotations

import pytest

from makers import INF, frame, reading, trip
from rankwatch.shared.types.frame import Phase
from rankwatch.shared.types.tuning import Check, Tuning
from rankwatch.shared.words.text import describe_trip, format_dump, format_frame, format_trace


@pytest.mark.parametrize(
    ("phase", "heading"),
    [
        (Phase.FORWARD, "                  model.layer Linear"),
        (Phase.RECOMPUTE, "                  model.layer Linear (recomputed)"),
        (Phase.BACKWARD, "                  model.layer Linear (backward)"),
    ],
)
def test_a_frame_of_another_phase_than_forward_is_marked(phase: Phase, heading: str) -> None:
    text = format_frame(frame(reading("output", 2.0), at=(3, 0, 7), module="model.layer", phase=phase))
    assert text == f"{heading}\n5.00e-01 2.00e+00 output"


def test_a_dump_with_backward_frames_does_not_call_them_forward() -> None:
    plain, gradients = frame(at=(3, 0, 1)), frame(reading("grad_input", INF), at=(3, 0, 2), phase=Phase.BACKWARD)
    assert "\nLast 2 forward frames:\n" in format_dump([plain, plain])
    assert "\nLast 2 frames:\n" in format_dump([plain, gradients])


def test_the_culprits_phase_is_named() -> None:
    culprit = trip(reading("grad_output"), reading("weight.grad", INF), phase=Phase.BACKWARD)
    assert describe_trip("rank 0", culprit).endswith("layer (Linear, backward), weight.grad: inf")


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        (Tuning(every=10, check=Check.ASYNC), "every 10; check async"),
        (Tuning(modules=(), ignore=(), trace_batch_nums=()), "modules all; ignore nothing; trace batches none"),
        (Tuning(modules=("a.*", "b"), ignore=("*.rotary",)), "modules a.*, b; ignore *.rotary"),
        (Tuning(trace_batch_nums=tuple(range(20))), "trace batches 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_tunings_in_words(tuning: Tuning, words: str) -> None:
    assert tuning.describe() == words


def test_a_batch_of_which_the_root_has_the_only_frame_has_its_header() -> None:
    first, second = (frame(reading("output", 2.0), at=(batch, 0, number)) for batch, number in ((3, 0), (4, 7)))
    text = format_trace([first, second])
    assert [text.count(f"*** Starting batch number={batch} ***") for batch in (3, 4)] == [1, 1]
