"""The report on a screen: what is not as it should be, in as few lines as a glance takes. ``--all`` shows all."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from rankwatch.shared.system.on_terminal import COMMAND, wrapped
from rankwatch.shared.words.text import FIELD_INDENT, format_head

from ..decide.core.report import Report
from ..decide.trip.verdict import Certainty, Verdict

Fields: TypeAlias = list[tuple[str, str]]

COLUMNS = 80
"""Of the terminal that most have."""

OF_A_VERDICT, OF_AN_END = 12, 10
"""Lines: half of a terminal of 24 rows, which has the last frames and torchrun's summary too."""

FIRST = "noticed", "looked", "close-up", "refused", "dropped", "unwatched", "also"
"""What makes room first, in this order."""

NEXT = (
    "left out", "no skip", "began", "handed", "failed", "lost", "stacks", "calls", "stalled", "replicas", "precision", "recurs",
    "abort", "gaps", "state",
)  # fmt: skip
"""And once the others are short. Who, how certainly, where, why, what to do, and the commands stay."""

IN_A_ROW = "certainty", *NEXT
"""Half of them is worth more than none: they are cut to one row before one of them makes room."""

MOST_ROWS = 3
"""Rows of one field, before fields make room for each other."""

MORE = " ..."


def usual(report: Report) -> set[str]:
    """The fields that say what is as it should be."""
    closeup, compared, others = report.closeup, report.compared, report.others
    found = {
        "recurs": closeup is not None and closeup.recurred == closeup.of and not closeup.is_eager,
        "began": report.origin is not None and report.origin.began is None,
        "replicas": compared is not None and compared.equal and not any(one.is_split for one in report.desync),
        "certainty": _is_certain(report.verdict),
        "abort": all(row.acknowledged for row in others),
    }
    return {label for label, holds in found.items() if holds}


def _is_certain(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.certainty is Certainty.COMPLETE and not verdict.uneven


def fitted(title: str, fields: Iterable[tuple[str, str]], most: int) -> str:
    """The head of a report in at most so many rows of COLUMNS, where the commands in it leave them."""
    whole = list(fields)
    shorter: Fields = []
    for shorter in _shortened(whole):
        if _rows(title, shorter) <= most:
            return format_head(title, _whole_again(title, shorter, dict(whole), most))
    return format_head(title, shorter)


def _whole_again(title: str, fields: Fields, whole: dict[str, str], most: int) -> Fields:
    """These fields, with the whole text of each that was cut while others stood there that have made room since."""
    for place, (label, _) in enumerate(fields):
        longer = [*fields[:place], (label, whole[label]), *fields[place + 1 :]]
        if _rows(title, longer) <= most:
            fields = longer
    return fields


def _shortened(fields: Fields) -> Iterator[Fields]:
    """These fields, and then ever fewer and shorter ones."""
    yield fields
    yield (fields := [(label, clip(text, MOST_ROWS)) for label, text in fields])
    yield from (rest := list(_without(fields, FIRST)))
    fields = rest[-1]
    yield (fields := [(label, clip(text, MOST_ROWS - 1)) for label, text in fields])
    yield (fields := [(label, _brief(text) if label == "operator" else text) for label, text in fields])
    yield (fields := [(label, clip(text, 1) if label in IN_A_ROW else text) for label, text in fields])
    yield from (rest := list(_without(fields, NEXT)))
    yield [(label, clip(text, 1)) for label, text in rest[-1]]


def _brief(operator: str) -> str:
    """Without the text of its line, and of the path what says which file it is."""
    return re.sub(r"(?<=\s)/\S*/(?=[^/\s]+/[^/\s]+:\d)", ".../", operator.partition(": ")[0])


def _without(fields: Fields, labels: Sequence[str]) -> Iterator[Fields]:
    """The first field leads: it stays."""
    for label in labels:
        yield (fields := [*fields[:1], *(field for field in fields[1:] if field[0] != label)])


def clip(text: str, rows: int) -> str:
    """The beginning of a field's text, in so many rows; a command is whole. Lines that do not all fit are told in a row."""
    wrap = partial(textwrap.wrap, width=COLUMNS - FIELD_INDENT - 2 - len(MORE), break_on_hyphens=False)  # 2: an indent
    lines = text.split("\n")
    if sum(len(wrap(line)) for line in lines) <= rows or text.startswith(COMMAND):
        return text
    told = " ".join("; ".join(lines).split())
    end, wrapped_rows = 0, wrap(told)
    for row in wrapped_rows[:rows]:
        end = told.index(row, end) + len(row)  # a path that is longer than a row is broken without a space
    return told[:end] + (MORE if len(wrapped_rows) > rows else "")


def _rows(title: str, fields: Fields) -> int:
    lines = wrapped(format_head(title, fields), COLUMNS).rstrip("\n").split("\n")
    return sum(1 if line[FIELD_INDENT:].startswith(COMMAND) else max(1, -(-len(line) // COLUMNS)) for line in lines)
