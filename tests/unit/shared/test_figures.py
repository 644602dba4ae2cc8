"""Numbers as people write them."""

from __future__ import annotations

import math

import pytest

from rankwatch.shared.figures import end_of, figure
from rankwatch.shared.types.closeup import Precision
from rankwatch.shared.types.frame import State
from rankwatch.shared.words.closeup_text import describe_precision


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (69_672.0, "69,700"),
        (-59_104.0, "-59,100"),
        (999.6, "1,000"),
        (412.0, "412"),
        (7.1123, "7.11"),
        (0.0124, "0.0124"),
        (0.0, "0"),
        (3e-8, "3e-8"),
        (1.25e-6, "1.25e-6"),
        (1.2e6, "1.2e6"),
        (3.4028e38, "3.4e38"),
        (1.7976931348623157e308, "1.8e308"),
        (-1.7976931348623157e308, "-1.8e308"),
        (math.inf, "inf"),
    ],
)
def test_a_number_has_three_digits_and_no_exponent_where_it_needs_none(value: float, text: str) -> None:
    assert figure(value) == text


def test_the_end_of_a_dtype_has_all_digits_where_they_are_few() -> None:
    assert [end_of(one) for one in ("float16", "float8_e4m3fn", "bfloat16")] == ["65,504", "448", "3.39e38"]


def test_a_number_beyond_the_trained_dtype_stands_beside_its_end() -> None:
    found = tuple(Precision(dtype, State.FINITE, 69_672.0) for dtype in ("float32", "float64"))
    told = "finite in float32 and float64: abs max 69,700"
    beyond = "finite in float32 and float64: 69,700 (float16 ends at 65,504)"
    assert describe_precision(found, "float16") == beyond
    assert describe_precision(found, "bfloat16") == told
