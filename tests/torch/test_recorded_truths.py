"""The truths that the recorded trainings are compared with are those of the tables, which need torch."""

from __future__ import annotations

from recorded.recording import COMMAND
from recorded.replicas import truths
from recorded.truths import FILE


def test_the_truths_are_those_of_the_tables() -> None:
    assert FILE.read_text() == truths(), f"write them again: {COMMAND} --truths"
