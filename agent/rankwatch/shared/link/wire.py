"""The wire format: how each message is encoded, its limits, and the strict decoding. The only file that imports msgpack.

A message is a msgpack array ``[kind, field, ...]``; the fields are those of the kind's dataclass, in order. A newer minor
version may append fields and add kinds: this version ignores both. HELLO carries the version, and the collector refuses
another major version. ``decode`` is the only place that checks what comes from outside; a peer's fault raises ProtocolError,
which names the kind and the field. It makes all texts printable: names in one line.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import msgpack

from ...errors import ProtocolError
from ..types.fields import (
    Field,
    check_bool,
    check_list,
    check_str,
    cut,
    integer,
    lines,
    list_of,
    number,
    one_of,
    optional,
    same,
    string,
)
from ..types.frame import NO_STAGE
from ..types.gpu import Gpu
from ..types.messages import (
    MAX_STACK_LINE,
    MAX_STACK_LINES,
    MAX_START,
    OUTCOMES,
    PHASES,
    REMEDIES,
    Abort,
    Ack,
    Batch,
    Beat,
    Bye,
    Error,
    Fingerprinted,
    Fingerprints,
    Hello,
    Inspect,
    Inspected,
    Invite,
    Invited,
    LookedCloser,
    Message,
    Noticed,
    Off,
    Probe,
    Stay,
    Table,
    Tripped,
    Tune,
    Tuned,
    Unknown,
    Welcome,
)
from ..types.tuning import Check, Tuning
from .codec import (
    MAX_RANKS,
    MAX_ROWS,
    MAX_TEXT,
    check_moment,
    read_closeup,
    read_fingerprint,
    read_fingerprint_table,
    read_notice,
    read_summary,
    read_table,
    read_trip,
    write_closeup,
    write_fingerprint,
    write_fingerprint_table,
    write_notice,
    write_spec,
    write_summary,
    write_trip,
)

VERSION = (1, 0)
"""Major, minor."""

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
SHORT_BYTES, REMEMBERED_BYTES = 16, 1024 * 1024
"""Messages up to SHORT_BYTES and tables up to REMEMBERED_BYTES are decoded once and cached."""

SHORT_ARRAY = 64
"""An array header that claims so many items costs next to nothing, even if the items are missing."""

PART_BYTES = 16 * 1024
"""What is unpacked at once: in less than a millisecond."""

MAX_DEPTH = 16
"""Arrays in arrays of a long message."""

MAX_MODELS = 1 << 16
MAX_GPU_TEXT = 128
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
    return _decode_once(bytes(data)) if len(data) <= REMEMBERED_BYTES and is_table(data) else _decode(data)


def is_table(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are a TABLE or FINGERPRINTS."""
    return bool(data[1:7] == _TABLE_HEAD) or is_fingerprints(data)


