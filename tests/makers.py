"""Small, valid values of the data types, for tests to vary."""

from __future__ import annotations

from rankwatch import wire
from rankwatch.frame import (
    BatchSummary,
    Frame,
    FrameSpec,
    FrameTable,
    Kind,
    Position,
    Reading,
    ReadingSpec,
    State,
    pack,
    state_of,
)
from rankwatch.trip import Trip

INF, NAN = float("inf"), float("nan")


def reading(label: str, high: float = 1.0, *, low: float = 0.5, kind: Kind | None = None, dtype: str = "float32") -> Reading:
    """A measured reading; its kind follows from its label unless it is given."""
    if kind is None:
        kind = {"in": Kind.INPUT, "ou": Kind.OUTPUT}.get(label[:2], Kind.PARAMETER)
    return Reading(label, kind, dtype, high if high != high else low, high, state_of(low, high))


def frame(
    *readings: Reading, at: tuple[int, int, int] = (0, 0, 0), module: str = "layer", module_class: str = "Linear"
) -> Frame:
    rows = readings or (reading("output"),)
    spec = FrameSpec(module, module_class, tuple(ReadingSpec(r.kind, r.label, r.dtype) for r in rows))
    lows, highs = tuple(r.abs_min for r in rows), tuple(r.abs_max for r in rows)
    return Frame(Position(*at), spec, lows, highs, bytes(r.state for r in rows))


def trip(
    *readings: Reading,
    at: tuple[int, int, int] = (0, 0, 0),
    before: tuple[Frame, ...] = (),
    root_inputs: tuple[Reading, ...] = (),
    step: int = 0,
    module: str = "layer",
) -> Trip:
    """A trip at the first non-finite of ``readings`` that is no input, else at the first non-finite one."""
    rows = readings or (reading("input[0]"), reading("output", INF))
    bad = [index for index, row in enumerate(rows) if row.state in (State.INF, State.NAN)]
    own = [index for index in bad if rows[index].kind is not Kind.INPUT]
    last = frame(*rows, at=at, module=module)
    return Trip(Position(*at), (own or bad)[0], (*before, last), root_inputs, step, (2, 3), 6, 0, 1, 1000.0)


def hello(rank: int = 0, world_size: int = 1, **changes: object) -> wire.Hello:
    fields: dict[str, object] = {
        "major": wire.VERSION[0],
        "minor": wire.VERSION[1],
        "job": "train",
        "restart": 0,
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "host": f"node{rank // 2}",
        "pid": 100 + rank,
        "device": "cpu",
        "torch": "2.13.0",
        "incarnation": f"process-{rank}",
    }
    return wire.Hello(**{**fields, **changes})  # type: ignore[arg-type]


def table() -> FrameTable:
    return FrameTable((frame().spec, frame(reading("weight"), reading("output")).spec))


def summary(batch: int = 0, *, traced: bool = False, of: FrameTable | None = None) -> BatchSummary:
    of = of or table()
    column = pack(of.typecode, [1.0] * of.rows)
    return BatchSummary(batch, batch, 10.0, 11.0, traced, of.id, column, column, bytes(of.rows))


def beat(*at: int, phase: str = "forward") -> wire.Beat:
    return wire.Beat(Position(*at), phase, 0, 0, 1000.0)
