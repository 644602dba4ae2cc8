"""The data types that flow from the hooks over the wire into the reports. Standard library only.

A frame is one call of one module. Its *spec* says what is measured: module, class, and one row per reading. Its numbers are
three columns: abs min, abs max, state. A batch has many frames. Their specs form a frame table, which is sent once; their
columns, joined end to end, form the batch summary, which is sent for every batch.
"""

from __future__ import annotations

import enum
import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from .fields import MAX_ROWS, AnyFloat, BatchNumber, Dtype, Items, sent_name
from .spent import NO_COST, NOT_SPENT, Cost, Spent

MAX_ALIASES = 16
"""Further names of a module that are sent."""


class Kind(enum.IntEnum):
    """What was measured."""

    PARAMETER = 0
    BUFFER = 1
    INPUT = 2
    OUTPUT = 3
    MARKED = 4
    """A tensor that the user marked with ``detect_overflow``."""
    KEYWORD = 5
    """An input that was passed by keyword."""
    GRAD_OUTPUT = 6
    """The gradient with respect to a module's output: the input of its backward."""
    GRAD_INPUT = 7
    """The gradient with respect to a module's input: the result of its backward."""
    GRADIENT = 8
    """The gradient of a parameter, accumulated so far."""
    LOSS = 9
    """What was handed to ``backward()``, without a loss scale: a frame of its own, of the root, with the label ``loss``.

    Where several losses take turns, as a GAN's do, all but the first have another label. The class is that of what they train.

    It is one number, so its abs min says nothing new: that column has the loss with its sign. An older agent gave its size there.
    """


class Phase(enum.IntEnum):
    """In which part of a batch a module was called."""

    FORWARD = 0
    RECOMPUTE = 1
    """A forward that activation checkpointing repeats during the backward of its batch."""
    BACKWARD = 2


class State(enum.IntEnum):
    """What a reading's numbers mean. Only INF and NAN are non-finite, and only they can trip."""

    FINITE = 0
    INF = 1
    NAN = 2
    NONE = 3
    NOT_A_TENSOR = 4
    EMPTY = 5
    NOT_FLOAT = 6
    """Integers and booleans: measured, but they never trip."""
    UNMATERIALISED = 7
    """No values to read: a meta tensor, or a layout that cannot be measured."""
    SEEN_FINITE = 8
    """Each value is finite; abs min and abs max were not measured. See ``Recorder.of_root``."""

    @property
    def word(self) -> str:
        """For people: ``inf``, ``not float``."""
        return self.name.lower().replace("_", " ")


NON_FINITE = frozenset({State.INF, State.NAN})

MEASURED = NON_FINITE | {State.FINITE, State.NOT_FLOAT}
"""The states whose abs min and abs max are numbers."""

ALL_FINITE = frozenset({State.FINITE, State.SEEN_FINITE})
"""The states of a tensor without inf and nan, whether or not its numbers are known."""

DTYPE_MAX = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
    "float8_e5m2": 57344.0,
    "float8_e5m2fnuz": 57344.0,
    "float8_e4m3fn": 448.0,
    "float8_e4m3fnuz": 240.0,
}
"""The largest finite number of each floating dtype."""

NARROW_DTYPES = frozenset(name for name, largest in DTYPE_MAX.items() if largest < 1e6)
"""float16 and the kinds of float8: how far a reading is from their ends says something. The others end at 1e38 and beyond."""

DTYPE_TINY = {
    "float64": 2.2250738585072014e-308,
    "float32": 1.1754943508222875e-38,
    "bfloat16": 1.1754943508222875e-38,
    "float16": 6.103515625e-05,
    "float8_e5m2": 6.103515625e-05,
    "float8_e5m2fnuz": 3.0517578125e-05,
    "float8_e4m3fn": 0.015625,
    "float8_e4m3fnuz": 0.0078125,
}
"""The smallest normal number of each floating dtype. Smaller numbers first lose digits, then become zero."""

SHARD = " (shard"
"""Label suffix: only this rank's shard was measured, as in ``weight (shard of 4)``."""

REDUCED = " (reduced)"
"""Label suffix: a gradient after it was reduced over the ranks, as in ``weight.grad (reduced)``."""

SUMMED = " (summed)"
"""Label suffix: a gradient summed over the forwards of a step, each of which was finite, as in ``weight.grad (summed)``."""

OWN = " (own)"
"""Label suffix: a gradient as its rank alone made it, run again, beside the one that was bad, as in ``weight.grad (own)``."""

OF_MODULE = " of "
"""Between the label of a loss and what it trains, where several losses take turns: ``loss of Generator``."""

