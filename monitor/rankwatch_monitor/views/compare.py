"""Two batches compared: which readings differ, by how much, and which one is the first. Pure.

Frames are aligned by module, phase and call: a module's second call in one batch is compared with its second in the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankwatch.shared.frame import Frame, FrameSpec, Phase, Reading, State

DIVERGED = 1.5
"""The ratio from which two readings count as different: with different data, all readings differ by some percent."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A reading on both sides; None on a side without it. ``frame`` and ``call`` are the left side's, if it has the reading.

    ``ratio`` is the larger abs max divided by the smaller one; inf if only one of them is 0, inf or nan.
    """

    frame: int
    spec: FrameSpec
    call: int
    label: str
    left: Reading | None
    right: Reading | None
    ratio: float


@dataclass(frozen=True, slots=True)
class Diff:
    """``pairs`` are in the left side's order; at the end are the frames that only the right side has."""

    pairs: list[Pair]
    left_frames: int
    right_frames: int
    only_left: int
    only_right: int

    @property
    def first(self) -> Pair | None:
        """Where the sides first differ."""
        return next((pair for pair in self.pairs if pair.ratio >= DIVERGED), None)

    def largest(self, count: int) -> list[Pair]:
        """The ``count`` pairs that differ most; equal ones keep their order."""
        return sorted((pair for pair in self.pairs if pair.ratio >= DIVERGED), key=lambda pair: -pair.ratio)[:count]


def compare(left: Sequence[Frame], right: Sequence[Frame]) -> Diff:
    """Aligns the frames of two batches and compares their readings."""
    ours, theirs = dict(_numbered(left)), dict(_numbered(right))
    pairs = []
    for key, frame in [*ours.items(), *((key, frame) for key, frame in theirs.items() if key not in ours)]:
        mine, other = (_readings(side.get(key)) for side in (ours, theirs))
        pairs += [
            Pair(
                frame.position.frame, frame.spec, key[2], label, mine.get(label), other.get(label),
                _ratio(mine.get(label), other.get(label)),
            )
            for label in dict.fromkeys([*mine, *other])
        ]  # fmt: skip
    only = [len(these.keys() - those.keys()) for these, those in ((ours, theirs), (theirs, ours))]
    return Diff(pairs, len(left), len(right), *only)


def _numbered(frames: Sequence[Frame]) -> Iterator[tuple[tuple[str, Phase, int], Frame]]:
    calls: Counter[tuple[str, Phase]] = Counter()
    for frame in frames:
        what = frame.spec.module, frame.spec.phase
        yield (*what, calls[what]), frame
        calls[what] += 1


def _readings(frame: Frame | None) -> dict[str, Reading]:
    return {} if frame is None else {reading.label: reading for reading in frame.readings}


def _ratio(left: Reading | None, right: Reading | None) -> float:
    if left is None or right is None:
        return 1.0  # a frame that one side lacks is counted apart: it is no difference of numbers
    if left.state is not right.state:
        return math.inf
    if left.state is not State.FINITE and left.state is not State.NOT_FLOAT:
        return 1.0
    low, high = sorted((left.abs_max, right.abs_max))
    return 1.0 if low == high else math.inf if low == 0 else high / low
