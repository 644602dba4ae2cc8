"""Texts from outside are safe to print: what is escaped, what stays, and that it is done once."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from rankwatch.shared.printable import MARGIN, cleaned, one_line, paragraph, printable
from rankwatch.shared.types.fields import MAX_NAME
from rankwatch.shared.types.frame import FrameSpec, FrameTable, Kind, ReadingSpec

ORDINARY = "Größe", "解码器.層", "モデル", "😀 ok", "❤️", "a\u3000b", "naïve e\u0301", "C:\\new\\x1b", "blocks.0 [x]"

ESCAPED = {
    "\x1b[31mred": "\\x1b[31mred",
    "a\nrankwatch: run finished": "a\\nrankwatch: run finished",
    "a\r\tb": "a\\r\\tb",
    "\x00\x7f\x85\x9b": "\\x00\\x7f\\x85\\x9b",
    "a\u2028b\u2029c": "a\\u2028b\\u2029c",
    "\u202etxt\u2066x\u2069": "\\u202etxt\\u2066x\\u2069",
    "pay\u200bload\ufeff\u00ad\u200d": "pay\\u200bload\\ufeff\\xad\\u200d",
    "\ud800\udcff": "\\ud800\\udcff",
    "\u0378\ue000": "\\u0378\\ue000",
    "\u3164\U000e0041\U000e0100": "\\u3164\\U000e0041\\U000e0100",
}


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_letters_stay(text: str) -> None:
    assert printable(text) == paragraph(text) == text


@pytest.mark.parametrize("text", ESCAPED)
def test_what_cannot_be_seen_is_escaped(text: str) -> None:
    assert printable(text) == ESCAPED[text]


def test_further_lines_of_a_text_have_a_margin() -> None:
    assert (
        paragraph("ValueError: a\n\tb\r\n\nrankwatch: run \x1b[2J\n")
        == "ValueError: a\n| \tb\n| \n| rankwatch: run \\x1b[2J"
    )
    assert one_line(paragraph("a\nb\tc")) == "a | b c"


def test_names_are_cleaned_at_any_depth() -> None:
    trip = cleaned(makers.trip(module="\x1b[2J", before=(makers.frame(module="a\nb"),)))
    assert [frame.spec.module for frame in trip.frames] == ["a\\nb", "\\x1b[2J"]
    assert cleaned({"a\n": ["b\r", (1, None, 2.5, b"\n")]}) == {"a\\n": ["b\\r", (1, None, 2.5, b"\n")]}


any_text = st.text(st.characters(exclude_categories=()) | st.sampled_from("\n\r\t\x1b\u2028\u202e|\\ "))


@given(text=any_text, limit=st.integers(0, 40))
def test_any_text_is_printable_bounded_and_escaped_once(text: str, limit: int) -> None:
    name, lines = printable(text, limit), paragraph(text, limit)
    assert all(letter.isprintable() or unicodedata.category(letter) == "Zs" for letter in name)
    assert all(letter in "\n\t" or letter.isprintable() or unicodedata.category(letter) == "Zs" for letter in lines)
    assert max(len(name), len(lines)) <= limit
    assert printable(name, limit) == name
    assert paragraph(lines, limit) == lines
    assert all((line + " ").startswith(MARGIN) for line in lines.split("\n")[1:])


@given(st.lists(any_text, min_size=3, max_size=3))
def test_a_table_has_the_same_id_before_and_after_it_was_sent(names: list[str]) -> None:
    def table(module: str, cls: str, label: str) -> FrameTable:
        return FrameTable((FrameSpec(module, cls, (ReadingSpec(Kind.OUTPUT, label, "float32"),), (label,) * 17),))

    long = [name * 200 for name in names]
    for some in (names, long):
        assert table(*some).id == table(*(printable(name, MAX_NAME) for name in some)).id