LOSS_OF_SOME = f"loss{OF_MODULE}?"
"""The label of a loss where several take turns, and it is not known yet which one it is."""

NO_LOSS = -1.0
"""In the place of a loss: none was measured. A loss of exactly -1 is told as ``NEXT_TO_NO_LOSS``."""

NEXT_TO_NO_LOSS = -1.0000001192092896
"""The next float32 below NO_LOSS."""

NO_NORM = -1.0
"""In the place of the norm of the gradients: it is not known."""

WIDE_DTYPES = frozenset({"float64", "complex64", "complex128", "float"})
"""Dtypes whose values do not fit into float32: a column with one of them is packed as float64."""


class Position(NamedTuple):
    """Where a rank or frame is, as the rank counts; positions are ordered. Ranks that run the same program have the same
    positions, which their clocks do not.

    ``batch`` is -1 before the first batch. ``eval`` is 0 in a batch, and counts the eval forwards after it. ``frame`` counts
    the finished frames: a rank has passed the frame with index f once ``frame > f``.
    """

    batch: BatchNumber
    eval: int
    frame: int


NOWHERE = Position(-1, 0, 0)
"""Before the first batch."""

NO_STAGE = -1
"""The stage of a rank whose model is not part of a pipeline."""


class Moment(NamedTuple):
    """A position in the order that all ranks share.

    ``step`` counts the optimizer steps done before the position's batch. It comes first: a rank that runs a forward more than
    the others counts batches otherwise, but all ranks step together. The stages of a pipeline hand each batch on, and not each
    stage has something to optimize: there the batch alone orders, and ``step`` is 0.
    """

    step: int
    batch: BatchNumber
    eval: int
    frame: int

    @property
    def position(self) -> Position:
        return Position(self.batch, self.eval, self.frame)

    def in_stage(self, stage: int) -> Moment:
        return self if stage == NO_STAGE else self._replace(step=0)


BEGINNING = Moment(0, *NOWHERE)
"""The moment of a rank that has run nothing."""


class Whereabouts(NamedTuple):
    """Where the training thread of a rank is.

    Before ``moment`` it is known to have no trip but of a backward that is to come; before ``settled`` none at all.
    ``first_of_step`` is the first batch since the optimizer step before ``moment``. ``spent``: where its time goes. ``rates``: of
    its optimizers, ``writes``: when other code wrote to its weights, for people. ``cost``: what watching takes of that time.
    """

    moment: Moment = BEGINNING
    phase: str = "idle"
    settled: Moment = BEGINNING
    first_of_step: int = 0
    spent: Spent = NOT_SPENT
    rates: str = ""
    writes: str = ""
    cost: Cost = NO_COST

    def in_stage(self, stage: int) -> Whereabouts:
        return self._replace(moment=self.moment.in_stage(stage), settled=self.settled.in_stage(stage))


class Reading(NamedTuple):
    """One measured tensor of a frame."""

    label: str
    kind: Kind
    dtype: Dtype
    abs_min: AnyFloat
    abs_max: AnyFloat
    state: State


