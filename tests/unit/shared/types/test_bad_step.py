"""``on_bad_step``: what its words mean."""

from __future__ import annotations

import pytest

from rankwatch.errors import UsageError
from rankwatch.shared.types.bad_step import ABORT, SKIP, OnBadStep, parse
from rankwatch.shared.types.config import resolve


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("abort", ABORT), ("skip", SKIP), ("skip=3/128", SKIP), (" skip=1/1000 ", OnBadStep(1, 1000))],
)
def test_a_word_and_its_meaning(text: str, meaning: OnBadStep) -> None:
    assert parse(text) == meaning
    assert parse(str(meaning)) == meaning


@pytest.mark.parametrize("text", ["", "stop", "skip=", "skip=3", "skip=0/128", "skip=128/128", "skip=-1/128", "skip=3/0"])
def test_another_word_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(UsageError, match=r"on_bad_step=.*: expected abort, skip, or skip=N/M"):
        resolve({}, on_bad_step=text)


def test_it_comes_from_the_environment() -> None:
    assert resolve({"RANKWATCH_ON_BAD_STEP": "skip=2/64"}).on_bad_step == OnBadStep(2, 64)


@pytest.mark.parametrize("option", [{"guard": False}, {"policy": "off"}])
def test_nothing_is_left_out_without_the_guard(option: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="the gradient guard decides"):
        resolve({}, on_bad_step="skip", **option)
