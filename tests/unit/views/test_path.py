"""The frames that led to a culprit."""

from __future__ import annotations

from makers import INF, NAN, frame, reading
from rankwatch_monitor.views.path import path_to


def test_the_value_is_followed_from_output_to_input() -> None:
    frames = [
        frame(reading("input[0]", 2.0), reading("output", 3.0), module="a"),
        frame(reading("input[0]", 3.0), reading("output", 50.0), module="b"),
        frame(reading("input[0]", 3.0), reading("output", 4.0), module="beside"),
        frame(
            reading("weight", 50.0), reading("input[0]", 4.0), reading("input[1]", 50.0), reading("output", INF), module="c"
        ),
    ]
    assert path_to(frames) == [0, 1, 3]


def test_an_input_that_no_frame_made_ends_the_path() -> None:
    frames = [frame(reading("output", 5.0)), frame(reading("input[0]", 6.0), reading("output", INF))]
    assert path_to(frames) == [1]
    assert path_to([]) == []
    assert path_to([frame(reading("output", INF))]) == [0]


def test_the_last_of_several_equal_outputs_counts_and_nan_is_followed_too() -> None:
    frames = [
        frame(reading("output", NAN, low=NAN), module="a"),
        frame(reading("input[0]", NAN, low=NAN), reading("output", NAN, low=NAN), module="b"),
        frame(reading("input[0]", NAN, low=NAN), reading("output", NAN, low=NAN), module="c"),
    ]
    assert path_to(frames) == [0, 1, 2]
