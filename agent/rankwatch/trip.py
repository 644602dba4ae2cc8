"""What breaks the policy, and why: pure decisions over one frame, shared by the agent alone and the collector."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .frame import DTYPE_MAX, Frame, FrameSpec, Kind, Position, Reading, State


class Policy(str, enum.Enum):
    """Which non-finite readings trip.

    FIRST (the default): outputs, own parameters and marked tensors; a non-finite input or buffer (an additive ``-inf``
    attention mask, say) is evidence, but healthy. STRICT: positional inputs too, as the Hugging Face detector does, and a
    nan in a buffer or keyword input, which that detector does not look at (an inf there is mostly a mask, and torch's own
    transformer layers pass theirs by keyword). OFF: nothing; readings are only recorded.
    """

    FIRST = "first"
    STRICT = "strict"
    OFF = "off"


class Cause(str, enum.Enum):
    """Why a frame tripped."""

    OVERFLOW = "overflow"
    """Inputs and weights were finite, the output is inf: born here."""
    INVALID = "invalid"
    """Inputs and weights were finite, the output is nan: born here."""
    WEIGHT = "weight"
    """The module's own parameter was bad before this forward."""
    DATA = "data"
    """What was fed to the root module was bad already."""
    UPSTREAM = "upstream"
    """The frame's input was bad and no watched module made it: born between modules."""


_NON_FINITE = (State.INF, State.NAN)
_INPUTS = (Kind.INPUT, Kind.KEYWORD)
_TRIPPING: dict[Policy, dict[Kind, tuple[State, ...]]] = {
    Policy.FIRST: {Kind.PARAMETER: _NON_FINITE, Kind.OUTPUT: _NON_FINITE, Kind.MARKED: _NON_FINITE},
    Policy.STRICT: {kind: _NON_FINITE for kind in Kind} | {Kind.BUFFER: (State.NAN,), Kind.KEYWORD: (State.NAN,)},
    Policy.OFF: {},
}


@dataclass(frozen=True, slots=True)
class Trip:
    """A frame that broke the policy, with the evidence.

    ``frames`` is the ring of the last frames, the tripped one last; ``reading`` indexes its readings. ``root_inputs`` are
    the readings of what the root module was called with in this batch. ``shape`` is the tensor's, of whose ``numel``
    elements ``nan_count`` and ``inf_count`` are not finite. ``time`` is Unix seconds of the rank's clock; it orders nothing
    but torchelastic's error files.
    """

    position: Position
    reading: int
    frames: tuple[Frame, ...]
    root_inputs: tuple[Reading, ...]
    optimizer_step: int
    shape: tuple[int, ...]
    numel: int
    nan_count: int
    inf_count: int
    time: float

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    @property
    def culprit(self) -> Reading:
        return self.frame.readings[self.reading]


class Judge:
    """Says which readings of a frame trip under a policy; ``ignore``: shell patterns of ``module`` or ``module:label``."""

    def __init__(self, policy: Policy, ignore: Sequence[str] = ()) -> None:
        self._tripping = _TRIPPING[policy]
        self._ignore = tuple(ignore)
        self._ignored: dict[FrameSpec, tuple[bool, ...]] = {}

    def tripping(self, spec: FrameSpec, states: bytes) -> list[int]:
        """The indices of the readings that trip, in order of the frame."""
        # The hot path: nearly every frame is finite, and two searches in a few bytes say so.
        if State.INF not in states and State.NAN not in states:
            return []
        ignored = self._ignored_rows(spec)
        return [
            row
            for row, (reading, state) in enumerate(zip(spec.readings, states, strict=True))
            if state in self._tripping.get(reading.kind, ()) and not ignored[row]
        ]

    def _ignored_rows(self, spec: FrameSpec) -> tuple[bool, ...]:
        if spec not in self._ignored:
            self._ignored[spec] = tuple(self._is_ignored(spec, row.label) for row in spec.readings)
        return self._ignored[spec]

    def _is_ignored(self, spec: FrameSpec, label: str) -> bool:
        names = [name for module in (spec.module, *spec.aliases) for name in (module, f"{module}:{label}")]
        return any(fnmatchcase(name, pattern) for name in names for pattern in self._ignore)


