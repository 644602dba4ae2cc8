"""Digests of parts of batches, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rankwatch.shared.cause import describe_module

from .as_json import number
from .closeup import DigestReading, PartDigest

_HEAD = ("batch", "step", "seconds", "frames", "headroom", "in")


def describe_place(place: DigestReading | None) -> str:
    """The reading, in words."""
    if place is None:
        return "a reading whose frame table is not kept"
    return f"{describe_module(place.spec)}, {place.reading.label}"


def describe_headroom(part: PartDigest) -> str:
    """How many times what it was the reading could be that comes nearest to its dtype's largest number."""
    return f"x{2.0**part.headroom:.3g}" if part.headroom < math.inf else "all zero"


def describe_bad(part: PartDigest) -> str:
    """``2 readings are inf or nan, first that of ...``; empty where none is."""
    if not part.bad:
        return ""
    many = f"{part.bad} readings are" if part.bad > 1 else "1 reading is"
    return f"{many} inf or nan, the first {describe_place(part.first_bad)}"


def lines(parts: Sequence[PartDigest]) -> list[str]:
    """One for each part, under one of names."""
    rows = [_HEAD, *map(_row, parts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    return ["  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows]


def to_dict(part: PartDigest) -> dict[str, Any]:
    return {
        "batch": part.batch,
        "optimizer_step": part.step,
        "started": part.started,
        "ended": part.ended,
        "first_frame": part.first_frame,
        "frames": part.frames,
        "headroom": number(part.headroom),
        "nearest": _place(part.nearest),
        "bad": part.bad,
        "first_bad": _place(part.first_bad),
    }


def _row(part: PartDigest) -> tuple[str, ...]:
    what = describe_place(part.nearest)
    what += f"; {describe_bad(part)}" if part.bad else ""
    seconds = f"{part.ended - part.started:.3g}"
    return str(part.batch), str(part.step), seconds, str(part.frames), describe_headroom(part), what


def _place(place: DigestReading | None) -> dict[str, Any] | None:
    if place is None:
        return None
    return {
        "frame": place.frame,
        "module": place.spec.module,
        "module_class": place.spec.module_class,
        "phase": place.spec.phase.name.lower(),
        "reading": place.reading.label,
        "dtype": place.reading.dtype,
    }
