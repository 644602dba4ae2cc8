"""One batch of a rank, frame by frame as the rank sent it, for people and for programs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from rankwatch.shared.types.frame import Frame, State
from rankwatch.shared.words.text import COLUMNS, describe_rank, format_head, format_module, format_reading, format_trace

from ..as_json import SCHEMA, frame_to_dict, run_to_dict, spec_to_dict
from ..jsonable import document, pick
from . import digests
from .details import BatchDetails, SpanFrame, SpanReading

_YEAR_10000 = 253402300800.0


def render(details: BatchDetails, frames: int) -> str:
    """As text, newline at its end: the last ``frames`` frames."""
    row, report = details.row, details.report
    name = describe_rank(row.rank, report.world_size, row.host, row.local_rank, row.stage)
    title = f"batch {details.batch} of {name}, run {report.run}"
    text = format_head(title, [*_digest(details), ("frames", _frames(details, frames))])
    if details.frames:
        return text + "\n" + _columns(details.frames[-frames:]) + format_trace(details.frames[-frames:]).lstrip("\n") + "\n"
    if details.spans:
        shown = "\n".join(map(_span, details.spans[-frames:]))
        return text + f"\n{COLUMNS} (rank of the abs max, or with the nan)\n{shown}\n"
    return text


def to_json(details: BatchDetails, frames: int) -> str:
    """As strict JSON. ``frames`` are the rank's frames; ``envelope`` is shown if none of them is stored."""
    before, after = _around(details)
    body = {
        "schema": SCHEMA,
        "run": run_to_dict(details.report),
        "rank": details.row.rank,
        "batch": details.batch,
        "digests": [digests.to_dict(part) for part in details.parts],
        "frames_kept": len(details.frames),
        "frames_by_trip": details.by_trip,
        "frames": [frame_to_dict(frame) for frame in details.frames[-frames:]],
        "nearest_as_sent": {"before": before, "after": after},
        "envelope": [] if details.frames else [_span_to_dict(frame) for frame in details.spans[-frames:]],
    }
    return document(body)


def _digest(details: BatchDetails) -> list[tuple[str, str]]:
    if not details.parts:
        return []
    first, last = details.parts[0], details.parts[-1]
    nearest = min(details.parts, key=lambda part: part.headroom)
    fields = [
        ("step", f"optimizer step {first.step}, {_when(first.started)}, {last.ended - first.started:.3g} s"),
        (
            digests.name_headroom([nearest]),
            f"{digests.describe_headroom(nearest)} in {digests.describe_reading(nearest.nearest)}",
        ),
    ]
    return fields + [("bad", digests.describe_bad(part)) for part in details.parts if part.bad]


def _when(seconds: float) -> str:
    if not 0 <= seconds < _YEAR_10000:
        return f"begun at {seconds:g}"
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("begun %Y-%m-%d %H:%M:%S UTC")


def _frames(details: BatchDetails, frames: int) -> str:
    """Which frames are shown, and where they come from."""
    if details.frames:
        there = len(details.frames)
        text = f"the last {min(frames, there)} of {there}" if frames < there else f"all {there}"
        if details.by_trip == there:
            return f"{text} that the rank sent with its trip; it never sent the others"
        by_trip = f"; the last {details.by_trip} came with its trip" if details.by_trip else ""
        return f"{text}, as the rank sent them{by_trip}"
    near = [str(batch) for batch in _around(details) if batch is not None]
    nearest = f"the nearest stored: {' and '.join(near)}" if near else "no other batch of this rank is stored either"
    text = f"not stored as the rank sent them; {nearest}"
    if not details.spans:
        return f"{text}; the envelope over all ranks is not stored either"
    there = len(details.spans)
    return f"{text}\n{f'the last {frames} of' if frames < there else 'all'} {there} over all ranks instead"


def _around(details: BatchDetails) -> tuple[int | None, int | None]:
    """The nearest batches before and after this one that are stored as the rank sent them."""
    stored = details.stored
    at = bisect_left(stored, details.batch)
    after = [batch for batch in stored[at : at + 2] if batch > details.batch]
    return (stored[at - 1] if at else None), (after[0] if after else None)


def _columns(frames: Sequence[Frame]) -> str:
    """The head of the columns; a trace that begins with frame 0 has it already."""
    return "" if frames[0].position.frame == 0 else f"{COLUMNS}\n"


def _span(frame: SpanFrame) -> str:
    return "\n".join([format_module(frame.spec), *map(_span_reading, frame.readings)])


def _span_reading(span: SpanReading) -> str:
    rank = span.state_rank if span.reading.state in (State.INF, State.NAN) else span.high_rank
    return format_reading(span.reading) + (f" ({rank})" if rank is not None else "")


def _span_to_dict(frame: SpanFrame) -> dict[str, Any]:
    return {
        "index": frame.frame,
        **spec_to_dict(frame.spec),
        "ranks": frame.ranks,
        "readings": [
            {
                **pick(span.reading, "label kind dtype"),
                "abs_min": None if span.low_rank is None else span.reading.abs_min,
                "abs_min_rank": span.low_rank,
                "abs_max": None if span.high_rank is None else span.reading.abs_max,
                "abs_max_rank": span.high_rank,
                "state": span.reading.state,
                "state_rank": span.state_rank,
            }
            for span in frame.readings
        ],
    }