@dataclass(frozen=True, slots=True)
class ReadingSpec:
    """The constant part of a reading. ``dtype`` is torch's name without ``torch.``; empty if the value is no tensor."""

    kind: Kind
    label: str
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class FrameSpec:
    """The constant part of a frame. ``aliases``: further names of a module that the model contains more than once."""

    module: str
    module_class: str
    readings: Annotated[tuple[ReadingSpec, ...], Items(MAX_ROWS)]
    aliases: Annotated[tuple[str, ...], Items(MAX_ALIASES)] = ()
    phase: Phase = Phase.FORWARD

    @property
    def typecode(self) -> str:
        return _typecode(self.readings)


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of one module: ``spec`` and three columns with one entry per reading (0.0 where nothing was measured)."""

    position: Position
    spec: FrameSpec
    abs_min: Sequence[float]
    abs_max: Sequence[float]
    states: bytes

    @property
    def readings(self) -> tuple[Reading, ...]:
        return tuple(
            Reading(row.label, row.kind, row.dtype, low, high, State(state))
            for row, low, high, state in zip(self.spec.readings, self.abs_min, self.abs_max, self.states, strict=True)
        )


@dataclass(frozen=True, slots=True)
class FrameTable:
    """The specs of a part's frames in execution order. ``id`` is a hash of their content, with the names as they are sent."""

    specs: tuple[FrameSpec, ...]
    id: str = field(init=False)
    rows: int = field(init=False)
    typecode: str = field(init=False)
    column_bytes: int = field(init=False)
    """The size of each of the two packed columns of a batch summary."""
    losses: tuple[int, ...] = field(init=False)
    """The rows of the losses."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", _table_id(self.specs))
        object.__setattr__(self, "rows", sum(len(spec.readings) for spec in self.specs))
        object.__setattr__(self, "typecode", _typecode(row for spec in self.specs for row in spec.readings))
        object.__setattr__(self, "column_bytes", self.rows * struct.calcsize(f"<{self.typecode}"))
        rows = [row for spec in self.specs for row in spec.readings]
        object.__setattr__(self, "losses", tuple([number for number, row in enumerate(rows) if row.kind is Kind.LOSS]))


class BatchSummary(NamedTuple):
    """The numbers of one part of a batch on one rank: packed little-endian columns for the frame table ``table_id``.

    A batch has up to two parts: its forward, then the frames of its backward. ``first_frame`` is the index of the part's
    first frame: 0 for a forward, or that of the root where it alone was measured. ``optimizer_step`` counts the optimizer steps
    done before the batch, and ``gradient_norm`` is the 2-norm of the gradients that the rank had in the last of them, before
    ``clip_grad_norm_``; NO_NORM: not known. The times are Unix seconds of the rank's clock. ``memory`` is in bytes: what tensors
    take on the rank's device as the part ends; 0: there is no device.
    """

    batch: int
    first_frame: int
    optimizer_step: int
    started_at: float
    ended_at: float
    traced: bool
    table_id: str
    abs_min: bytes
    abs_max: bytes
    states: bytes
    gradient_norm: float = NO_NORM
    memory: int = 0

    def fits(self, table: FrameTable) -> bool:
        """Whether the columns have the rows and the width of ``table``."""
        return len(self.states) == table.rows and len(self.abs_min) == len(self.abs_max) == table.column_bytes

    def loss(self, table: FrameTable) -> float:
        """The largest loss in a part that fits ``table``, nan if one is; NO_LOSS: none was measured."""
        size = struct.calcsize(table.typecode)
        found = [
            struct.unpack_from(f"<{table.typecode}", self.abs_min, row * size)[0]
            for row in table.losses
            if self.states[row] <= State.NAN
        ]
        if not found:
            return NO_LOSS
        loss: float = next((loss for loss in found if math.isnan(loss)), max(found))
        return NEXT_TO_NO_LOSS if loss == NO_LOSS else loss

    def frames(self, table: FrameTable) -> Iterator[Frame]:
        """The part's frames in execution order. Raises ValueError if the columns do not fit ``table``."""
        if not self.fits(table):
            raise ValueError(f"columns of {len(self.abs_min)} bytes and {len(self.states)} rows against {table.rows} rows")
        lows, highs = unpack(table.typecode, self.abs_min), unpack(table.typecode, self.abs_max)
        row = 0
        for index, spec in enumerate(table.specs, self.first_frame):
            end = row + len(spec.readings)
            position = Position(self.batch, 0, index)
            yield Frame(position, spec, lows[row:end], highs[row:end], self.states[row:end])
            row = end


def pack(typecode: str, values: Sequence[float]) -> bytes:
    """A column of floats as little-endian float32 (``f``) or float64 (``d``)."""
    return struct.pack(f"<{len(values)}{typecode}", *values)


def unpack(typecode: str, column: bytes) -> tuple[float, ...]:
    """The floats of a packed column. Raises ValueError if its length is not a whole number of items."""
    count, rest = divmod(len(column), struct.calcsize(f"<{typecode}"))
    if rest:
        raise ValueError(f"a column of {len(column)} bytes does not hold whole {typecode!r} items")
    return struct.unpack(f"<{count}{typecode}", column)


def state_of(abs_min: float, abs_max: float) -> State:
    """The state of a floating tensor with these extremes (any nan in it makes the abs max nan)."""
    if math.isnan(abs_max) or math.isnan(abs_min):
        return State.NAN
    return State.INF if math.isinf(abs_max) else State.FINITE


def _typecode(rows: Iterable[ReadingSpec]) -> str:
    return "d" if any(row.dtype in WIDE_DTYPES for row in rows) else "f"


def _table_id(specs: tuple[FrameSpec, ...]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for spec in specs:
        # repr() quotes each name: no choice of names gives two different tables the same text.
        names = tuple(map(sent_name, spec.aliases[:MAX_ALIASES]))
        digest.update(repr((sent_name(spec.module), sent_name(spec.module_class), names, int(spec.phase))).encode())
        for row in spec.readings:
            digest.update(repr((int(row.kind), sent_name(row.label), row.dtype)).encode())
    return digest.hexdigest()
