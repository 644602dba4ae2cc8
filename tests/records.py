"""Records of invented runs, for tests of their readers."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import makers
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import (
    LOSS_OF_SOME,
    OF_MODULE,
    BatchSummary,
    Frame,
    FrameTable,
    Kind,
    Phase,
    Position,
    Reading,
    State,
    pack,
)
from rankwatch.shared.types.trip import Trip
from rankwatch_monitor.decide.core.effects import Show
from rankwatch_monitor.decide.core.journal import NO_RANK, Entry, Fact, Opened, Trained
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Limits, Store

LIMITS = Limits()

T = TypeVar("T")


def read(path: Path, what: Callable[[RunRecord], T]) -> T:
    """The result of ``what`` for the record at ``path``."""
    with RunRecord(path) as record:
        return what(record)


def part(rank: int, *frames: Frame, step: int = 0, seq: int = 1, ended: float = 11.0) -> Entry:
    """A part of a batch with these frames, as the rank sends it."""
    table = FrameTable(tuple(frame.spec for frame in frames))
    batch, _, first = frames[0].position
    lows, highs = ([value for frame in frames for value in getattr(frame, name)] for name in ("abs_min", "abs_max"))
    states = b"".join(frame.states for frame in frames)
    columns = pack(table.typecode, lows), pack(table.typecode, highs), states
    summary = BatchSummary(batch, first, step, ended - 1.0, ended, False, table.id, *columns)
    return Entry(1.0, rank, Trained(seq, summary, table))


def odd(label: str, state: State, *, kind: Kind = Kind.INPUT, number: float = 0.0, dtype: str = "") -> Reading:
    """A reading in any state."""
    return Reading(label, kind, dtype, number, number, state)


def frames(batch: int, high: float = 1.0, *, wide: bool = False) -> list[Frame]:
    """A forward of three modules, one of them called twice."""
    dtype = "float64" if wide else "float32"
    readings = [
        [makers.reading("weight"), makers.reading("output", high, low=0.25, dtype=dtype)],
        [
            makers.reading("input[0]", 40.0, low=0.0, dtype="float16"),
            odd("input[mask]", State.NOT_FLOAT, number=1.0, dtype="bool"),
        ],
        [odd("input[0]", State.NONE), odd("input[1]", State.EMPTY, dtype="float32"), makers.reading("output", 8.0)],
        [odd("input[0]", State.UNMATERIALISED, dtype="float32"), makers.reading("output", 16.0)],
        [odd("input[0]", State.NOT_A_TENSOR), makers.reading("output", high / 2)],
    ]
    modules = ("embed", "mask", "layer", "layer", "")
    return [makers.frame(*of, at=(batch, 0, at), module=modules[at]) for at, of in enumerate(readings)]


def gan(batch: int) -> list[Frame]:
    """A forward of a GAN in a container: the first batch of each loss is of nobody, and then they take turns."""
    losses = ("loss", "Critic", 1.0), (f"loss{OF_MODULE}Generator", "Generator", -4.0)
    label, module_class, loss = losses[batch % 2]
    label, module_class = (("loss", "Gan"), (LOSS_OF_SOME, "Gan"), (label, module_class))[min(2, batch // 2)]
    reading = makers.reading(label, loss - batch / 100, kind=Kind.LOSS)
    root = makers.frame(makers.reading("output"), at=(batch, 0, 0), module="", module_class="Gan")
    return [root, makers.frame(reading, at=(batch, 0, 1), module="", module_class=module_class)]


def backward(batch: int, high: float = 1.0) -> list[Frame]:
    """The frames after ``frames``: a recomputed forward and two gradients."""
    return [
        makers.frame(makers.reading("output", 8.0), at=(batch, 0, 5), module="layer", phase=Phase.RECOMPUTE),
        makers.frame(makers.reading("grad_output", high), at=(batch, 0, 6), module="layer", phase=Phase.BACKWARD),
        makers.frame(makers.reading("weight.grad", high), at=(batch, 0, 7), module="layer", phase=Phase.BACKWARD),
    ]


def write(
    folder: Path,
    *entries: Entry,
    world_size: int = 2,
    job: str = "train",
    limits: Limits = LIMITS,
    connected: Sequence[int] | None = None,
    at: float = 100.0,
    **meta: str,
) -> Path:
    """Writes a run to which all ranks, or the given ones, have connected; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / FILE, limits)
    beginning: list[tuple[int, Fact]] = [(NO_RANK, Opened(job, 1, world_size))]
    beginning += [(rank, makers.hello(rank, world_size)) for rank in (range(world_size) if connected is None else connected)]
    store.write([Entry(0.0, *fact) for fact in beginning], at, None, run=f"{job}-1", **meta)
    for entry in entries:  # one transaction each, as parts arrive
        store.write([entry], at)
    store.close()
    return folder


def add(
    run: Path, /, *entries: Entry, at: float = 100.0, shown: Show | None = None, limits: Limits = LIMITS, **meta: str
) -> None:
    """One more transaction of the record in this folder, by a collector that comes and goes."""
    store = Store(run / FILE, limits)
    store.write(list(entries), at, shown, **meta)
    store.close()


def execute(run: Path, /, statement: str, *values: object) -> None:
    """Changes the record in this folder as no collector does."""
    with closing(sqlite3.connect(run / FILE)) as database, database:
        database.execute(statement, values)


def tripped(rank: int, *frames: Frame, step: int = 0, reading: int = -1) -> Entry:
    """The rank trips: a reading of the last of these frames."""
    last = frames[-1]
    index = reading % len(last.states)
    trip = Trip(Position(*last.position), index, frames, (), step, (2, 3), 6, 0, 1, 20.0)
    return Entry(2.0, rank, messages.Tripped(9, trip))
