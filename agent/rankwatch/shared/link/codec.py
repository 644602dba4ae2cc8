"""The data types in messages: how each is written, and how what a peer sent is read and checked.

A wrong value is a ValueError, a wrong type a ValueError or TypeError.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from ..types.closeup import CloseUp, Precision
from ..types.fields import MAX_INT, MAX_NAME, check_bool, check_bytes, check_list, check_str, cut, integer, number, numbered
from ..types.fingerprint import ALL_ROWS, NO_GATHER, Fingerprint, FingerprintRow, FingerprintTable, RankMesh
from ..types.frame import (
    MAX_ALIASES,
    NO_NORM,
    BatchSummary,
    Frame,
    FrameSpec,
    FrameTable,
    Kind,
    Moment,
    Phase,
    Position,
    Reading,
    ReadingSpec,
    State,
    pack,
    unpack,
)
from ..types.notice import Notice, NoticeKind
from ..types.trip import BadWeight, Operator, Source, Trip

MAX_ROWS = 1_000_000
MAX_FRAMES = 200_000
MAX_RING = 10_000
MAX_TEXT = 16 * 1024
MAX_DIMS = 64
MAX_CLOSEUP = 3600.0
"""Seconds that a close-up may take: the report waits for it."""

MAX_RANKS = 65_536
MAX_MESHES = 4096
"""Of one fingerprint table."""

MAX_PLACES = 8 * MAX_RANKS
"""Ranks in all meshes of one fingerprint table."""

_COUNT, _BATCH, _SECONDS = integer(), integer(-1), number()
_RANK = integer(0, MAX_RANKS - 1)
_KIND, _PHASE, _STATE, _NOTICE = map(numbered, (Kind, Phase, State, NoticeKind))
_STATES = bytes(State)


def _check_position(value: Any) -> Position:
    batch, evaluation, frame = check_list(value, 3, 3)
    return Position(_BATCH.decode(batch), _COUNT.decode(evaluation), _COUNT.decode(frame))


def check_moment(value: Any) -> Moment:
    step, *position = check_list(value, 4, 4)
    return Moment(_COUNT.decode(step), *_check_position(position))


def _check_states(value: Any) -> bytes:
    states = check_bytes(value)
    if states != bytes(len(states)) and (unknown := states.translate(None, _STATES)):
        raise ValueError(f"{max(unknown)} is no state")
    return states


def write_spec(spec: FrameSpec) -> list[Any]:
    rows = [[int(row.kind), cut(row.label), row.dtype] for row in spec.readings]
    aliases = [cut(alias) for alias in spec.aliases[:MAX_ALIASES]]
    return [cut(spec.module), cut(spec.module_class), rows, aliases, int(spec.phase)]


def _read_spec(value: Any) -> FrameSpec:
    module, module_class, rows, aliases, phase = check_list(value, 5, 5)
    return FrameSpec(
        check_str(module, MAX_NAME),
        check_str(module_class, MAX_NAME),
        tuple(_read_row(row) for row in check_list(rows, 0, MAX_ROWS)),
        tuple(check_str(alias, MAX_NAME) for alias in check_list(aliases, 0, MAX_ALIASES)),
        _PHASE.decode(phase),
    )


def _read_row(value: Any) -> ReadingSpec:
    kind, label, dtype = check_list(value, 3, 3)
    return ReadingSpec(_KIND.decode(kind), check_str(label, MAX_NAME), check_str(dtype, 64))


def read_table(value: Any) -> FrameTable:
    table = FrameTable(tuple(map(_read_spec, check_list(value, 0, MAX_FRAMES))))
    if table.rows > MAX_ROWS:
        raise ValueError(f"{table.rows} rows are over the limit of {MAX_ROWS}")
    return table


def write_summary(s: BatchSummary) -> list[Any]:
    return [
        s.batch, s.first_frame, s.optimizer_step, s.started_at, s.ended_at, s.traced,
        s.table_id, s.abs_min, s.abs_max, s.states, s.gradient_norm, s.memory,
    ]  # fmt: skip


def read_summary(value: Any) -> BatchSummary:
    summary = BatchSummary._make(check_list(value, 12, 12))
    # All types are compared at once: thousands of batches come each second, and few other messages.
    if tuple(map(type, summary)) != _SUMMARY_TYPES:
        index = next(i for i, (part, kind) in enumerate(zip(summary, _SUMMARY_TYPES, strict=True)) if type(part) is not kind)
        raise ValueError(f"{summary._fields[index]}: expected {_SUMMARY_TYPES[index].__name__}")
    batch, first, step, started, ended, _, table_id, lows, highs, states, norm, memory = summary
    if min(batch, first, step, memory) < 0 or max(batch, first, step, memory) > MAX_INT:
        raise ValueError(f"batch, first_frame, optimizer_step, memory: expected whole numbers from 0 to {MAX_INT}")
    if norm < 0 and norm != NO_NORM:
        raise ValueError(f"gradient_norm: expected a number from 0 on, or {NO_NORM:g}")
    if not (0 <= started <= _LATEST and 0 <= ended <= _LATEST):  # a nan fails the comparison
        raise ValueError(f"started_at, ended_at: expected seconds from 0 to {_LATEST:g}")
    if len(table_id) > MAX_TABLE_ID or not (table_id.isascii() and table_id.isprintable()):
        raise ValueError(f"table_id: expected at most {MAX_TABLE_ID} printable ASCII characters")
    _check_states(states)
    # Only the receiver has the table that the columns must fit; that the columns fit each other is checked here.
    if len(lows) != len(highs) or len(lows) not in (4 * len(states), 8 * len(states)):
        raise ValueError(f"columns of {len(lows)}, {len(highs)}, {len(states)} bytes do not fit each other")
    return summary


_LATEST, MAX_TABLE_ID = 1e18, 64
_SUMMARY_TYPES = (int, int, int, float, float, bool, str, bytes, bytes, bytes, float, int)


def _write_frame(frame: Frame) -> list[Any]:
    code = frame.spec.typecode
    return [
        list(frame.position), write_spec(frame.spec), pack(code, frame.abs_min), pack(code, frame.abs_max), frame.states
    ]  # fmt: skip


def _read_frame(value: Any) -> Frame:
    position, spec_value, lows, highs, states = check_list(value, 5, 5)
    spec = _read_spec(spec_value)
    frame = Frame(
        _check_position(position),
        spec,
        unpack(spec.typecode, check_bytes(lows)),
        unpack(spec.typecode, check_bytes(highs)),
        _check_states(states),
    )
    if not len(frame.abs_min) == len(frame.abs_max) == len(frame.states) == len(spec.readings):
        raise ValueError(f"the columns of {spec.module} do not fit its {len(spec.readings)} readings")
    return frame


def _write_reading(reading: Reading) -> list[Any]:
    low, high = pack("d", [reading.abs_min]), pack("d", [reading.abs_max])
    return [cut(reading.label), int(reading.kind), reading.dtype, low, high, int(reading.state)]


def _read_reading(value: Any) -> Reading:
    label, kind, dtype, low, high, state = check_list(value, 6, 6)
    (abs_min,), (abs_max,) = unpack("d", check_bytes(low)), unpack("d", check_bytes(high))
    return Reading(
        check_str(label, MAX_NAME),
        _KIND.decode(kind),
        check_str(dtype, 64),
        abs_min,
        abs_max,
        _STATE.decode(state),
    )


def _write_weight(weight: BadWeight) -> list[Any]:
    names = [cut(weight.module), cut(weight.module_class)]
    return [*names, _write_reading(weight.reading), weight.finite_in, weight.is_here]


def _read_weight(value: Any) -> BadWeight:
    module, module_class, reading, finite_in, is_here = check_list(value, 5, 5)
    return BadWeight(
        check_str(module, MAX_NAME),
        check_str(module_class, MAX_NAME),
        _read_reading(reading),
        _BATCH.decode(finite_in),
        check_bool(is_here),
    )


def _write_operator(operator: Operator | None) -> list[Any] | None:
    if operator is None:
        return None
    inputs = [_write_reading(reading) for reading in operator.inputs[:MAX_RING]]
    shapes = [list(shape) for shape in operator.shapes[:MAX_RING]]
    source = operator.source
    line = None if source is None else [cut(source.file), source.line, cut(source.function), cut(source.text)]
    operands = pack("d", operator.operands[:MAX_RING])
    return [
        cut(operator.name),
        inputs,
        _write_reading(operator.output),
        operands,
        shapes,
        line,
        cut(operator.node),
        cut(operator.module),
    ]


def _read_operator(value: Any) -> Operator | None:
    if value is None:
        return None
    name, inputs, output, operands, shapes, source, node, module = check_list(value, 8, 8)
    return Operator(
        check_str(name, MAX_NAME),
        tuple(map(_read_reading, check_list(inputs, 0, MAX_RING))),
        _read_reading(output),
        unpack("d", check_bytes(operands)),
        tuple(map(_read_shape, check_list(shapes, 0, MAX_RING))),
        _read_source(source),
        check_str(node, MAX_NAME),
        check_str(module, MAX_NAME),
    )


def _read_shape(value: Any) -> tuple[int, ...]:
    return tuple(_COUNT.decode(size) for size in check_list(value, 0, MAX_DIMS))


def _read_source(value: Any) -> Source | None:
    if value is None:
        return None
    file, line, function, text = check_list(value, 4, 4)
    return Source(check_str(file, MAX_NAME), _COUNT.decode(line), check_str(function, MAX_NAME), check_str(text, MAX_NAME))


def write_closeup(c: CloseUp) -> list[Any]:
    precision = [[one.dtype, int(one.state), pack("d", [one.abs_max])] for one in c.precision]
    texts = [cut(c.machine), cut(c.note), cut(c.capsule)]
    return [_write_operator(c.operator), c.recurred, c.of, precision, *texts, c.is_eager]


def read_closeup(value: Any) -> CloseUp:
    operator, recurred, of, precision, machine, note, capsule, is_eager = check_list(value, 8, 8)
    return CloseUp(
        _read_operator(operator),
        _COUNT.decode(recurred),
        _COUNT.decode(of),
        tuple(map(_read_precision, check_list(precision, 0, MAX_DIMS))),
        check_str(machine, MAX_NAME),
        check_str(note, MAX_NAME),
        check_str(capsule, MAX_NAME),
        check_bool(is_eager),
    )


def _read_precision(value: Any) -> Precision:
    dtype, state, high = check_list(value, 3, 3)
    (abs_max,) = unpack("d", check_bytes(high))
    return Precision(check_str(dtype, 64), _STATE.decode(state), abs_max)


def write_trip(t: Trip) -> list[Any]:
    frames = [_write_frame(frame) for frame in t.frames[-MAX_RING:]]
    roots = [_write_reading(reading) for reading in t.root_inputs[:MAX_RING]]
    return [
        list(t.position), t.reading, frames, roots, t.optimizer_step,
        list(t.shape), t.numel, t.nan_count, t.inf_count, t.time, t.loss_scale,
        [_write_weight(weight) for weight in t.weights[:MAX_RING]], _write_operator(t.operator),
        [cut(label) for label in t.harmless[:MAX_RING]], cut(t.collective), t.bad_since,
        cut(t.received), cut(t.changed), t.gradients, t.recurs, t.closeup_within,
        t.guarded, cut(t.unfound),
    ]  # fmt: skip


def read_trip(value: Any) -> Trip:
    position, reading, frames, roots, step, shape, numel, nans, infs, time, scale, *evidence = check_list(value, 23, 23)
    weights, operator, harmless, collective, bad_since, received, changed, gradients, *further = evidence
    recurs, closeup_within, guarded, unfound = further
    trip = Trip(
        position=_check_position(position),
        reading=integer(0, MAX_ROWS).decode(reading),
        frames=tuple(map(_read_frame, check_list(frames, 1, MAX_RING))),
        root_inputs=tuple(map(_read_reading, check_list(roots, 0, MAX_RING))),
        optimizer_step=_COUNT.decode(step),
        shape=_read_shape(shape),
        numel=_COUNT.decode(numel),
        nan_count=_COUNT.decode(nans),
        inf_count=_COUNT.decode(infs),
        time=_SECONDS.decode(time),
        loss_scale=number(0.0, math.inf).decode(scale),
        weights=tuple(map(_read_weight, check_list(weights, 0, MAX_RING))),
        operator=_read_operator(operator),
        harmless=tuple(check_str(label, MAX_NAME) for label in check_list(harmless, 0, MAX_RING)),
        collective=check_str(collective, MAX_NAME),
        bad_since=_BATCH.decode(bad_since),
        received=check_str(received, MAX_NAME),
        changed=check_str(changed, MAX_NAME),
        gradients=check_bool(gradients),
        recurs=None if recurs is None else check_bool(recurs),
        closeup_within=number(0.0, MAX_CLOSEUP).decode(closeup_within),
        guarded=check_bool(guarded),
        unfound=check_str(unfound, MAX_NAME),
    )
    if trip.frame.position != trip.position or trip.reading >= len(trip.frame.spec.readings):
        raise ValueError("the last frame of the ring is not the one that tripped")
    return trip


def write_notice(n: Notice) -> list[Any]:
    names = [cut(n.module), cut(n.module_class), cut(n.label), n.dtype]
    return [int(n.kind), *names, n.since, n.batch, n.value, n.growth]


def read_notice(value: Any) -> Notice:
    kind_value, module, module_class, label, dtype, since, batch, size, growth = check_list(value, 9, 9)
    kind = _NOTICE.decode(kind_value)
    largest = 1.0 if kind is NoticeKind.ZEROS else sys.float_info.max
    return Notice(
        kind=kind,
        module=check_str(module, MAX_NAME),
        module_class=check_str(module_class, MAX_NAME),
        label=check_str(label, MAX_NAME),
        dtype=check_str(dtype, 64),
        since=_BATCH.decode(since),
        batch=_BATCH.decode(batch),
        value=number(0.0, largest).decode(size),
        growth=number(-sys.float_info.max, sys.float_info.max).decode(growth),
    )


def write_fingerprint_table(table: FingerprintTable) -> list[Any]:
    rows = [[cut(row.parameter), *row[1:]] for row in table.rows]
    inputs = None if table.inputs is None else _write_mesh(table.inputs)
    return [rows, [_write_mesh(mesh) for mesh in table.meshes], inputs]


def read_fingerprint_table(value: Any) -> FingerprintTable:
    rows, meshes, inputs = check_list(value, 3, 3)
    table = FingerprintTable(
        tuple(map(_read_fingerprint_row, check_list(rows, 0, MAX_ROWS))),
        _read_meshes(meshes),
        None if inputs is None else _read_mesh(inputs),
    )
    if not table.is_valid:
        raise ValueError("the rows do not fit the meshes, or a mesh does not fit its shape")
    return table


def _read_fingerprint_row(value: Any) -> FingerprintRow:
    parameter, dtype, numel, mesh, slot, is_trainable = check_list(value, 6, 6)
    return FingerprintRow(
        check_str(parameter, MAX_NAME),
        check_str(dtype, 64),
        _COUNT.decode(numel),
        integer(0, MAX_MESHES).decode(mesh),
        _COUNT.decode(slot),
        check_bool(is_trainable),
    )


def _write_mesh(mesh: RankMesh) -> list[Any]:
    # Mostly the ranks follow each other: then the first one and the distance say it all.
    first, *rest = mesh.ranks or (0,)
    distance = rest[0] - first if rest else 1
    is_even = mesh.ranks == tuple(range(first, first + distance * len(mesh.ranks), distance or 1))
    ranks: Any = [first, distance, len(mesh.ranks)] if is_even and distance > 0 else [list(mesh.ranks)]
    return [ranks, list(mesh.shape), list(mesh.replicated), mesh.gathers, cut(mesh.source), mesh.is_declared]


def _read_meshes(value: Any) -> tuple[RankMesh, ...]:
    """A few bytes stand for many ranks: ten for a mesh of any size."""
    found: list[RankMesh] = []
    places = 0
    for mesh in check_list(value, 0, MAX_MESHES):
        found.append(_read_mesh(mesh))
        places += len(found[-1].ranks)
        if places > MAX_PLACES:
            raise ValueError(f"its meshes have more than {MAX_PLACES} ranks in all")
    return tuple(found)


def _read_mesh(value: Any) -> RankMesh:
    ranks, shape, replicated, gathers, source, is_declared = check_list(value, 6, 6)
    return RankMesh(
        _read_ranks(ranks),
        _read_shape(shape),
        tuple(map(check_bool, check_list(replicated, 0, MAX_DIMS))),
        integer(NO_GATHER, MAX_DIMS).decode(gathers),
        check_str(source, MAX_NAME),
        check_bool(is_declared),
    )


def _read_ranks(value: Any) -> tuple[int, ...]:
    parts = check_list(value, 1, 3)
    if len(parts) == 1:
        return tuple(_RANK.decode(rank) for rank in check_list(parts[0], 0, MAX_RANKS))
    first, distance, count = check_list(parts, 3, 3)
    count, distance = integer(0, MAX_RANKS).decode(count), integer(1, MAX_RANKS).decode(distance)
    ranks = tuple(range(_RANK.decode(first), _RANK.decode(first) + count * distance, distance))
    _RANK.decode(max(ranks, default=0))
    return ranks


def write_fingerprint(fingerprint: Fingerprint) -> list[Any]:
    return list(fingerprint)


def read_fingerprint(value: Any) -> Fingerprint:
    table_id, era, ordinal, step, slot, is_loaded, is_local, communicates, lanes, gathers, inputs = check_list(value, 11, 11)
    return Fingerprint(
        check_str(table_id, MAX_TABLE_ID),
        _COUNT.decode(era),
        _COUNT.decode(ordinal),
        _COUNT.decode(step),
        integer(ALL_ROWS).decode(slot),
        check_bool(is_loaded),
        check_bool(is_local),
        check_bool(communicates),
        check_bytes(lanes),
        check_bytes(gathers),
        check_bytes(inputs),
    )