def classify(trip: Trip) -> tuple[Cause, str]:
    """The cause class of a trip and its evidence in a sentence (the rules: the design's section on verdicts)."""
    readings = trip.frame.readings
    weights = [r for r in readings if r.kind is Kind.PARAMETER and r.state in _NON_FINITE]
    if weights:
        return Cause.WEIGHT, _weight_evidence(weights[0], trip)
    inputs = [r for r in readings if r.kind in _INPUTS]
    suspects = [r for r in inputs if r.state in _NON_FINITE and not _tolerated(r, trip)]
    if suspects or trip.culprit.kind is Kind.MARKED:
        return _inherited(suspects[0] if suspects else trip.culprit, trip)
    buffers = [r for r in readings if r.kind is Kind.BUFFER and r.state is State.NAN]
    if buffers:
        return Cause.WEIGHT, f"the buffer {buffers[0].label} is nan: it was bad before, or this forward made it so"
    largest = _largest([r for r in readings if r.kind in (Kind.PARAMETER, *_INPUTS)])
    near, too_large = _nearness(largest, trip.culprit.dtype) if largest else ("", False)
    if trip.culprit.state is State.NAN and not too_large:
        return Cause.INVALID, f"inputs and weights were finite, but the {trip.culprit.label} is nan{near}"
    return Cause.OVERFLOW, f"inputs and weights were finite{near}"


def _weight_evidence(weight: Reading, trip: Trip) -> str:
    bad = f"{weight.label} was already {weight.state.name.lower()} before this forward"
    if trip.optimizer_step == 0:
        return f"{bad}, and no optimizer step was seen before it: look at the initialisation or the checkpoint"
    return (
        f"{bad}: look at the last optimizer step, number {trip.optimizer_step - 1}, "
        f"and at the gradients of batch {trip.position.batch - 1}"
    )


def _inherited(suspect: Reading, trip: Trip) -> tuple[Cause, str]:
    state = suspect.state.name.lower()
    bad_root = [r for r in trip.root_inputs if r.state is suspect.state]
    if bad_root:
        return Cause.DATA, f"{bad_root[0].label} of the root module was {state} before any module ran"
    finite = _last_finite_frame(trip)
    if suspect.kind is Kind.MARKED and finite:
        return Cause.UPSTREAM, f"born between {describe_module(finite.spec)}, the last finite frame, and this mark"
    where = f"; the last finite frame before it is {describe_module(finite.spec)}" if finite else ""
    return (
        Cause.UPSTREAM,
        f"{suspect.label} was {state} and no watched module made it: it was born between modules{where}",
    )


def _tolerated(suspect: Reading, trip: Trip) -> bool:
    """Whether the same non-finite input went harmlessly through a module of this class before (a ``-inf`` mask does)."""
    if trip.culprit.kind in _INPUTS:
        return False
    frame = trip.frame
    return any(
        reading.label == suspect.label and reading.state is suspect.state
        for earlier in trip.frames[:-1]
        if earlier.spec.module_class == frame.spec.module_class and not _bad_outputs(earlier)
        for reading in earlier.readings
        if reading.kind in _INPUTS
    )


def _bad_outputs(frame: Frame) -> bool:
    return any(reading.kind is Kind.OUTPUT and reading.state in _NON_FINITE for reading in frame.readings)


def _last_finite_frame(trip: Trip) -> Frame | None:
    same_batch = [f for f in trip.frames[:-1] if f.position[:2] == trip.position[:2] and not _bad_outputs(f)]
    return same_batch[-1] if same_batch else None


def _largest(readings: Sequence[Reading]) -> Reading | None:
    """The finite reading nearest to the end of its dtype's range; of equals an input before a weight."""
    finite = [r for r in readings if r.state is State.FINITE and r.dtype in DTYPE_MAX]
    return max(finite, key=lambda r: (r.abs_max / DTYPE_MAX[r.dtype], r.kind), default=None)


def _nearness(largest: Reading, output_dtype: str) -> tuple[str, bool]:
    """How near a reading is to the largest number of the dtype the module computes in, and whether it is beyond it.

    Under autocast a module's inputs are wider than what it computes in, which its output's dtype tells.
    """
    dtype = min((largest.dtype, output_dtype), key=lambda name: DTYPE_MAX.get(name, float("inf")))
    limit = DTYPE_MAX[dtype]
    what = "input" if largest.kind in _INPUTS else largest.label
    share = "less than 1%" if largest.abs_max < 0.01 * limit else f"{largest.abs_max / limit:.0%}"
    return f"; {what} abs max {largest.abs_max:.2e} is {share} of {dtype}'s max {limit:.2e}", largest.abs_max > limit


def describe_module(spec: FrameSpec) -> str:
    """The module as reports name it: qualified name (the root has none), class, and the other names of a shared module."""
    aliases = f", also {', '.join(spec.aliases)}" if spec.aliases else ""
    return f"{spec.module or '(root)'} ({spec.module_class}{aliases})"
