"""Colours stand on a terminal alone, and never where NO_COLOR is set; without them the text is the same."""

from __future__ import annotations

import io
import re

import pytest

from rankwatch.shared.system.colour import coloured

REPORT = """\
Detected inf/nan during batch_number=25
abs min  abs max  metadata
                  block.wo Linear
5.00e-01 2.85e+02 output
0.00e+00      inf output
     nan      nan information
            None input[1]

rankwatch: first inf in run demo-0
  culprit    rank 1 of 2
             block.wo (Linear), output: inf
  try        run it in float32
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def lines_in(colour: str, text: str) -> list[str]:
    return re.findall(rf"\x1b\[{colour}m(.*?)\x1b\[0m", text)


def test_what_is_bad_is_red_and_what_labels_is_bold() -> None:
    text = coloured(REPORT, Terminal())
    assert lines_in("1;31", text) == [
        "0.00e+00      inf output",
        "     nan      nan information",
        "rankwatch: first inf in run demo-0",
    ]
    assert lines_in("1", text) == ["culprit", "try"]
    assert re.sub(r"\x1b\[[\d;]*m", "", text) == REPORT


def test_a_run_that_finished_is_not_red() -> None:
    finished = "rankwatch: run a finished: 2 ranks"
    assert lines_in("1", coloured(finished, Terminal())) == [finished]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_the_environment_turns_them_off(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert coloured(REPORT, Terminal()) == REPORT


def test_a_file_and_a_closed_stream_have_none() -> None:
    closed = Terminal()
    closed.close()
    for stream in (io.StringIO(), closed, None):
        assert coloured(REPORT, stream) == REPORT
