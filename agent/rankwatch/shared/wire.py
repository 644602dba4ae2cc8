"""The wire format: how each message is encoded, its limits, and the strict decoding. The only file that imports msgpack.

A message is a msgpack array ``[kind, field, ...]``; the fields are those of the kind's dataclass, in order. A newer minor
version may append fields and add kinds: this version ignores both. HELLO carries the version, and the collector refuses
another major version. ``decode`` is the only place that checks what comes from outside; a peer's fault raises ProtocolError,
which names the kind and the field.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from functools import lru_cache
from typing import Any

import msgpack

from ..errors import ProtocolError
from .cause import BadWeight, Operator, Trip
from .fields import (
    MAX_INT,
    MAX_NAME,
    Field,
    check_bool,
    check_bytes,
    check_list,
    check_str,
    cut,
    integer,
    list_of,
    number,
    one_of,
    optional,
    same,
    string,
)
from .frame import (
    NO_STAGE,
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
from .messages import (
    OUTCOMES,
    PHASES,
    REMEDIES,
    Abort,
    Ack,
    Batch,
    Beat,
    Bye,
    Error,
    Hello,
    Invite,
    Invited,
    Message,
    Noticed,
    Off,
    Probe,
    Table,
    Tripped,
    Tune,
    Tuned,
    Unknown,
    Welcome,
)
from .notice import Notice, NoticeKind
from .tuning import Check, Tuning

VERSION = (1, 0)
"""Major, minor."""

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
SHORT_BYTES, REMEMBERED_BYTES = 16, 1024 * 1024
"""Messages up to SHORT_BYTES and frame tables up to REMEMBERED_BYTES are decoded once and cached."""

SHORT_ARRAY = 64
"""An array header that claims so many items costs next to nothing, even if the items are missing."""

MAX_ROWS = 1_000_000
MAX_FRAMES = 200_000
MAX_RING = 10_000
MAX_TEXT = 16 * 1024
MAX_RANKS = 65_536
MAX_DIMS = 64
MAX_PATTERNS = 256
MAX_TRACED = 10_000
MAX_EVERY = 1 << 31


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    kind, layout = _LAYOUT_OF[type(message)]
    values = [pair.encode(getattr(message, name)) for name, pair in layout]
    packed: bytes = msgpack.packb([kind, *values], use_bin_type=True)
    return packed


def decode(data: bytes | memoryview) -> Message:
    """The message in ``data``.

    Raises:
        ProtocolError: too large, not msgpack, of a wrong shape, type, range or length.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    if len(data) <= SHORT_BYTES:
        return _decode_short(bytes(data))
    is_table = data[1:7] == _TABLE_HEAD
    return _decode_once(bytes(data)) if is_table and len(data) <= REMEMBERED_BYTES else _decode(data)


