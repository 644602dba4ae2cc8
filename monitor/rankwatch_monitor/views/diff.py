"""Two batches side by side: which two, and their comparison for people and for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rankwatch.errors import UsageError
from rankwatch.shared.cause import describe_module
from rankwatch.shared.frame import MEASURED, Frame, Reading
from rankwatch.shared.text import format_head, format_spans

from ..record.reader import RunRecord
from .compare import Diff, Pair

LINES = 20
"""Readings that are shown by default."""


class Side(NamedTuple):
    name: str
    frames: list[Frame]


def sides(records: Sequence[RunRecord], ranks: Sequence[int], batches: Sequence[int]) -> tuple[Side, Side]:
    """The two sides of a comparison.

    Args:
        records, ranks, batches: one or two of each, and two of at least one of them. Without a batch: the last one that
            is stored of both sides.

    Raises:
        UsageError: there are not two sides, or a batch is not stored.
        StoreError: a record cannot be read.
    """
    if max(map(len, (records, ranks, batches))) != 2:
        raise UsageError("a comparison has two sides: give two runs, --batch twice, or --rank twice")
    (run, rank), (other_run, other_rank) = (records[0], ranks[0]), (records[-1], ranks[-1])
    there, other_there = run.sent_batches(rank), other_run.sent_batches(other_rank)
    if not batches:
        common = set(there) & set(other_there)
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
    return Side(f"rank {rank}, batch {batch} of {record.run}", record.frames(rank, batch))


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
    shown = diff.largest(lines)
    rows = [f"{'ratio':>9} {'left':>9} {'right':>9}  abs max of"]
    rows += [f"{_ratio(pair):>9} {_number(pair.left):>9} {_number(pair.right):>9}  {_name(pair)}" for pair in shown]
    hidden = len(diff.largest(len(diff.pairs))) - len(shown)
    rows += [f"and {hidden} more that differ: --frames {hidden + len(shown)}"] if hidden else []
    return format_head("two batches side by side", fields) + "\n" + "\n".join(rows) + "\n"


def to_json(diff: Diff, left: str, right: str) -> str:
    """Everything that differs, as strict JSON: an inf or nan ratio or value is null."""
    body = {
        "schema": 1,
        "left": left,
        "right": right,
        "frames": {"left": diff.left_frames, "right": diff.right_frames},
        "only": {"left": diff.only_left, "right": diff.only_right},
        "first": None if diff.first is None else _pair(diff.first),
        "largest": [_pair(pair) for pair in diff.largest(len(diff.pairs))],
    }
    return json.dumps(body, indent=2, allow_nan=False) + "\n"


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "frame": pair.frame,
        "module": pair.spec.module,
        "class": pair.spec.module_class,
        "phase": pair.spec.phase.name.lower(),
        "call": pair.call,
        "label": pair.label,
        "ratio": pair.ratio if math.isfinite(pair.ratio) else None,
        "left": _side_to_dict(pair.left),
        "right": _side_to_dict(pair.right),
    }


def _side_to_dict(reading: Reading | None) -> dict[str, Any] | None:
    if reading is None:
        return None
    low, high = (value if math.isfinite(value) else None for value in (reading.abs_min, reading.abs_max))
    return {"abs_min": low, "abs_max": high, "state": reading.state.name.lower()}


def _name(pair: Pair) -> str:
    call = f", call {pair.call}" if pair.call else ""
    return f"{describe_module(pair.spec)}{call}, {pair.label}"


def _number(reading: Reading | None) -> str:
    if reading is None:
        return "-"
    return f"{reading.abs_max:.2e}" if reading.state in MEASURED else reading.state.name.lower()


def _ratio(pair: Pair) -> str:
    return f"x{pair.ratio:.3g}" if math.isfinite(pair.ratio) else "inf"
