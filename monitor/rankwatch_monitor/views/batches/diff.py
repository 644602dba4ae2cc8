"""Two batches side by side: which two, and their comparison for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from rankwatch.errors import UsageError
from rankwatch.shared.types.frame import MEASURED, Frame, Kind, Reading
from rankwatch.shared.words.text import describe_module, format_head, format_spans

from ...decide.core.report import Report
from ...record import replay
from ...record.reader import RunRecord
from ..jsonable import document, pick
from .compare import Diff, Difference, Pair

LINES = 20
"""Readings that are shown by default."""

NAMED = 3
"""Readings of one kind that are named below the others."""

MOST_ASKED = 64
"""Ranks that are asked for a batch."""


ASIDES = {
    Difference.BAD_INPUT: "inputs that are inf or nan on one side, or other than inf or nan on the other",
    Difference.ZERO: "zero, or next to it, on one side",
    Difference.NO_VALUES: "integers, booleans, masks and shares of zeros",
    Difference.ONE_SIDED: "without numbers on one side",
}
"""Readings that differ in a way of which a ratio says nothing: they stand below the others."""


class NothingToCompare(UsageError):
    """There is no second side: the text says what is not stored, and not how to ask for another one."""


class Side(NamedTuple):
    name: str
    frames: list[Frame]
    rank: int
    batch: int


def sides(records: Sequence[RunRecord], ranks: Sequence[int], batches: Sequence[int]) -> tuple[Side, Side]:
    """The two sides of a comparison.

    Args:
        records, ranks, batches: one or two of each, and two of at least one of them. Without a batch: the last one that
            is stored of both sides. With one of each: see ``choose``.

    Raises:
        NothingToCompare: nothing is stored that goes with what was given.
        UsageError: there are not two sides, or a batch is not stored.
        StoreError: a record cannot be read.
    """
    if max(map(len, (records, ranks, batches))) < 2:
        ranks, batches = choose(records[0], replay.take(records[0]).report, ranks, batches)
        if max(len(ranks), len(batches)) < 2:
            if not known_batches(records[0], ranks[0]):
                raise NothingToCompare(f"there is nothing to compare: no batch of rank {ranks[0]} is stored as it sent it")
            raise NothingToCompare(
                f"there is nothing to compare batch {batches[0]} of rank {ranks[0]} with: no earlier batch of this rank is "
                "stored, nor this batch of another rank"
            )
    if max(map(len, (records, ranks, batches))) != 2:
        raise UsageError("a comparison has two sides: give two runs, --batch twice, or --rank twice")
    ranks = ranks or [0]
    (run, rank), (other_run, other_rank) = (records[0], ranks[0]), (records[-1], ranks[-1])
    there, other_there = known_batches(run, rank), known_batches(other_run, other_rank)
    if not batches:
        whole = set(run.sent_batches(rank)) & set(other_run.sent_batches(other_rank))
        common = whole or set(there) & set(other_there)  # of the batch of a trip there are only its last frames
        if not common:
            folder, other_folder = run.path.parent, other_run.path.parent
            raise UsageError(
                f"no batch is kept whole of both rank {rank} of {folder} and rank {other_rank} of {other_folder}"
            )
        batches = [max(common)]
    return _side(run, rank, batches[0], there), _side(other_run, other_rank, batches[-1], other_there)


def _side(record: RunRecord, rank: int, batch: int, there: list[int]) -> Side:
    if batch not in there:
        others = f"kept are {format_spans(there)}" if there else "none of this rank is"
        raise UsageError(f"batch {batch} of rank {rank} is not kept whole in {record.path.parent}: {others}")
    frames = record.frames(rank, batch)
    frames += [frame for part in record.tripped(rank) if part.batch == batch for frame in part.frames()]
    return Side(f"rank {rank}, batch {batch} of {record.run}", frames, rank, batch)


def known_batches(record: RunRecord, rank: int) -> list[int]:
    """The batches of a rank that can be compared: those stored as it sent them, and the last frames of the one that tripped."""
    return sorted({*record.sent_batches(rank), *(part.batch for part in record.tripped(rank))})


def is_possible(record: RunRecord, report: Report) -> bool:
    """Whether something is stored with which the culprit's batch can be compared."""
    return max(map(len, choose(record, report, [], []))) > 1


