"""Digests of parts of batches, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rankwatch.shared.cause import describe_module

from .as_json import number
from .closeup import DigestReading, PartDigest

_HEAD = ("batch", "step", "seconds", "frames", "headroom", "in")


def describe_reading(reading: DigestReading | None) -> str:
    if reading is None:
        return "a reading whose frame table is not stored"
    return f"{describe_module(reading.spec)}, {reading.row.label}"


def describe_headroom(part: PartDigest) -> str:
    """The largest number of the dtype, divided by the reading nearest to it."""
    return f"x{2.0**part.headroom:.3g}" if part.headroom < math.inf else "all zero"


def describe_bad(part: PartDigest) -> str:
    """``2 readings are inf or nan, the first ...``; empty if there are none."""
    if not part.bad:
        return ""
    many = f"{part.bad} readings are" if part.bad > 1 else "1 reading is"
    return f"{many} inf or nan, the first {describe_reading(part.first_bad)}"


def lines(parts: Sequence[PartDigest]) -> list[str]:
    """A line for each part, under a line of names."""
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
        "nearest": _reading(part.nearest),
        "bad": part.bad,
        "first_bad": _reading(part.first_bad),
    }


def _row(part: PartDigest) -> tuple[str, ...]:
    what = describe_reading(part.nearest)
    what += f"; {describe_bad(part)}" if part.bad else ""
    seconds = f"{part.ended - part.started:.3g}"
    return str(part.batch), str(part.step), seconds, str(part.frames), describe_headroom(part), what


def _reading(reading: DigestReading | None) -> dict[str, Any] | None:
    if reading is None:
        return None
    return {
        "frame": reading.frame,
        "module": reading.spec.module,
        "module_class": reading.spec.module_class,
        "phase": reading.spec.phase.name.lower(),
        "reading": reading.row.label,
        "dtype": reading.row.dtype,
    }
