"""Digests of parts of batches, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rankwatch.shared.types.frame import DTYPE_MAX, NARROW_DTYPES, NO_LOSS, NO_NORM
from rankwatch.shared.words.text import describe_module

from ...record.numbers.layout import NO_MEMORY
from ..as_json import spec_to_dict
from ..jsonable import pick
from .details import DigestReading, PartDigest


def describe_reading(reading: DigestReading | None) -> str:
    if reading is None:
        return "a reading whose frame table is not stored"
    return f"{describe_module(reading.spec)}, {reading.row.label}"


def describe_headroom(part: PartDigest) -> str:
    """``x12``: the largest number of the dtype, divided by the reading nearest to it; where that says nothing, its abs max."""
    if part.headroom == math.inf:
        return "all zero"
    limit = _far_end(part)
    return f"x{2.0**part.headroom:.3g}" if limit is None else f"{limit / 2.0**part.headroom:.2e}"


def name_headroom(parts: Sequence[PartDigest]) -> str:
    """What ``describe_headroom`` describes."""
    return "abs max" if parts and all(_far_end(part) is not None for part in parts) else "headroom"


def _far_end(part: PartDigest) -> float | None:
    """The largest number of the dtype, where it is too far away for a headroom to say something."""
    dtype = part.nearest.row.dtype if part.nearest is not None else ""
    return None if dtype in NARROW_DTYPES else DTYPE_MAX.get(dtype)


def describe_bad(part: PartDigest) -> str:
    """``2 readings are inf or nan, the first ...``; empty if there are none."""
    if not part.bad:
        return ""
    many = f"{part.bad} readings are" if part.bad > 1 else "1 reading is"
    return f"{many} inf or nan, the first {describe_reading(part.first_bad)}"


def lines(parts: Sequence[PartDigest]) -> list[str]:
    """A line for each part, under a line of names."""
    head = ("batch", "step", "seconds", "frames", name_headroom(parts), "in")
    rows = [head, *map(_row, parts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    return ["  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows]


def to_dict(part: PartDigest) -> dict[str, Any]:
    return {
        "batch": part.batch,
        "optimizer_step": part.step,
        **pick(part, "started ended first_frame frames headroom"),
        "nearest": _reading(part.nearest),
        "bad": part.bad,
        "first_bad": _reading(part.first_bad),
        "loss": None if part.loss == NO_LOSS else part.loss,
        "gradient_norm": None if part.norm == NO_NORM else part.norm,
        "memory_mib": None if part.memory == NO_MEMORY else part.memory,
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
        **spec_to_dict(reading.spec),
        "reading": reading.row.label,
        "dtype": reading.row.dtype,
    }
