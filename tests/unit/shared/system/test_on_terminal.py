"""On a terminal, the fields of a report are wrapped between words; what is copied, frames and files stay as they are."""

from __future__ import annotations

import io
import os
import pty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.shared.system.on_terminal import as_shown, wrapped

REPORT = """\
                  decoder.block.1.layer.1.DenseReluDense.dropout.of.a.very.long.name Dropout
0.00e+00      inf output

rankwatch: first inf in run demo-0
  culprit    rank 1 of 2 (vm, local rank 1), batch 25
             block.wo (Linear), output: inf
  try        run it in float32 with autocast off around it
  replay     rankwatch replay rankwatch-runs/a-folder-of-a-long-name

 a table of the report, whose columns are wide and stay as they are
"""


def test_fields_are_wrapped_and_nothing_else() -> None:
    assert (
        wrapped(REPORT, 44)
        == """\
                  decoder.block.1.layer.1.DenseReluDense.dropout.of.a.very.long.name Dropout
0.00e+00      inf output

rankwatch: first inf in run demo-0
  culprit    rank 1 of 2 (vm, local rank 1),
               batch 25
             block.wo (Linear), output: inf
  try        run it in float32 with autocast
               off around it
  replay     rankwatch replay rankwatch-runs/a-folder-of-a-long-name

 a table of the report, whose columns are wide and stay as they are
"""
    )


def test_a_title_is_wrapped_below_its_text() -> None:
    text = wrapped("rankwatch: this was the demo: it was caught\n", 30)
    assert text == "rankwatch: this was the demo:\n           it was caught\n"


@given(
    st.lists(st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=60), min_size=1), st.integers(40, 200)
)
def test_no_word_is_lost_or_cut(words: list[str], columns: int) -> None:
    text = f"rankwatch: a run\n  cause      {' '.join(words)}\n"
    assert wrapped(text, columns).split() == text.split()


def test_a_file_has_the_lines_as_they_are() -> None:
    assert as_shown(REPORT, io.StringIO()) == REPORT
    assert as_shown(REPORT, None) == REPORT


def test_a_terminal_of_unknown_width_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()  # its size was never set: 0 columns
    try:
        with open(theirs, "w", closefd=False) as terminal:
            monkeypatch.setenv("NO_COLOR", "1")
            assert as_shown(REPORT, terminal) == REPORT
    finally:
        os.close(ours)
        os.close(theirs)