def choose(record: RunRecord, report: Report, ranks: Sequence[int], batches: Sequence[int]) -> tuple[list[int], list[int]]:
    """The ranks and batches that are worth a comparison, where fewer than two of each were given.

    Of a rank, the given batch or the one in which it tripped, against the last one before the trouble began. Where none is
    stored before it, another rank in the same batch. Without ranks: the culprit.
    """
    tripped = {part.rank: part.batch for part in reversed(record.tripped())}
    culprit = report.verdict.tripped if report.verdict else min(tripped, key=lambda rank: (tripped[rank], rank), default=0)
    rank = ranks[0] if ranks else culprit
    known = known_batches(record, rank)
    at = batches[0] if batches else tripped.get(rank, max(known, default=0))
    began = report.origin.began.batch if report.origin and report.origin.began and not batches and rank in tripped else at
    if before := [batch for batch in known if batch < min(at, began)] or [batch for batch in known if batch < at]:
        return [rank], [before[-1], at]
    others = (other for other in range(report.world_size) if other != rank and known)
    other = next((other for other in islice(others, MOST_ASKED) if at in known_batches(record, other)), None)
    return ([rank], [at]) if other is None else ([other, rank], [at])


def render(diff: Diff, left: str, right: str, lines: int = LINES) -> str:
    """As text, newline at its end. ``left`` and ``right`` name the sides."""
    frames = f"{diff.left_frames} and {diff.right_frames}"
    for count, side in ((diff.only_left, left), (diff.only_right, right)):
        frames += f"; {count} only in {side}" if count else ""
    fields = [("left", left), ("right", right), ("frames", frames)]
    first = diff.first
    if first is None:
        return format_head("no reading differs by more than half", fields)
    fields.append(("first", f"frame {first.frame}, {_name(first)}: {_number(first.left)} and {_number(first.right)}"))
    found = diff.largest(len(diff.pairs))
    measured = [pair for pair in found if pair.difference not in ASIDES]
    shown = measured[:lines]
    rows = [f"{'ratio':>9} {'left':>9} {'right':>9}  abs max of"]
    rows += [f"{_ratio(pair):>9} {_number(pair.left):>9} {_number(pair.right):>9}  {_name(pair)}" for pair in shown]
    hidden = len(measured) - len(shown)
    rows += [f"and {hidden} more that differ: --frames {hidden + len(shown)}"] if hidden else []
    rows += [_aside(kind, [pair for pair in found if pair.difference is kind]) for kind in ASIDES]
    rows = [row for row in rows if row] if measured else [row for row in rows[1:] if row]
    return format_head("two batches side by side", fields) + "\n" + "\n".join(rows) + "\n"


def _aside(kind: Difference, pairs: Sequence[Pair]) -> str:
    """One line for the readings that differ in this way; empty without any."""
    if not pairs:
        return ""
    names = [f"{_name(pair)} ({_number(pair.left)} and {_number(pair.right)})" for pair in pairs[:NAMED]]
    more = f" and {len(pairs) - NAMED} more" if len(pairs) > NAMED else ""
    return f"{ASIDES[kind]}: {'; '.join(names)}{more}"


def to_json(diff: Diff, left: str, right: str) -> str:
    """As strict JSON: an inf or nan ratio or value is null."""
    return document(to_dict(diff, left, right))


def to_dict(diff: Diff, left: str, right: str) -> dict[str, Any]:
    """Everything that differs."""
    return {
        "schema": 1,
        "left": left,
        "right": right,
        "frames": {"left": diff.left_frames, "right": diff.right_frames},
        "only": {"left": diff.only_left, "right": diff.only_right},
        "first": None if diff.first is None else _pair(diff.first),
        "largest": [_pair(pair) for pair in diff.largest(len(diff.pairs))],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "frame": pair.frame,
        "module": pair.spec.module,
        "class": pair.spec.module_class,
        "phase": pair.spec.phase,
        **pick(pair, "call label difference ratio"),
        "left": _numbers(pair.left),
        "right": _numbers(pair.right),
    }


def _numbers(reading: Reading | None) -> dict[str, Any] | None:
    return None if reading is None else pick(reading, "abs_min abs_max state")


def _name(pair: Pair) -> str:
    reading = pair.left or pair.right  # a loss has a frame of its own, which is no call of the root
    call = f", call {pair.call}" if pair.call and reading is not None and reading.kind is not Kind.LOSS else ""
    return f"{describe_module(pair.spec)}{call}, {pair.label}"


def _number(reading: Reading | None) -> str:
    if reading is None:
        return "-"
    return f"{reading.abs_max:.2e}" if reading.state in MEASURED else reading.state.name.lower()


def _ratio(pair: Pair) -> str:
    return f"x{pair.ratio:.3g}" if math.isfinite(pair.ratio) else "inf"
