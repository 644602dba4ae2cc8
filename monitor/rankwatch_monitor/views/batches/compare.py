"""Two batches compared: which readings differ, by how much, and which one is the first. Pure.

Frames are aligned by module, phase and call: a module's second call in one batch is compared with its second in the other.
A ratio is no measure of everything: one to zero is infinite, and says less than a factor of ten in an output. So what
differs is sorted by its kind first, and by its ratio within one kind.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rankwatch.shared.types.frame import DTYPE_MAX, Frame, FrameSpec, Kind, Phase, Reading, State
from rankwatch.shared.types.notice import ZEROS

DIVERGED = 1.5
"""The ratio from which two readings count as different: with different data, all readings differ by some percent."""

NEGLIGIBLE = 2.0**-24
"""A number so much smaller than the usual one of its kind changes nothing, as a zero: float32 has 24 bits."""

_GIVEN = frozenset({Kind.INPUT, Kind.KEYWORD, Kind.BUFFER})
"""The kinds that a module does not make itself. Among them are masks."""

_BAD = frozenset({State.INF, State.NAN})


class Difference(enum.IntEnum):
    """In what way two readings differ; what matters most comes first."""

    WENT_BAD = 0
    """One side is inf or nan, and the module made it."""
    NUMBERS = 1
    """The ratio says how much."""
    BAD_INPUT = 2
    """One side is inf or nan: an input, which may be a mask; or one is inf and the other nan."""
    ZERO = 3
    """One side is zero, or so small that it is as good as zero: any ratio to it is large, and none says anything."""
    NO_VALUES = 4
    """Integers, booleans, masks, and shares of zeros: their ratio is no measure."""
    ONE_SIDED = 5
    """One side has no numbers: None, an empty tensor, or no tensor."""


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
    difference: Difference = Difference.NUMBERS


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
        """Where the sides first differ in a way that matters; if they do so nowhere, where they differ at all."""
        found = self._differ()
        return next((pair for pair in found if pair.difference <= Difference.NUMBERS), found[0] if found else None)

    def largest(self, count: int) -> list[Pair]:
        """The ``count`` pairs that differ most; equal ones keep their order."""
        return sorted(self._differ(), key=_order)[:count]

    def _differ(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.ratio >= DIVERGED]


def _order(pair: Pair) -> tuple[int, float]:
    return pair.difference, -pair.ratio if math.isfinite(pair.ratio) and pair.difference is Difference.NUMBERS else 0.0


def compare(left: Sequence[Frame], right: Sequence[Frame]) -> Diff:
    """Aligns the frames of two batches and compares their readings."""
    ours, theirs = dict(_numbered(left)), dict(_numbered(right))
    floors = _floors(left, right)
    pairs = []
    for key, frame in [*ours.items(), *((key, frame) for key, frame in theirs.items() if key not in ours)]:
        mine, other = (_readings(side.get(key)) for side in (ours, theirs))
        for label in dict.fromkeys([*mine, *other]):
            sides = mine.get(label), other.get(label)
            pairs.append(
                Pair(frame.position.frame, frame.spec, key[2], label, *sides, _ratio(*sides), _difference(*sides, floors))
            )
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


def _floors(*sides: Sequence[Frame]) -> dict[Kind, float]:
    """By kind, the number below which a reading is as good as zero: its part of the median of the smaller side."""
    floors: dict[Kind, float] = {}
    for frames in sides:
        of_kinds: dict[Kind, list[float]] = {}
        for frame in frames:
            for reading in frame.readings:
                if reading.state is State.FINITE and reading.abs_max > 0.0 and not reading.label.endswith(ZEROS):
                    of_kinds.setdefault(reading.kind, []).append(reading.abs_max)
        for kind, numbers in of_kinds.items():
            floor = statistics.median_low(numbers) * NEGLIGIBLE
            floors[kind] = min(floor, floors.get(kind, floor))
    return floors


def _difference(left: Reading | None, right: Reading | None, floors: Mapping[Kind, float]) -> Difference:
    if left is None or right is None:
        return Difference.ONE_SIDED
    sides = left, right
    states = {reading.state for reading in sides}
    if states & _BAD:
        return Difference.BAD_INPUT if states <= _BAD or left.kind in _GIVEN else Difference.WENT_BAD
    if states != {State.FINITE}:
        return Difference.NO_VALUES if State.NOT_FLOAT in states else Difference.ONE_SIDED
    if left.label.endswith(ZEROS) or (left.kind in _GIVEN and any(map(_is_end_of_dtype, sides))):
        return Difference.NO_VALUES
    if min(left.abs_max, right.abs_max) <= floors.get(left.kind, 0.0):
        return Difference.ZERO
    return Difference.NUMBERS


def _is_end_of_dtype(reading: Reading) -> bool:
    """Whether it is its dtype's largest number: so masks are made."""
    return reading.abs_max >= 0.999 * DTYPE_MAX.get(reading.dtype, math.inf)