def is_batch(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are a BATCH."""
    return bool(data[1:7] == _BATCH_HEAD)


def is_beat(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are a BEAT."""
    return bool(data[1:6] == _BEAT_HEAD)


def is_ack(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are an ACK."""
    return bool(data[1:5] == _ACK_HEAD)


def _decode(data: bytes | memoryview) -> Message:
    try:
        parts = _unpack(data)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"not a message: {error or type(error).__name__}") from None
    if not isinstance(parts, list) or not parts or not isinstance(parts[0], str):
        raise ProtocolError("not a message: no array that begins with a kind")
    kind, *values = parts
    if kind not in _READERS:
        return Unknown(kind[:MAX_NAME])
    cls, names, readers = _READERS[kind]
    if len(values) < len(readers):
        raise ProtocolError(f"{kind}: {len(values)} fields instead of {len(readers)}")
    fields: list[Any] = []
    try:
        for read, value in zip(readers, values, strict=False):
            fields.append(read(value))
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{kind}.{names[len(fields)]}: {error}") from None
    message: Message = cls(*fields)
    return message


# Thousands of ranks send the same frame table within seconds, and decoding one takes milliseconds.
_decode_once = lru_cache(maxsize=8)(_decode)
# All ranks acknowledge an abort at once, in the same few bytes.
_decode_short = lru_cache(maxsize=64)(_decode)
_TABLE_HEAD, _BATCH_HEAD, _BEAT_HEAD, _ACK_HEAD = map(msgpack.packb, ("TABLE", "BATCH", "BEAT", "ACK"))


def _unpack(data: bytes | memoryview) -> Any:
    try:  # most messages have no long arrays
        return msgpack.unpackb(data, **_STRICT, max_array_len=SHORT_ARRAY)
    except ValueError:
        _check_claims(data)
        return msgpack.unpackb(data, **_STRICT)


_STRICT: dict[str, Any] = {"raw": False, "strict_map_key": True, "max_ext_len": 0, "max_map_len": 0}


def _check_claims(data: bytes | memoryview) -> None:
    """Raises what msgpack raises where a header claims more items than follow.

    Unpacking allocates what a header claims before it sees that the items are missing: 10 KB of nested headers of long
    arrays cost 80 MB, which msgpack 1.1 and older never free. Skipping allocates nothing.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    unpacker.skip()


# --- the data types in messages: how each is written, and how it is read and checked ----------------------------------


_COUNT, _BATCH, _SECONDS = integer(), integer(-1), number()
_STATES = bytes(State)


def _check_position(value: Any) -> Position:
    batch, evaluation, frame = check_list(value, 3, 3)
    return Position(_BATCH.decode(batch), _COUNT.decode(evaluation), _COUNT.decode(frame))


def _check_moment(value: Any) -> Moment:
    step, *position = check_list(value, 4, 4)
    return Moment(_COUNT.decode(step), *_check_position(position))


def _check_states(value: Any) -> bytes:
    states = check_bytes(value)
    if states != bytes(len(states)) and (unknown := states.translate(None, _STATES)):
        raise ValueError(f"{max(unknown)} is no state")
    return states


def _write_spec(spec: FrameSpec) -> list[Any]:
    rows = [[int(row.kind), cut(row.label), row.dtype] for row in spec.readings]
    aliases = [cut(alias) for alias in spec.aliases[:16]]
    return [cut(spec.module), cut(spec.module_class), rows, aliases, int(spec.phase)]


def _read_spec(value: Any) -> FrameSpec:
    module, module_class, rows, aliases, phase = check_list(value, 5, 5)
    return FrameSpec(
        check_str(module, MAX_NAME),
        check_str(module_class, MAX_NAME),
        tuple(_read_row(row) for row in check_list(rows, 0, MAX_ROWS)),
        tuple(check_str(alias, MAX_NAME) for alias in check_list(aliases, 0, 16)),
        Phase(integer(0, len(Phase) - 1).decode(phase)),
    )


def _read_row(value: Any) -> ReadingSpec:
    kind, label, dtype = check_list(value, 3, 3)
    return ReadingSpec(Kind(integer(0, len(Kind) - 1).decode(kind)), check_str(label, MAX_NAME), check_str(dtype, 64))


def _read_table(value: Any) -> FrameTable:
    table = FrameTable(tuple(map(_read_spec, check_list(value, 0, MAX_FRAMES))))
    if table.rows > MAX_ROWS:
        raise ValueError(f"{table.rows} rows are over the limit of {MAX_ROWS}")
    return table


def _write_summary(s: BatchSummary) -> list[Any]:
    return [
        s.batch, s.first_frame, s.optimizer_step, s.started_at, s.ended_at, s.traced,
        s.table_id, s.abs_min, s.abs_max, s.states,
    ]  # fmt: skip


def _read_summary(value: Any) -> BatchSummary:
    summary = BatchSummary._make(check_list(value, 10, 10))
    # All types are compared at once: thousands of batches come each second, and few other messages.
    if tuple(map(type, summary)) != _SUMMARY_TYPES:
        index = next(i for i, (part, kind) in enumerate(zip(summary, _SUMMARY_TYPES, strict=True)) if type(part) is not kind)
        raise ValueError(f"{summary._fields[index]}: expected {_SUMMARY_TYPES[index].__name__}")
    batch, first, step, started, ended, _, table_id, lows, highs, states = summary
    if min(batch, first, step) < 0 or max(batch, first, step) > MAX_INT:
        raise ValueError(f"batch, first_frame, optimizer_step: expected whole numbers from 0 to {MAX_INT}")
    if not (0 <= started <= _LATEST and 0 <= ended <= _LATEST):  # a nan fails the comparison
        raise ValueError(f"started_at, ended_at: expected seconds from 0 to {_LATEST:g}")
    if len(table_id) > MAX_TABLE_ID:
        raise ValueError(f"table_id: expected text of at most {MAX_TABLE_ID} characters")
    _check_states(states)
    # Only the receiver has the table that the columns must fit; that the columns fit each other is checked here.
    if len(lows) != len(highs) or len(lows) not in (4 * len(states), 8 * len(states)):
        raise ValueError(f"columns of {len(lows)}, {len(highs)}, {len(states)} bytes do not fit each other")
    return summary


_LATEST, MAX_TABLE_ID = 1e18, 64
_SUMMARY_TYPES = (int, int, int, float, float, bool, str, bytes, bytes, bytes)


def _write_frame(frame: Frame) -> list[Any]:
    code = frame.spec.typecode
    return [
        list(frame.position), _write_spec(frame.spec), pack(code, frame.abs_min), pack(code, frame.abs_max), frame.states
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
        Kind(integer(0, len(Kind) - 1).decode(kind)),
        check_str(dtype, 64),
        abs_min,
        abs_max,
        State(integer(0, len(State) - 1).decode(state)),
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
    return [cut(operator.name), inputs, _write_reading(operator.output), pack("d", operator.operands[:MAX_RING])]


def _read_operator(value: Any) -> Operator | None:
    if value is None:
        return None
    name, inputs, output, operands = check_list(value, 4, 4)
    return Operator(
        check_str(name, MAX_NAME),
        tuple(map(_read_reading, check_list(inputs, 0, MAX_RING))),
        _read_reading(output),
        unpack("d", check_bytes(operands)),
    )


def _write_trip(t: Trip) -> list[Any]:
    frames = [_write_frame(frame) for frame in t.frames[-MAX_RING:]]
    roots = [_write_reading(reading) for reading in t.root_inputs[:MAX_RING]]
    return [
        list(t.position), t.reading, frames, roots, t.optimizer_step,
        list(t.shape), t.numel, t.nan_count, t.inf_count, t.time, t.loss_scale,
        [_write_weight(weight) for weight in t.weights[:MAX_RING]], _write_operator(t.operator),
        [cut(label) for label in t.harmless[:MAX_RING]], cut(t.collective), t.bad_since,
        cut(t.received), cut(t.changed), t.gradients,
    ]  # fmt: skip


def _read_trip(value: Any) -> Trip:
    position, reading, frames, roots, step, shape, numel, nans, infs, time, scale, *evidence = check_list(value, 19, 19)
    weights, operator, harmless, collective, bad_since, received, changed, gradients = evidence
    trip = Trip(
        position=_check_position(position),
        reading=integer(0, MAX_ROWS).decode(reading),
        frames=tuple(map(_read_frame, check_list(frames, 1, MAX_RING))),
        root_inputs=tuple(map(_read_reading, check_list(roots, 0, MAX_RING))),
        optimizer_step=_COUNT.decode(step),
        shape=tuple(_COUNT.decode(size) for size in check_list(shape, 0, MAX_DIMS)),
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
    )
    if trip.frame.position != trip.position or trip.reading >= len(trip.frame.spec.readings):
        raise ValueError("the last frame of the ring is not the one that tripped")
    return trip


def _write_notice(n: Notice) -> list[Any]:
    names = [cut(n.module), cut(n.module_class), cut(n.label), n.dtype]
    return [int(n.kind), *names, n.since, n.batch, n.value, n.growth]


def _read_notice(value: Any) -> Notice:
    kind_value, module, module_class, label, dtype, since, batch, size, growth = check_list(value, 9, 9)
    kind = NoticeKind(integer(0, len(NoticeKind) - 1).decode(kind_value))
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


_SEQ, _TEXT = integer(), string(MAX_TEXT)
_MOMENT = Field(list, _check_moment)
_BOOL = Field(same, check_bool)
_PATTERNS = optional(list_of(string(), MAX_PATTERNS))
_CHECKS = one_of(frozenset(Check))
_TUNING = {
    "every": optional(integer(1, MAX_EVERY)),
    "modules": _PATTERNS,
    "ignore": _PATTERNS,
    "trace_batch_nums": optional(list_of(integer(), MAX_TRACED)),
    "check": optional(Field(str, lambda value: Check(_CHECKS.decode(value)))),
}


def _write_tuning(tuning: Tuning) -> list[Any]:
    return [field.encode(getattr(tuning, name)) for name, field in _TUNING.items()]


def _read_tuning(value: Any) -> Tuning:
    values = check_list(value, len(_TUNING), SHORT_ARRAY)  # a newer minor version may append options
    options: dict[str, Any] = {}
    for (name, field), option in zip(_TUNING.items(), values, strict=False):
        try:
            options[name] = field.decode(option)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None
    return Tuning(**options)


_LAYOUTS: dict[str, tuple[type[Any], dict[str, Field]]] = {
    "HELLO": (
        Hello,
        {
            "major": integer(0, 1 << 16), "minor": integer(0, 1 << 16),
            "job": string(), "restart": integer(0, 1 << 31),
            "rank": integer(0, MAX_RANKS - 1), "world_size": integer(1, MAX_RANKS),
            "local_rank": integer(0, MAX_RANKS), "host": string(), "pid": integer(), "device": string(), "torch": string(),
            "incarnation": string(64), "stage": integer(NO_STAGE, MAX_RANKS),
        },
    ),
    "WELCOME": (
        Welcome,
        {"run": string(), "heartbeat": number(0.01, 3600), "decision_window": number(0, 3600), "seq": _SEQ},
    ),
    "TABLE": (Table, {"table": Field(lambda table: [_write_spec(spec) for spec in table.specs], _read_table)}),
    "BATCH": (Batch, {"seq": _SEQ, "summary": Field(_write_summary, _read_summary)}),
    "TRIP": (Tripped, {"seq": _SEQ, "trip": Field(_write_trip, _read_trip)}),
    "OFF": (Off, {"seq": _SEQ, "text": _TEXT}),
    "BEAT": (
        Beat,
        {"moment": _MOMENT, "phase": one_of(PHASES), "queued": _COUNT, "dropped": _COUNT, "time": _SECONDS},
    ),
    "PROBE": (Probe, {"moment": _MOMENT}),
    "ABORT": (Abort, {"reason": _TEXT, "rank": integer(-1, MAX_RANKS), "time": _SECONDS, "grace": number(0, 86400)}),
    "ACK": (Ack, {"seq": _SEQ, "abort": _BOOL}),
    "BYE": (Bye, {"seq": _SEQ, "outcome": one_of(OUTCOMES), "text": _TEXT, "moment": _MOMENT}),
    "ERROR": (Error, {"text": _TEXT, "remedy": one_of(REMEDIES)}),
    "NOTICE": (Noticed, {"seq": _SEQ, "notice": Field(_write_notice, _read_notice)}),
    "TUNE": (Tune, {"run": string(), "tuning": Field(_write_tuning, _read_tuning)}),
    "TUNED": (Tuned, {"runs": list_of(string(), MAX_PATTERNS), "ranks": _COUNT}),
    "INVITE": (Invite, {"job": string()}),
    "INVITED": (Invited, {"job": string(), "client_public": string(40), "client_secret": string(40)}),
}  # fmt: skip

_READERS = {
    kind: (cls, tuple(fields), tuple(field.decode for field in fields.values())) for kind, (cls, fields) in _LAYOUTS.items()
}
_LAYOUT_OF = {cls: (kind, tuple(fields.items())) for kind, (cls, fields) in _LAYOUTS.items()}

_CHECKED: list[tuple[type[Any], dict[str, Field]]] = [*_LAYOUTS.values(), (Tuning, _TUNING)]
for _cls, _fields in _CHECKED:
    if [field.name for field in dataclasses.fields(_cls)] != list(_fields):
        raise AssertionError(f"the layout of {_cls.__name__} does not follow its fields")
