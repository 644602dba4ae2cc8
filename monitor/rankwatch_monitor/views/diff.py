"""Two batches side by side, for people and for programs."""

from __future__ import annotations

import json
import math
from typing import Any

from rankwatch.shared.cause import PHASE_WORDS, describe_module
from rankwatch.shared.frame import MEASURED, Phase, Reading
from rankwatch.shared.text import format_head

from .compare import Diff, Pair

LINES = 20
"""Readings that are shown unless asked otherwise."""


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
    """All that differs, as strict JSON: a ratio or value that is inf or nan is null."""
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
        "left": _side(pair.left),
        "right": _side(pair.right),
    }


def _side(reading: Reading | None) -> dict[str, Any] | None:
    if reading is None:
        return None
    low, high = (value if math.isfinite(value) else None for value in (reading.abs_min, reading.abs_max))
    return {"abs_min": low, "abs_max": high, "state": reading.state.name.lower()}


def _name(pair: Pair) -> str:
    phase = f" ({PHASE_WORDS[pair.spec.phase]})" if pair.spec.phase is not Phase.FORWARD else ""
    call = f", call {pair.call}" if pair.call else ""
    return f"{describe_module(pair.spec)}{phase}{call}, {pair.label}"


def _number(reading: Reading | None) -> str:
    if reading is None:
        return "-"
    return f"{reading.abs_max:.2e}" if reading.state in MEASURED else reading.state.name.lower()


def _ratio(pair: Pair) -> str:
    return f"x{pair.ratio:.3g}" if math.isfinite(pair.ratio) else "inf"