def is_fingerprints(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are FINGERPRINTS."""
    return bool(data[1:14] == _FINGERPRINTS_HEAD)


def is_hello(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are a HELLO. With more than 15 fields, its header has three bytes."""
    return bool(data[1:7] == _HELLO_HEAD or data[3:9] == _HELLO_HEAD)


def is_columns(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are a BATCH or FINGERPRINT: they decode fast, however long."""
    return is_batch(data) or is_fingerprint(data)


def is_batch(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are a BATCH."""
    return bool(data[1:7] == _BATCH_HEAD)


def is_fingerprint(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are a FINGERPRINT."""
    return bool(data[1:13] == _FINGERPRINT_HEAD)


def is_beat(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are a BEAT."""
    return bool(data[1:6] == _BEAT_HEAD)


def is_abort(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are an ABORT."""
    return bool(data[1:7] == _ABORT_HEAD)


def is_trip(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are a TRIP."""
    return bool(data[1:6] == _TRIP_HEAD)


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
        return Unknown(cut(kind))
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


# Thousands of ranks send the same table within seconds, and decoding one takes milliseconds.
_decode_once = lru_cache(maxsize=8)(_decode)
# All ranks acknowledge an abort at once, in the same few bytes.
_decode_short = lru_cache(maxsize=64)(_decode)
_TABLE_HEAD, _BATCH_HEAD, _BEAT_HEAD, _ACK_HEAD, _ABORT_HEAD = map(msgpack.packb, ("TABLE", "BATCH", "BEAT", "ACK", "ABORT"))
_HELLO_HEAD, _FINGERPRINT_HEAD, _FINGERPRINTS_HEAD = map(msgpack.packb, ("HELLO", "FINGERPRINT", "FINGERPRINTS"))
_TRIP_HEAD = msgpack.packb("TRIP")


def _unpack(data: bytes | memoryview) -> Any:
    if len(data) <= PART_BYTES:
        try:  # most messages have no long arrays
            return msgpack.unpackb(data, **_STRICT)
        except ValueError:
            pass
    if is_columns(data):
        return _unpack_parts(memoryview(data), 2, SHORT_ARRAY)
    return _unpack_parts(memoryview(data), MAX_DEPTH, MAX_ROWS)


def _unpack_parts(data: memoryview, depth: int, most: int) -> Any:
    """As msgpack unpacks it, but part by part where it is long: other threads wait for one part alone.

    Nor does a header cost more than what follows it. To unpack a whole allocates what the headers claim before it sees that
    items are missing: 10 KB of nested headers of long arrays cost 80 MB, which msgpack 1.1 and older never free.

    Args:
        depth: how many arrays may lie in each other.
        most: how many items an array may have. In the place of an array that has more, or lies deeper, is _UNREAD.
    """
    if len(data) <= PART_BYTES:
        try:
            return msgpack.unpackb(data, **_STRICT)
        except ValueError:  # perhaps of an array's length
            pass
    if not data or not _is_array(data[0]):
        return msgpack.unpackb(data, **_STRICT)
    unpacker = msgpack.Unpacker(max_buffer_size=len(data), **_STRICT)
    unpacker.feed(data)
    count = unpacker.read_array_header()
    if not depth or count > most:
        return _UNREAD
    items: list[Any] = []
    for left in reversed(range(count)):
        begin = unpacker.tell()
        if begin == len(data) or not _is_array(data[begin]):
            items.append(unpacker.unpack())
        elif left:
            unpacker.skip()
            items.append(_unpack_parts(data[begin : unpacker.tell()], depth - 1, most))
        else:
            return [*items, _unpack_parts(data[begin:], depth - 1, most)]
    if unpacker.tell() < len(data):
        raise ValueError("more bytes follow")
    return items


def _is_array(head: int) -> bool:
    return head >> 4 == 0x9 or head in (0xDC, 0xDD)


_UNREAD = object()
"""No field takes it."""

_STRICT: dict[str, Any] = {
    "raw": False, "strict_map_key": True, "max_ext_len": 0, "max_map_len": 0, "max_array_len": SHORT_ARRAY,
}  # fmt: skip


_SEQ, _COUNT, _SECONDS, _TEXT = integer(), integer(), number(), lines(MAX_TEXT)
_MOMENT = Field(list, check_moment)
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


def _write_gpu(gpu: Gpu) -> list[str]:
    return [cut(text, MAX_GPU_TEXT) for text in (gpu.name, gpu.uuid, gpu.bus, gpu.driver)]


def _read_gpu(value: Any) -> Gpu:
    return Gpu(*(check_str(text, MAX_GPU_TEXT) for text in check_list(value, 4, SHORT_ARRAY)[:4]))


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
            "gpu": Field(_write_gpu, _read_gpu), "start": string(MAX_START), "model": integer(0, MAX_MODELS), "age": _SECONDS,
            "launch": string(MAX_START),
        },
    ),
    "WELCOME": (
        Welcome,
        {
            "run": string(), "heartbeat": number(0.01, 3600), "decision_window": number(0, 3600), "seq": _SEQ,
            "folder": string(), "host": string(), "window": integer(1),
        },
    ),
    "TABLE": (Table, {"table": Field(lambda table: [write_spec(spec) for spec in table.specs], read_table)}),
    "BATCH": (Batch, {"seq": _SEQ, "summary": Field(write_summary, read_summary)}),
    "TRIP": (Tripped, {"seq": _SEQ, "trip": Field(write_trip, read_trip)}),
    "CLOSEUP": (LookedCloser, {"seq": _SEQ, "closeup": Field(write_closeup, read_closeup)}),
    "FINGERPRINTS": (Fingerprints, {"table": Field(write_fingerprint_table, read_fingerprint_table)}),
    "FINGERPRINT": (Fingerprinted, {"seq": _SEQ, "fingerprint": Field(write_fingerprint, read_fingerprint)}),
    "OFF": (Off, {"seq": _SEQ, "text": _TEXT}),
    "BEAT": (
        Beat,
        {"moment": _MOMENT, "phase": one_of(PHASES), "queued": _COUNT, "dropped": _COUNT, "time": _SECONDS,
         "holds": _BOOL, "orphaned": _BOOL},
    ),
    "PROBE": (Probe, {"moment": _MOMENT}),
    "INSPECT": (Inspect, {"number": _SEQ}),
    "INSPECTED": (
        Inspected,
        {"number": _SEQ, "waits": string(MAX_STACK_LINE), "lines": list_of(string(MAX_STACK_LINE), MAX_STACK_LINES)},
    ),
    "ABORT": (Abort, {"reason": _TEXT, "rank": integer(-1, MAX_RANKS), "time": _SECONDS, "grace": number(0, 86400),
                       "hold_limit": number(0, 86400), "batch": integer(-1), "module": string(), "cause": string(64)}),
    "STAY": (Stay, {"seconds": number(0, 86400)}),
    "ACK": (Ack, {"seq": _SEQ, "abort": _BOOL, "handled": _SEQ}),
    "BYE": (Bye, {"seq": _SEQ, "outcome": one_of(OUTCOMES), "text": _TEXT, "moment": _MOMENT}),
    "ERROR": (Error, {"text": _TEXT, "remedy": one_of(REMEDIES)}),
    "NOTICE": (Noticed, {"seq": _SEQ, "notice": Field(write_notice, read_notice)}),
    "TUNE": (Tune, {"run": string(), "tuning": Field(_write_tuning, _read_tuning)}),
    "TUNED": (
        Tuned,
        {"runs": list_of(string(), MAX_PATTERNS), "ranks": _COUNT, "mistyped": list_of(string(MAX_TEXT), MAX_PATTERNS)},
    ),
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
