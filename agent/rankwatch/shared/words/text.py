"""Frames as text, in the format of the Hugging Face detector; culprits, positions and ranks in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..types.frame import MEASURED, NO_STAGE, Frame, FrameSpec, Phase, Position, Reading, State
from ..types.trip import Trip

TITLE, FIELD_INDENT = "rankwatch: ", 13
"""What a report's head begins with, and the columns before the text of its fields."""

PHASE_WORDS = {Phase.RECOMPUTE: "recomputed", Phase.BACKWARD: "backward"}
"""The mark of a frame that is no plain forward."""

_INDENT = " " * 17
COLUMNS = f"{'abs min':8} {'abs max':8} metadata"
"""The head of a list of readings."""


def format_reading(reading: Reading) -> str:
    """One line: abs min and abs max in 8 columns each, then the label. Without numbers: the state in words."""
    if reading.state in MEASURED:
        return f"{reading.abs_min:8.2e} {reading.abs_max:8.2e} {reading.label}"
    words = "None" if reading.state is State.NONE else reading.state.word
    return f"{words:>17} {reading.label}"


def format_module(spec: FrameSpec) -> str:
    """The line above a frame's readings, with the phase unless it is a plain forward."""
    phase = f" ({PHASE_WORDS[spec.phase]})" if spec.phase in PHASE_WORDS else ""
    return f"{_INDENT} {spec.module} {spec.module_class}{phase}"


def format_frame(frame: Frame, before: Frame | None = None) -> str:
    """A frame's lines; above the first frame of a batch, the batch's header. ``before``: the frame above it."""
    lines = [format_module(frame.spec)]
    is_other = before is not None and before.position[:2] != frame.position[:2]
    if is_other or frame.position.frame == 0:  # of some batches the root has the only frame, and not the number 0
        lines[:0] = [f"\n\n{_INDENT} *** Starting {_batch_name(frame.position)} ***", COLUMNS]
    lines += map(format_reading, frame.readings)
    return "\n".join(lines)


def format_trace(frames: Sequence[Frame]) -> str:
    """Frames, one below the other."""
    return "\n".join(map(format_frame, frames, [None, *frames]))


def format_dump(frames: Sequence[Frame]) -> str:
    """The last frames before a trip, and the three empty lines with which the Hugging Face detector ends."""
    batch, evaluation, _ = frames[-1].position
    where = (
        f"during batch_number={batch}" if batch >= 0 and not evaluation else f"in {describe_position(frames[-1].position)}"
    )
    what = "forward frames" if all(frame.spec.phase is Phase.FORWARD for frame in frames) else "frames"
    head = f"\nDetected inf/nan {where}\nLast {len(frames)} {what}:\n{COLUMNS}\n"
    return head + format_trace(frames) + "\n" * 4


def format_head(title: str, fields: Iterable[tuple[str, str]]) -> str:
    """The head of a report: a title, then labelled fields. Further lines of a field are indented below its first line."""
    lines = [TITLE + title]
    for label, text in fields:
        first, *rest = text.split("\n")
        lines.append(f"  {label:<{FIELD_INDENT - 3}} {first}")
        lines += [" " * FIELD_INDENT + line for line in rest]
    return "\n".join(lines) + "\n"


def describe_trip(rank: str, trip: Trip, frames_in_batch: int | None = None) -> str:
    """The culprit in two lines, for the head of a report."""
    of = "" if frames_in_batch is None else f" of {frames_in_batch}"
    return (
        f"{rank}, {describe_position(trip.position)} (optimizer step {trip.optimizer_step}), "
        f"frame {trip.position.frame}{of}\n{_bad_reading(trip)}"
    )


def describe_module(spec: FrameSpec) -> str:
    """The module as reports name it: qualified name (``(root)`` for the root), class, further names, phase."""
    aliases = f", also {', '.join(spec.aliases)}" if spec.aliases else ""
    phase = f", {PHASE_WORDS[spec.phase]}" if spec.phase in PHASE_WORDS else ""
    return f"{spec.module or '(root)'} ({spec.module_class}{aliases}{phase})"


def describe_position(position: Position) -> str:
    """The batch in words: ``batch 149``, or ``eval 2 after batch 149``."""
    if not position.eval:
        return f"batch {position.batch}" if position.batch >= 0 else "calls before the first batch"
    return f"eval {position.eval} " + (f"after batch {position.batch}" if position.batch >= 0 else "before the first batch")


def describe_culprit(rank: str, trip: Trip) -> str:
    """The culprit in one line, for exceptions, stderr and error files. ``rank``: as from ``describe_rank``."""
    return f"{rank}, {describe_position(trip.position)}: {_bad_reading(trip)}"


def _bad_reading(trip: Trip) -> str:
    return f"{describe_module(trip.frame.spec)}, {trip.culprit.label}: {trip.culprit.state.word}"


def describe_rank(rank: int, world_size: int, host: str, local_rank: int, stage: int = NO_STAGE) -> str:
    part = f", stage {stage}" if stage != NO_STAGE else ""
    return f"rank {rank} of {world_size} ({host}, local rank {local_rank}{part})"


def name_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """``rank 3``, ``ranks 1, 2, 5``, or the first few and how many more."""
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"


def name_spans(ranks: Collection[int], most: int | None = 8) -> str:
    """``rank 3``, ``ranks 0-3, 8``, or the first few spans and how many more ranks."""
    return f"rank{'s' if len(ranks) != 1 else ''} {format_spans(ranks, most)}"


def format_spans(numbers: Iterable[int], most: int | None = 8) -> str:
    """``0-3, 8``, or the first few spans and how many more numbers; ``most`` None: all."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    most = len(spans) if most is None else most
    hidden = sum(map(len, spans[most:]))
    shown = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans[:most])
    return f"{shown} and {hidden} more" if hidden else shown


def _batch_name(position: Position) -> str:
    is_batch = position.batch >= 0 and not position.eval
    return f"batch number={position.batch}" if is_batch else describe_position(position)
